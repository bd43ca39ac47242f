"""What an engine's steps were spent on, from what vLLM tells after each. Plain values only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What a step computed."""

    PREFILL = "prefill"
    """Prompts only, whole ones or chunks; for pooling models always."""
    DECODE = "decode"
    """One more token for each of its requests."""
    MIXED = "mixed"
    """Both: those that decode wait for the prompts."""
    STALLED = "stalled"
    """Nothing, though requests are there: their KV is on its way, or a grammar is compiled."""


@dataclass(frozen=True)
class Step:
    """What is told after one step.

    Attributes:
        running: requests in the batch now.
        waiting: requests not in it.
        kv_usage: share of the KV blocks in use, 0 to 1.
        over: requests that were in the batch and are over.
        first_token_s: of each request whose prompt was done: seconds since it arrived.
        gaps_s: of each request that decoded: seconds since its last token.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    over: int = 0
    first_token_s: Sequence[float] = ()
    gaps_s: Sequence[float] = ()

    @property
    def outputs(self) -> int:
        """Requests that got something of it."""
        return len(self.first_token_s) + len(self.gaps_s)


@dataclass(frozen=True)
class Spent:
    """What one step took.

    Attributes:
        phase: what it computed.
        seconds: how long the engine was at it.
        running: requests it was for.
        waiting: requests that waited meanwhile.
        kv_usage: share of the KV blocks in use meanwhile, 0 to 1.
        gaps: tokens that followed another of their request.
        gap_s: the sum of the seconds between those two.
    """

    phase: Phase
    seconds: float
    running: int
    waiting: float
    kv_usage: float
    gaps: int
    gap_s: float


class StepClock:
    """Turns what is told after each step of one engine into what it took.

    Args:
        clock: seconds on a monotonic clock.
        ahead: the engine schedules the next step before it tells of the last (`async_scheduling`).
    """

    def __init__(self, clock: Callable[[], float], *, ahead: bool) -> None:
        self._clock = clock
        self._ahead = ahead
        self._told_at = clock()
        self._before = Step()

    def tell(self, step: Step) -> Spent:
        """What the step that just ended took."""
        now = self._clock()
        seconds = self._seconds(now - self._told_at, step)
        batch = self._batch(step)
        spent = Spent(
            phase=_phase(step, batch),
            seconds=seconds,
            running=max(batch, step.outputs),
            waiting=(self._before.waiting + step.waiting) / 2,
            kv_usage=max(self._before.kv_usage, step.kv_usage),  # taken before a step, given back after it
            gaps=len(step.gaps_s),
            gap_s=sum(step.gaps_s),
        )
        self._told_at, self._before = now, step
        return spent

    def _seconds(self, since_last: float, step: Step) -> float:
        """An idle engine's first step began when its request came, which only a first token tells."""
        if self._before.running or self._before.waiting:
            return since_last
        return min((since_last, *step.first_token_s)) if step.first_token_s else 0.0

    def _batch(self, step: Step) -> int:
        """Requests the step was scheduled for."""
        return self._before.running if self._ahead else step.running + step.over


def _phase(step: Step, batch: int) -> Phase:
    """A request in the batch that got nothing of the step was in the midst of its prompt."""
    if not step.outputs:
        return Phase.PREFILL if step.running or batch else Phase.STALLED
    if not step.gaps_s:
        return Phase.PREFILL
    return Phase.MIXED if step.first_token_s or batch > step.outputs else Phase.DECODE
