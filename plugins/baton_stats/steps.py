"""Derive the phase and duration of each engine step from vLLM's statistics. Plain values only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The phase of a step: what it computed.

    Attributes:
        PREFILL: only prompts, whole or in chunks; always the case for pooling models.
        DECODE: one more token for each request.
        MIXED: both, so that decoding requests wait for prompts.
        STALLED: nothing, although there are requests: their KV is being loaded or a grammar compiled.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    STALLED = "stalled"


@dataclass(frozen=True)
class Step:
    """vLLM's statistics after one step.

    Attributes:
        running: number of requests in the batch after the step.
        waiting: number of requests not in the batch.
        kv_usage: share of the KV blocks in use, 0 to 1.
        finished: number of requests of the batch that finished.
        first_token_s: for each request that got its first token, seconds since its arrival.
        gaps_s: for each request that got a further token, seconds since the token before.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    finished: int = 0
    first_token_s: Sequence[float] = ()
    gaps_s: Sequence[float] = ()

    @property
    def outputs(self) -> int:
        """Return the number of requests that got a token in this step."""
        return len(self.first_token_s) + len(self.gaps_s)


@dataclass(frozen=True)
class Spent:
    """The cost of one step.

    Attributes:
        phase: what the step computed.
        seconds: duration of the step.
        running: number of requests in its batch.
        waiting: mean number of requests that waited during the step.
        kv_usage: share of the KV blocks in use during the step, 0 to 1.
        gaps: number of tokens that followed another token of their request.
        gap_s: sum of the seconds between these tokens and the ones before.
    """

    phase: Phase
    seconds: float
    running: int
    waiting: float
    kv_usage: float
    gaps: int
    gap_s: float


class StepClock:
    """Computes the cost of each step of one engine.

    Args:
        ahead: whether the engine schedules the next step before it reports the last (`async_scheduling`).
    """

    def __init__(self, clock: Callable[[], float], *, ahead: bool) -> None:
        self._clock = clock
        self._ahead = ahead
        self._reported_at = clock()
        self._before = Step()

    def measure(self, step: Step) -> Spent:
        """Return the cost of the step that just ended."""
        now = self._clock()
        seconds = self._seconds(now - self._reported_at, step)
        batch = self._batch(step)
        spent = Spent(
            phase=_phase(step, batch),
            seconds=seconds,
            running=max(batch, step.outputs),
            waiting=(self._before.waiting + step.waiting) / 2,
            kv_usage=max(
                self._before.kv_usage, step.kv_usage
            ),  # blocks are allocated before a step and freed after it
            gaps=len(step.gaps_s),
            gap_s=sum(step.gaps_s),
        )
        self._reported_at, self._before = now, step
        return spent

    def _seconds(self, since_last: float, step: Step) -> float:
        """Return a step's duration; the first after an idle time began when its request arrived."""
        if self._before.running or self._before.waiting:
            return since_last
        return min((since_last, *step.first_token_s)) if step.first_token_s else 0.0

    def _batch(self, step: Step) -> int:
        """Return the number of requests for which the step was scheduled."""
        return self._before.running if self._ahead else step.running + step.finished


def _phase(step: Step, batch: int) -> Phase:
    """Return the phase; a request in the batch that got no token was still in its prompt."""
    if not step.outputs:
        return Phase.PREFILL if step.running or batch else Phase.STALLED
    if not step.gaps_s:
        return Phase.PREFILL
    return Phase.MIXED if step.first_token_s or batch > step.outputs else Phase.DECODE
