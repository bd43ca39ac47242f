"""Count the exchanges with a store elsewhere: the series that each such store has."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.telemetry.series import SECONDS


class FarStoreMetrics:
    """The series of one store.

    Args:
        registry: where they are registered.
        prefix: what their names begin with.
        store: what the store is called in their descriptions.
        kinds: the kinds of errors, each with what it means; an empty text needs none.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str, store: str, kinds: dict[str, str]) -> None:
        self._seconds = Histogram(
            f"{prefix}_op_duration_seconds",
            f"Seconds that an exchange with {store} took.",
            ("op",),
            buckets=SECONDS,
            registry=registry,
        )
        told = "; ".join(f"`{kind}`: {text}" if text else f"`{kind}`" for kind, text in kinds.items())
        self._errors = Counter(
            f"{prefix}_errors_total",
            f"Exchanges with {store} that failed, or were not used: {told}.",
            ("kind",),
            registry=registry,
        )
        for kind in kinds:
            self._errors.labels(kind)
        self._bytes = Counter(
            f"{prefix}_bytes_total",
            f"Bytes of KV and images that went to {store} (`push`) or came from it (`fetch`).",
            ("direction",),
            registry=registry,
        )
        for direction in ("push", "fetch"):
            self._bytes.labels(direction)
        self._up = Gauge(
            f"{prefix}_up",
            f"1 after an exchange with {store} that succeeded, 0 after one that failed, else NaN.",
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

    def not_used(self, kind: str) -> None:
        """Count an exchange that was not tried, or whose answer was not used."""
        self._errors.labels(kind).inc()

    def moved(self, direction: str, size: int) -> None:
        """Count bytes that were pushed or fetched."""
        self._bytes.labels(direction).inc(size)
