"""Metrics of the images in requests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from baton.telemetry.series import OTHER, SECONDS


class ImageMetrics:
    """The series of images in requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.images = Counter(
            "baton_images_total",
            "Images in requests: read, or the error code they were refused with.",
            ("outcome",),
            registry=registry,
        )
        for outcome in ("read", "invalid_image", "image_too_large", "image_fetch_failed", OTHER):
            self.images.labels(outcome)
        self.rewritten = Counter(
            "baton_images_rewritten_total",
            "Images that were turned upright or given another mode before an engine got them.",
            registry=registry,
        )
        self.bytes = Counter("baton_image_bytes_total", "Bytes of the images read.", registry=registry)
        self.seconds = Histogram(
            "baton_image_read_seconds",
            "Seconds until an image was read or refused, with waiting and fetching.",
            buckets=SECONDS,
            registry=registry,
        )
