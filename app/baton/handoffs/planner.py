"""Whether starting from a handoff's KV beats computing it again, by what the engine did lately."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from baton.engines.port import Engine
from baton.handoffs.record import HandoffRecord

MEASURE_EVERY = 2
"""One in so many requests that had better compute loads a little, to see whether that still holds."""
MEASURE_BYTES = 1024 * 1024


class Choice(StrEnum):
    LOAD = "load"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Decision:
    """What one request does about a handoff's KV.

    Attributes:
        choice: load it, or compute it again.
        limit: load at most so many tokens; None: all.
        load_s: what loading all of it would take, in seconds; None: not known yet.
        prefill_s: what computing all of it would take.
    """

    choice: Choice
    limit: int | None = None
    load_s: float | None = None
    prefill_s: float | None = None

    @property
    def loads(self) -> bool:
        """Whether any of it is loaded."""
        return self.limit != 0

    def public(self) -> dict[str, object]:
        """What the client is shown."""
        return {
            "decision": self.choice.value,
            "estimated_load_ms": _ms(self.load_s),
            "estimated_prefill_ms": _ms(self.prefill_s),
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


class Planner:
    """Decides request by request. What is resident in the engine is used whatever is decided here."""

    def __init__(self) -> None:
        self._recomputed: Counter[str] = Counter()

    def decide(self, engine: Engine, record: HandoffRecord) -> Decision:
        """Load or compute one handoff's KV on one engine."""
        load_s = engine.throughput.load_s(record.bytes) if record.bytes else None
        prefill_s = engine.throughput.prefill_s(len(record.tokens), record.latent_steps)
        thought = record.latent_steps > 0  # anew it may be another thought
        if load_s is None or prefill_s is None or thought:
            return Decision(Choice.LOAD, None, load_s, prefill_s)
        if load_s <= prefill_s:
            self._recomputed[engine.name] = 0
            return Decision(Choice.LOAD, None, load_s, prefill_s)
        self._recomputed[engine.name] += 1
        limit = 0
        if self._recomputed[engine.name] % MEASURE_EVERY == 0:
            limit = max(1, MEASURE_BYTES * len(record.tokens) // record.bytes)
        return Decision(Choice.RECOMPUTE, limit, load_s, prefill_s)
