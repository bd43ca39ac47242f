"""Publish the steps: Prometheus series, whose families all engines of a process share, and the log line."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from functools import cache

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from baton_stats.steps import Phase, Spent

ENGINE = ("model_name", "engine")
"""vLLM's own labels, so that these series can be joined with vLLM's."""
QUEUE_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Bucket bounds, each at most twice the one before up to 60 s; vLLM's begin at 0.3 s."""
BANDS = ((0.5, "0-50"), (0.75, "50-75"), (0.9, "75-90"), (1.0, "90-100"))
"""Upper bound of each band of KV cache usage, as a share, and its label in per cent."""
_creation = threading.Lock()
QUEUE_TIMES_KEPT = 4096
PERCENTILES = (50, 90, 99)


class Families:
    """The metric families. Dashboards depend on their names and labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.queue = Histogram(
            "baton_stats_queue_seconds",
            "Seconds that requests waited to be scheduled, counted when they are over.",
            ENGINE,
            buckets=QUEUE_SECONDS,
            registry=registry,
        )
        self.steps = Counter(
            "baton_stats_steps_total", "Steps, by what they computed.", (*ENGINE, "phase"), registry=registry
        )
        self.step_seconds = Counter(
            "baton_stats_step_seconds_total",
            "Seconds in steps, by what they computed; all phases together: the engine's busy time.",
            (*ENGINE, "phase"),
            registry=registry,
        )
        self.gaps = Counter(
            "baton_stats_token_gaps_total",
            "Tokens that followed another of their request, by what their step computed.",
            (*ENGINE, "phase"),
            registry=registry,
        )
        self.gap_seconds = Counter(
            "baton_stats_token_gap_seconds_total",
            "Seconds between a token and the one before it, by what its step computed.",
            (*ENGINE, "phase"),
            registry=registry,
        )
        self.kv_usage_seconds = Counter(
            "baton_stats_kv_usage_seconds_total",
            "Share of the KV blocks in use, times the busy seconds it was so.",
            ENGINE,
            registry=registry,
        )
        self.kv_seconds = Counter(
            "baton_stats_kv_seconds_total",
            "Busy seconds, by how many per cent of the KV blocks were in use.",
            (*ENGINE, "usage"),
            registry=registry,
        )
        self.request_seconds = Counter(
            "baton_stats_request_seconds_total",
            "Requests running or waiting, times the busy seconds they were so.",
            (*ENGINE, "state"),
            registry=registry,
        )
        self.errors = Counter(
            "baton_stats_errors_total", "Steps that could not be counted.", ENGINE, registry=registry
        )


class StepSeries:
    """The series of one engine; they continue when the engine is restarted.

    Args:
        model_name: value of the label `model_name`, as in vLLM's own series.
        engine: index of the engine among those of one model.
    """

    def __init__(self, families: Families, model_name: str, engine: int) -> None:
        labels = (model_name, str(engine))
        self._queue = families.queue.labels(*labels)
        self._steps = {phase: families.steps.labels(*labels, phase) for phase in Phase}
        self._seconds = {phase: families.step_seconds.labels(*labels, phase) for phase in Phase}
        decoding = (Phase.DECODE, Phase.MIXED)
        self._gaps = {phase: families.gaps.labels(*labels, phase) for phase in decoding}
        self._gap_seconds = {phase: families.gap_seconds.labels(*labels, phase) for phase in decoding}
        self._kv_usage = families.kv_usage_seconds.labels(*labels)
        self._kv = [(most, families.kv_seconds.labels(*labels, name)) for most, name in BANDS]
        self._running = families.request_seconds.labels(*labels, "running")
        self._waiting = families.request_seconds.labels(*labels, "waiting")
        self._errors = families.errors.labels(*labels)

    def add(self, spent: Spent) -> None:
        """Count one step, at a cost that does not depend on the size of the batch."""
        seconds = spent.seconds
        self._steps[spent.phase].inc()
        if spent.gaps:
            self._gaps[spent.phase].inc(spent.gaps)
            self._gap_seconds[spent.phase].inc(spent.gap_s)
        if seconds <= 0:
            return
        self._seconds[spent.phase].inc(seconds)
        self._kv_usage.inc(spent.kv_usage * seconds)
        next((series for most, series in self._kv if spent.kv_usage <= most), self._kv[-1][1]).inc(seconds)
        self._running.inc(spent.running * seconds)
        self._waiting.inc(spent.waiting * seconds)

    def queued(self, seconds: float) -> None:
        """Count a finished request and its queue time in seconds."""
        self._queue.observe(seconds)

    def failed(self) -> None:
        """Count a step whose statistics could not be read."""
        self._errors.inc()


def process_families() -> Families:
    """Return the families in the process's registry, created once even if threads build engines at once."""
    with _creation:
        return _made()


@cache
def _made() -> Families:
    return Families(REGISTRY)


class Recent:
    """Statistics of the steps since the last call of `line`."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._seconds: defaultdict[Phase, float] = defaultdict(float)
        self._gaps: defaultdict[Phase, int] = defaultdict(int)
        self._gap_seconds: defaultdict[Phase, float] = defaultdict(float)
        self._kv_seconds = 0.0
        self._kv_most = 0.0
        self._queued: deque[float] = deque(maxlen=QUEUE_TIMES_KEPT)

    def add(self, spent: Spent) -> None:
        """Add a step."""
        self._seconds[spent.phase] += spent.seconds
        self._gaps[spent.phase] += spent.gaps
        self._gap_seconds[spent.phase] += spent.gap_s
        self._kv_seconds += spent.kv_usage * spent.seconds
        self._kv_most = max(self._kv_most, spent.kv_usage)

    def queued(self, seconds: float) -> None:
        """Add the queue time of a finished request, in seconds."""
        self._queued.append(seconds)

    def line(self) -> str | None:
        """Return the summary and start a new one; None if the engine was idle."""
        busy = sum(self._seconds.values())
        if not busy:
            return None
        shares = [f"{phase} {seconds / busy:.0%}" for phase, seconds in self._seconds.items() if seconds]
        parts = [f"Busy {busy:.1f} s: {', '.join(shares)}"]
        parts.append(f"KV cache in use: {self._kv_seconds / busy:.0%}, at most {self._kv_most:.0%}")
        parts += [
            f"Token gap in {phase} steps: {self._gap_seconds[phase] / count * 1000:.0f} ms"
            for phase, count in self._gaps.items()
            if count
        ]
        if self._queued:
            waited = sorted(self._queued)
            quantiles = [f"p{at} {percentile(waited, at) * 1000:.0f} ms" for at in PERCENTILES]
            parts.append(f"Queue time of {len(waited)} requests: {', '.join(quantiles)}")
        self._clear()
        return "; ".join(parts)


def percentile(ordered: list[float], at: int) -> float:
    """Return the nearest-rank percentile of ascending values.

    Args:
        ordered: values in ascending order, at least one.
    """
    return ordered[max(0, -(-at * len(ordered) // 100) - 1)]
