"""vLLM's own Prometheus series, kept per engine.

Every `PrometheusStatLogger` first removes all `vllm:*` collectors from the process-wide registry, so
a second engine would erase the first one's series, and so would the same engine started anew. A subclass made
per engine keeps its series in a registry of its own; so do the helpers it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import PrometheusStatLogger

from baton_kv.contract import TransferOutcome

HELPERS = ("_spec_decoding_cls", "_kv_connector_cls", "_ec_connector_cls", "_perf_metrics_cls")
FAMILIES: dict[str, type[Any]] = {
    "_gauge_cls": Gauge,
    "_counter_cls": Counter,
    "_histogram_cls": Histogram,
}

Transferred = Callable[[list[TransferOutcome]], None]
Prefilled = Callable[[str, int, float], None]
Thought = Callable[[int, float], None]
Encoded = Callable[[int], None]


class EngineSeries:
    """One engine's series. They go on where they were when the engine is started anew.

    Attributes:
        registry: where they are read.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[str, Any] = {}

    def stat_logger(
        self,
        transferred: Transferred = lambda _outcomes: None,
        prefilled: Prefilled = lambda _request_id, _tokens, _seconds: None,
        progressed: Callable[[], None] = lambda: None,
        thought: Thought = lambda _steps, _seconds: None,
        encoded: Encoded = lambda _images: None,
    ) -> type[PrometheusStatLogger]:
        """A `PrometheusStatLogger` that keeps these series.

        Args:
            transferred: told what the KV connector reports, on the event loop.
            prefilled: told of every finished request, by its id, how many tokens were prefilled, in how long.
            progressed: told of every step.
            thought: told of latent steps, how many and how long they took.
            encoded: told how many images the model's encoder ran for.

        vLLM wants a class here: anything else it takes for a per-engine logger and adds its own too.
        """
        families = {name: staticmethod(partial(self._one, family)) for name, family in FAMILIES.items()}
        members: dict[str, Any] = dict(families)
        for name in HELPERS:
            helper = getattr(PrometheusStatLogger, name)
            own = {key: families[key] for key in families if hasattr(helper, key)}
            members[name] = type(helper.__name__, (helper,), own)
        members["record"] = _record(transferred, prefilled, progressed, thought, encoded)
        return type("EnginePrometheusStatLogger", (PrometheusStatLogger,), members)

    def _one(self, family: type[Any], name: str, *args: Any, **options: Any) -> Any:
        """The collector of this name, made once."""
        if name not in self._made:
            self._made[name] = family(name, *args, **(options | {"registry": self.registry}))
        return self._made[name]

    def forget_levels(self) -> None:
        """Drop what the gauges say: of an engine that is gone nothing is running, waiting or in use."""
        for collector in self._made.values():
            if isinstance(collector, Gauge):
                collector.clear()


def _record(
    transferred: Transferred,
    prefilled: Prefilled,
    progressed: Callable[[], None],
    thought: Thought,
    encoded: Encoded,
) -> Callable[..., None]:
    def record(self: Any, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        progressed()
        PrometheusStatLogger.record(self, scheduler_stats, iteration_stats, *args, **kwargs)
        for request in iteration_stats.finished_requests if iteration_stats is not None else ():
            tokens = request.num_prompt_tokens - request.num_cached_tokens
            prefilled(request.request_id or "", tokens, request.prefill_time)
        reported = getattr(scheduler_stats, "kv_connector_stats", None)
        if reported:
            transferred([TransferOutcome.from_message(row) for row in reported.get("outcomes", [])])
            if (latent := reported.get("latent")) is not None:
                thought(int(latent["steps"]), float(latent["seconds"]))
            encoded(int(reported.get("encoded", 0)))

    return record
