"""The metrics of what requests wait for."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Histogram

WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of the buckets, in seconds."""


class AdmissionMetrics:
    """The series of what waits for an engine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.waiting = Gauge(
            "baton_admission_waiting",
            "Requests that wait for their turn.",
            ("engine",),
            registry=registry,
        )
        self.running = Gauge(
            "baton_admission_running",
            "Requests the engine has been given.",
            ("engine",),
            registry=registry,
        )
        self.seconds = Histogram(
            "baton_admission_wait_seconds",
            "Seconds a request waited for its turn, of those that got one.",
            ("engine",),
            buckets=WAITS,
            registry=registry,
        )


class QueueMetrics:
    """The series of the queues that are not an engine's own: plugins, uploads, images, large bodies.

    The label `engine` is empty for a queue that all engines share.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("queue", "engine")
        self.waiting = Gauge(
            "baton_queue_waiting",
            "Requests, or parts of them, that wait for a place.",
            labels,
            registry=registry,
        )
        self.running = Gauge("baton_queue_running", "Places that are taken.", labels, registry=registry)
        self.seconds = Histogram(
            "baton_queue_wait_seconds",
            "Seconds waited for a place, by those that got one.",
            labels,
            buckets=WAITS,
            registry=registry,
        )
