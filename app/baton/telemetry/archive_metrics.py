"""Count the exchanges with the archive of handoffs."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.telemetry.series import SECONDS


class ArchiveMetrics:
    """The series of the archive."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "baton_archive_op_duration_seconds",
            "Seconds that a request to the archive took.",
            ("op",),
            buckets=SECONDS,
            registry=registry,
        )
        self._errors = Counter(
            "baton_archive_errors_total",
            "Requests to the archive that failed: `timeout` or `error`; `refused`: its credentials do not "
            "allow it; `tampered`: an object is not what a gateway wrote; `resting`: it was left alone after "
            "failures.",
            ("kind",),
            registry=registry,
        )
        for kind in ("timeout", "error", "refused", "tampered", "resting"):
            self._errors.labels(kind)
        self._bytes = Counter(
            "baton_archive_bytes_total",
            "Bytes of KV and images that went to the archive (`push`) or came from it (`fetch`).",
            ("direction",),
            registry=registry,
        )
        for direction in ("push", "fetch"):
            self._bytes.labels(direction)
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
        self._up = Gauge(
            "baton_archive_up",
            "1 after a request to the archive that succeeded, 0 after one that failed, else NaN.",
            registry=registry,
        )
        self._up.set(math.nan)

    def count(self, operation: str, seconds: float) -> None:
        """Count a request that succeeded."""
        self._seconds.labels(operation).observe(seconds)
        self._up.set(1)

    def failed(self, kind: str) -> None:
        """Count a request that failed."""
        self._errors.labels(kind).inc()
        self._up.set(0)

    def not_used(self, kind: str) -> None:
        """Count a request that was not made, or whose answer was not used."""
        self._errors.labels(kind).inc()

    def moved(self, direction: str, size: int) -> None:
        """Count bytes that were pushed or fetched."""
        self._bytes.labels(direction).inc(size)

    def handoff(self, what: str) -> None:
        """Count what became of a handoff."""
        self._handoffs.labels(what).inc()
