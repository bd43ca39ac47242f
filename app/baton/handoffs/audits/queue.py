"""Hold the audits that wait until their engines have nothing else to do."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engines.kv_transfer import TransferRequest
from baton.engines.port import Engine, EngineState
from baton.handoffs.records.record import HandoffRecord

MOST = 64
"""Most audits that wait."""
MOST_TOKENS = 1_000_000
"""Most prompt tokens of all audits that wait; they take 8 bytes each, and their objects."""


@dataclass(eq=False)
class Audit:
    """One answer that was computed from loaded KV.

    Attributes:
        engine: the engine that loaded it.
        record: the handoff whose KV was loaded.
        transfer: the request to the engine, with its report.
        tries: number of times that the audit was interrupted.
    """

    engine: Engine
    record: HandoffRecord
    transfer: TransferRequest
    tries: int = 0

    @property
    def tokens(self) -> int:
        """Number of its prompt's tokens."""
        return len(self.transfer.report.prompt_ids)


class AuditQueue:
    """The waiting audits, the oldest first."""

    def __init__(self) -> None:
        self._waiting: list[Audit] = []
        self._idle: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, audit: Audit) -> bool:
        """Add an audit; returns False if there are too many."""
        tokens = audit.tokens + sum(each.tokens for each in self._waiting)
        if len(self._waiting) >= MOST or tokens > MOST_TOKENS:
            return False
        self._waiting.append(audit)
        return True

    def take(self) -> Audit | None:
        """Take the oldest audit of an engine that was idle at the last call too; None: there is none.

        Between the two calls there should be a moment: an agent's next request comes at once.
        """
        before = self._idle
        engines = {each.engine.name: each.engine for each in self._waiting}
        self._idle = {name for name, engine in engines.items() if _idle(engine)}
        for place, each in enumerate(self._waiting):
            if each.engine.name in self._idle & before:
                return self._waiting.pop(place)
        return None


def _idle(engine: Engine) -> bool:
    return engine.state is EngineState.READY and not engine.active
