"""Count the requests that are sent on to a server elsewhere."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from baton.telemetry.series import SECONDS

OUTCOMES = ("answered", "refused", "busy", "failed", "unreachable", "timeout", "cancelled")


class RemoteMetrics:
    """The series of one engine that is a server elsewhere."""

    def __init__(self, registry: CollectorRegistry, engine: str) -> None:
        self._engine = engine
        self._requests = Counter(
            "baton_remote_requests_total",
            "Requests that were sent on to the server at an engine's `url`.",
            ("engine", "outcome"),
            registry=registry,
        )
        for outcome in OUTCOMES:
            self._requests.labels(engine, outcome)
        self._first_byte = Histogram(
            "baton_remote_first_byte_seconds",
            "Seconds until that server's answer began.",
            ("engine",),
            buckets=SECONDS,
            registry=registry,
        )
        self._first_byte.labels(engine)

    def count(self, outcome: str) -> None:
        """Count a request that is over."""
        self._requests.labels(self._engine, outcome).inc()

    def began(self, seconds: float) -> None:
        """Count an answer that has begun."""
        self._first_byte.labels(self._engine).observe(seconds)
