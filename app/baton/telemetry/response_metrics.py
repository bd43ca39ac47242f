"""Metrics of stored responses."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class ResponseMetrics:
    """The series of stored responses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.stored = Counter(
            "baton_responses_stored_total",
            "Answers of `/v1/responses` that were to be stored: `stored`, or `not_stored` for want of room.",
            ("result",),
            registry=registry,
        )
        for result in ("stored", "not_stored"):
            self.stored.labels(result)
        self.number = Gauge("baton_responses", "Stored responses.", registry=registry)
        self.bytes = Gauge("baton_responses_bytes", "Bytes that stored responses take.", registry=registry)
