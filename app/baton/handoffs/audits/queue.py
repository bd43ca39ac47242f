"""Hold the audits that wait until their engines have nothing else to do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from baton.engines.idle import is_idle
from baton.engines.kv_transfer import TransferRequest
from baton.engines.port import Engine
from baton.handoffs.records.record import HandoffRecord

MOST = 64
"""Most audits of an engine that wait."""
MOST_BYTES = 64 * 1024 * 1024
"""Most bytes of the prompts and images of all audits that wait."""
WAITS_S = 600.0
"""An audit whose engine was never idle for so long is dropped."""
BYTES_PER_TOKEN = 16
SAVED_WITHIN_S = 60.0
"""A request's own save is waited for, but not longer: what it saved may have to be moved away too."""


@dataclass(eq=False)
class Audit:
    """One answer that was computed from loaded KV.

    Attributes:
        engine: the engine that loaded it.
        record: the handoff whose KV was loaded.
        transfer: the request to the engine, with its report.
        noted_at: monotonic seconds.
        tries: number of times that the audit was interrupted.
    """

    engine: Engine
    record: HandoffRecord
    transfer: TransferRequest
    noted_at: float = field(default_factory=time.monotonic)
    tries: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that it takes in memory, about: Python's integers, and images."""
        report, prompt = self.transfer.report, self.transfer.prompt or ()
        tokens = len(prompt) + len(report.prompt_ids) + len(report.output_ids)
        return 1024 + BYTES_PER_TOKEN * tokens + sum(len(image.image.data) for image in self.transfer.images)

    @property
    def saved(self) -> str | None:
        """Key of the entry that the request saves; None: it saves none."""
        return self.transfer.save if self.transfer.report.saves else None

    @property
    def age_s(self) -> float:
        """Seconds since it was noted."""
        return time.monotonic() - self.noted_at

    @property
    def may_begin(self) -> bool:
        """Whether its request's save has ended."""
        over = self.transfer.report.save_over.is_set()
        return self.saved is None or over or self.age_s > SAVED_WITHIN_S


class AuditQueue:
    """The waiting audits, the oldest first."""

    def __init__(self) -> None:
        self._waiting: list[Audit] = []
        self._idle: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, audit: Audit) -> bool:
        """Add an audit; returns False if there are too many."""
        size = audit.bytes + sum(each.bytes for each in self._waiting)
        mine = sum(each.engine is audit.engine for each in self._waiting)
        if mine >= MOST or size > MOST_BYTES:
            return False
        self._waiting.append(audit)
        return True

    def take(self) -> Audit | None:
        """Take the oldest audit of an engine that was idle at the last call too; None: there is none.

        Between the two calls there should be a moment: an agent's next request comes at once.
        """
        before = self._idle
        engines = {each.engine.name: each.engine for each in self._waiting}
        self._idle = {name for name, engine in engines.items() if is_idle(engine)}
        for place, each in enumerate(self._waiting):
            if each.engine.name in self._idle & before and each.may_begin:
                return self._waiting.pop(place)
        return None

    def drop_old(self) -> int:
        """Drop the audits that have waited too long; returns their number."""
        young = [each for each in self._waiting if each.age_s <= WAITS_S]
        dropped, self._waiting = len(self._waiting) - len(young), young
        return dropped
