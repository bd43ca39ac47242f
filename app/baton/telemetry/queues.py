"""Metrics of the queues that requests wait in."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Histogram

from baton.telemetry.series import SECONDS


class AdmissionMetrics:
    """The series of the queues for engines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.waiting = Gauge(
            "baton_admission_waiting",
            "Requests that wait for the engine.",
            ("engine",),
            registry=registry,
        )
        self.running = Gauge(
            "baton_admission_running",
            "Requests that the engine works on.",
            ("engine",),
            registry=registry,
        )
        self.seconds = Histogram(
            "baton_admission_wait_seconds",
            "Seconds that requests waited for the engine, of those that it took.",
            ("engine",),
            buckets=SECONDS,
            registry=registry,
        )


class QueueMetrics:
    """The series of all other queues: plugins, uploads, images, large bodies.

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
            "Seconds waited for a place, of those that got one.",
            labels,
            buckets=SECONDS,
            registry=registry,
        )
