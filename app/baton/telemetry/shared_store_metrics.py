"""Count the exchanges with the shared store of handoffs."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.telemetry.far_store_metrics import FarStoreMetrics

ERRORS = {
    "timeout": "",
    "full": "",
    "error": "",
    "resting": "it was left alone after failures",
    "unreadable": "a value that no gateway of the pool wrote, which was left out",
}


class SharedStoreMetrics(FarStoreMetrics):
    """The series of the shared store."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "baton_shared_store", "the shared store", ERRORS)
