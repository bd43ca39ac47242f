"""Summarise the steps since the last log line as text."""

from __future__ import annotations

from collections import defaultdict, deque

from baton_stats.steps import Phase, Spent

QUEUE_TIMES_KEPT = 4096
PERCENTILES = (50, 90, 99)


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
        at: the percentile, 1 to 100.
    """
    return ordered[max(0, -(-at * len(ordered) // 100) - 1)]
