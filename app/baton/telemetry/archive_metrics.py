"""Count the exchanges with the archive of handoffs."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.telemetry.far_store_metrics import FarStoreMetrics

ERRORS = {
    "timeout": "",
    "error": "",
    "refused": "its credentials do not allow it",
    "tampered": "an object is not what a gateway wrote",
    "resting": "it was left alone after failures",
}


class ArchiveMetrics(FarStoreMetrics):
    """The series of the archive.

    Attributes:
        waiting: handoffs that are to be written.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "baton_archive", "the archive", ERRORS)
        self._handoffs = Counter(
            "baton_archive_handoffs_total",
            "Handoffs that were `written` to the archive, `found` there, `deleted` or `expired` there, or "
            "not written for now (`failed`).",
            ("what",),
            registry=registry,
        )
        for what in ("written", "found", "deleted", "expired", "failed"):
            self._handoffs.labels(what)
        self.waiting = Gauge(
            "baton_archive_waiting", "Handoffs that are to be written to the archive.", registry=registry
        )

    def handoff(self, what: str) -> None:
        """Count what became of a handoff."""
        self._handoffs.labels(what).inc()
