"""Keep a Prometheus registry of its own for each vLLM engine, and forward each step's report.

Every `PrometheusStatLogger` first removes all `vllm:*` collectors from the process-wide registry, so a second
engine, or the same engine after a restart, would erase the series of the first. A subclass made per engine,
and the helpers that it makes, keep their series in a registry of that engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import PrometheusStatLogger

from baton_kv.contract import TransferOutcome

log = structlog.get_logger("baton.engine")
HELPERS = ("_spec_decoding_cls", "_kv_connector_cls", "_ec_connector_cls", "_perf_metrics_cls")
FAMILIES: dict[str, type[Any]] = {
    "_gauge_cls": Gauge,
    "_counter_cls": Counter,
    "_histogram_cls": Histogram,
}


@dataclass(frozen=True)
class StepListeners:
    """Callbacks for what an engine reports after a step; called on the event loop.

    Attributes:
        transferred: called with the outcomes of loads and saves that the KV connector reported.
        prefilled: called for every finished request with its id, tokens prefilled and seconds taken.
        progressed: called after every step.
        latent_computed: called with the number of latent steps computed and the seconds they took.
        encoded: called with the number of images that the model's encoder ran for.
    """

    transferred: Callable[[list[TransferOutcome]], None] = lambda _outcomes: None
    prefilled: Callable[[str, int, float], None] = lambda _request_id, _tokens, _seconds: None
    progressed: Callable[[], None] = lambda: None
    latent_computed: Callable[[int, float], None] = lambda _steps, _seconds: None
    encoded: Callable[[int], None] = lambda _images: None


class EngineSeries:
    """One engine's series. They continue when the engine is restarted.

    Attributes:
        registry: the registry that holds them.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[str, Any] = {}

    def stat_logger(self, listeners: StepListeners | None = None) -> type[PrometheusStatLogger]:
        """Make a `PrometheusStatLogger` class that keeps these series and calls `listeners`.

        vLLM must get a class here: it takes anything else for a per-engine logger and adds its own too.
        """
        families = {name: staticmethod(partial(self._one, family)) for name, family in FAMILIES.items()}
        members: dict[str, Any] = dict(families)
        for name in HELPERS:
            helper = getattr(PrometheusStatLogger, name)
            own = {key: families[key] for key in families if hasattr(helper, key)}
            members[name] = type(helper.__name__, (helper,), own)
        members["record"] = _record(listeners or StepListeners())
        return type("EnginePrometheusStatLogger", (PrometheusStatLogger,), members)

    def _one(self, family: type[Any], name: str, *args: Any, **options: Any) -> Any:
        """Return the collector of this name, made at the first call."""
        if name not in self._made:
            self._made[name] = family(name, *args, **(options | {"registry": self.registry}))
        return self._made[name]

    def forget_levels(self) -> None:
        """Clear the gauges: on an engine that has stopped, nothing runs, waits or is in use."""
        for collector in self._made.values():
            if isinstance(collector, Gauge):
                collector.clear()


def _record(listeners: StepListeners) -> Callable[..., None]:
    def record(self: Any, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        listeners.progressed()
        PrometheusStatLogger.record(self, scheduler_stats, iteration_stats, *args, **kwargs)
        for request in iteration_stats.finished_requests if iteration_stats is not None else ():
            tokens = request.num_prompt_tokens - request.num_cached_tokens
            listeners.prefilled(request.request_id or "", tokens, request.prefill_time)
        reported = getattr(scheduler_stats, "kv_connector_stats", None)
        if reported:
            listeners.transferred(list(_outcomes(reported.get("outcomes", []))))
            if (latent := reported.get("latent")) is not None:
                listeners.latent_computed(int(latent["steps"]), float(latent["seconds"]))
            listeners.encoded(int(reported.get("encoded", 0)))

    return record


def _outcomes(rows: Iterable[Mapping[str, Any]]) -> Iterator[TransferOutcome]:
    """Parse the connector's report. An error would end the engine, so unreadable rows are left out."""
    for row in rows:
        try:
            yield TransferOutcome.from_message(row)
        except ValueError as error:
            log.warning("transfer_report_unreadable", reason=str(error))
