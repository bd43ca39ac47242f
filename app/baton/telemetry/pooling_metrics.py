"""Metrics of requests that run through an IO processor plugin."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.telemetry.series import SECONDS

UNIT = re.compile(r"[a-z][a-z_]{0,31}")
MAX_UNITS = 8
"""Units that one engine's plugin may count in; further units are an error."""


class PoolingMetrics:
    """The series of plugin requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "baton_pooling_requests_total",
            "Requests through an IO processor plugin, by how they ended.",
            ("engine", "outcome"),
            registry=registry,
        )
        self.running = Gauge(
            "baton_pooling_requests_running",
            "Requests that a plugin works on now.",
            ("engine",),
            registry=registry,
        )
        self.seconds = Histogram(
            "baton_pooling_step_duration_seconds",
            "Seconds that requests spent in a step; `encode` includes the plugin's work on outputs.",
            ("engine", "step"),
            buckets=SECONDS,
            registry=registry,
        )
        self.prompts = Counter(
            "baton_pooling_prompts_total",
            "Prompts that plugins made of requests.",
            ("engine",),
            registry=registry,
        )
        self._units: dict[str, set[str]] = {}
        self._amounts = Counter(
            "baton_pooling_amounts_total",
            "Amounts of answers, in the plugin's own units: pixels, for scenes.",
            ("engine", "unit"),
            registry=registry,
        )
        self.left_behind = Gauge(
            "baton_pooling_threads_left_behind",
            "Threads that still run a plugin's code though their request is over.",
            ("engine",),
            registry=registry,
        )

    def count_amounts(self, engine: str, amounts: Mapping[str, float]) -> None:
        """Add the amounts of one answer.

        Raises:
            ValueError: a unit is no plain word, there are more than `MAX_UNITS`, or an amount is negative or
                infinite.
        """
        units = self._units.setdefault(engine, set())
        for unit, amount in amounts.items():
            if not UNIT.fullmatch(unit) or not math.isfinite(amount) or amount < 0:
                raise ValueError("an amount is not a plain word and a number from zero up")
            if unit not in units and len(units) >= MAX_UNITS:
                raise ValueError(f"amounts in more than {MAX_UNITS} units")
            units.add(unit)
            self._amounts.labels(engine, unit).inc(amount)
