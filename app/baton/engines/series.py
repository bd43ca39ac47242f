"""vLLM's own Prometheus series, kept per engine.

Every `PrometheusStatLogger` first removes all `vllm:*` collectors from the process-wide registry, so
a second engine would erase the first one's series. A subclass made per engine writes to a registry
of its own; the same is done for the metric families its helpers make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import PrometheusStatLogger

HELPERS = ("_spec_decoding_cls", "_kv_connector_cls", "_ec_connector_cls", "_perf_metrics_cls")
FAMILIES: dict[str, type[Any]] = {
    "_gauge_cls": Gauge,
    "_counter_cls": Counter,
    "_histogram_cls": Histogram,
}

Transferred = Callable[[list[dict[str, Any]]], None]
Prefilled = Callable[[int, float], None]


def stat_logger_for(
    registry: CollectorRegistry,
    transferred: Transferred = lambda _outcomes: None,
    prefilled: Prefilled = lambda _tokens, _seconds: None,
) -> type[PrometheusStatLogger]:
    """A `PrometheusStatLogger` whose series live in `registry`.

    Args:
        registry: the engine's.
        transferred: told what the KV connector reports, on the event loop.
        prefilled: told of every finished request how many tokens of its prompt were computed, in how long.

    vLLM wants a class here: anything else it takes for a per-engine logger and adds its own too.
    """
    families = {name: _in_registry(family, registry) for name, family in FAMILIES.items()}
    members: dict[str, Any] = dict(families)
    for name in HELPERS:
        helper = getattr(PrometheusStatLogger, name)
        own = {key: families[key] for key in families if hasattr(helper, key)}
        members[name] = type(helper.__name__, (helper,), own)
    members["record"] = _record(transferred, prefilled)
    return type("EnginePrometheusStatLogger", (PrometheusStatLogger,), members)


def _record(transferred: Transferred, prefilled: Prefilled) -> Callable[..., None]:
    def record(self: Any, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        PrometheusStatLogger.record(self, scheduler_stats, iteration_stats, *args, **kwargs)
        for request in iteration_stats.finished_requests if iteration_stats is not None else ():
            prefilled(request.num_prompt_tokens - request.num_cached_tokens, request.prefill_time)
        reported = getattr(scheduler_stats, "kv_connector_stats", None)
        if reported:
            transferred(reported.get("outcomes", []))

    return record


def _in_registry(family: type[Any], registry: CollectorRegistry) -> type[Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        family.__init__(self, *args, **(kwargs | {"registry": registry}))

    return type(family.__name__, (family,), {"__init__": init})
