"""Write the `/metrics` page: the gateway's own series and those of every engine.

vLLM's `vllm:*` series come from the engines' registries and pass through unchanged; families of the same name
are merged, because Prometheus refuses a page that names one twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric


@dataclass(frozen=True)
class MergedRegistry:
    """Several registries read as one: families of the same name become one family.

    Attributes:
        prefixes: of the names of the families to show.
    """

    registries: tuple[CollectorRegistry, ...]
    prefixes: tuple[str, ...] = ("baton_", "vllm:", "process_", "python_")

    def collect(self) -> Iterator[Metric]:
        return _merged(self._wanted())

    def _wanted(self) -> Iterable[Metric]:
        for registry in self.registries:
            for metric in registry.collect():
                if metric.name.startswith(self.prefixes):
                    yield metric

    def page(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self)


def labelled(families: Iterable[Metric], **labels: str) -> list[Metric]:
    """Return copies of the families in which every sample has these labels too."""
    copies = []
    for family in families:
        copy = _empty_copy(family)
        copy.samples = [sample._replace(labels={**sample.labels, **labels}) for sample in family.samples]
        copies.append(copy)
    return copies


def page_of(families: Iterable[Metric]) -> bytes:
    """Return the page of these families, in Prometheus' text format; those of one name become one."""
    return generate_latest(_Families(list(families)))


@dataclass(frozen=True)
class _Families:
    families: list[Metric]

    def collect(self) -> Iterator[Metric]:
        return _merged(self.families)


def _merged(families: Iterable[Metric]) -> Iterator[Metric]:
    found: dict[str, Metric] = {}
    for metric in families:
        known = found.setdefault(metric.name, _empty_copy(metric))
        known.samples.extend(metric.samples)
    yield from found.values()


def _empty_copy(metric: Metric) -> Metric:
    return Metric(metric.name, metric.documentation, metric.type, metric.unit)
