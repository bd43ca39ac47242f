"""Count the exchanges with the shared store of handoffs."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.telemetry.series import SECONDS


class SharedStoreMetrics:
    """The series of the shared store."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "baton_shared_store_op_duration_seconds",
            "Seconds that an exchange with the shared store took.",
            ("op",),
            buckets=SECONDS,
            registry=registry,
        )
        self._errors = Counter(
            "baton_shared_store_errors_total",
            "Exchanges with the shared store that failed: `timeout`, `full` or `error`; `resting`: it was "
            "left alone after failures.",
            ("kind",),
            registry=registry,
        )
        for kind in ("timeout", "full", "error", "resting"):
            self._errors.labels(kind)
        self._bytes = Counter(
            "baton_shared_store_bytes_total",
            "Bytes of KV and images that went to the shared store (`push`) or came from it (`fetch`).",
            ("direction",),
            registry=registry,
        )
        for direction in ("push", "fetch"):
            self._bytes.labels(direction)
        self._up = Gauge(
            "baton_shared_store_up",
            "1 after an exchange with the shared store that succeeded, 0 after one that failed, else NaN.",
            registry=registry,
        )
        self._up.set(math.nan)

    def count(self, operation: str, seconds: float) -> None:
        """Count an exchange that succeeded."""
        self._seconds.labels(operation).observe(seconds)
        self._up.set(1)

    def failed(self, kind: str) -> None:
        """Count an exchange that failed."""
        self._errors.labels(kind).inc()
        self._up.set(0)

    def rested(self) -> None:
        """Count an exchange that was not tried."""
        self._errors.labels("resting").inc()

    def moved(self, direction: str, size: int) -> None:
        """Count bytes that were pushed or fetched."""
        self._bytes.labels(direction).inc(size)
