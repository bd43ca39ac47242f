"""Change a handoff's pin, label and life, while no gateway over the store changes others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from baton.config.groups import HandoffSettings
from baton.errors import HandoffPinsFull
from baton.handoffs.record import HandoffRecord, Holding
from baton.handoffs.repository import Holdings

PINNED_SHARE = 0.5
"""Of the budget, shared by the tenants there are; the rest stays for handoffs that nobody pinned."""

PINNED_BESIDE_SHARE = 0.25
"""Of the budget, for the images and records of pinned handoffs: half of what all of these may take."""


@dataclass(frozen=True)
class Rules:
    """The rules of one gateway.

    Attributes:
        settings: the gateway's.
        pin: pins a handoff's KV in the store, or unpins it; whether it is pinned then.
    """

    settings: HandoffSettings
    pin: Callable[[HandoffRecord, bool], bool]

    def apply(
        self, changes: dict[str, Any], now: float, elsewhere: Iterable[Holding], /
    ) -> Callable[[HandoffRecord, Holdings], None]:
        """What a client changes: `label`, `ttl_s` (from now) or `pin`.

        Args:
            changes: the fields that are set.
            now: seconds since the epoch.
            elsewhere: what handoffs hold that are not on disk.
        """

        def edit(record: HandoffRecord, holdings: Holdings) -> None:
            if "pin" in changes:
                self._set_pin(record, bool(changes["pin"]), [*elsewhere, *holdings()])
            if "label" in changes:
                record.label = changes["label"]
            if changes.get("ttl_s") is not None:
                self._renew(record, changes["ttl_s"], now)

        return edit

    def settle(self, size: int, elsewhere: Iterable[Holding], /) -> Callable[[HandoffRecord, Holdings], None]:
        """What the end of its request changes: its KV is there, and a pin that was asked for counts.

        Args:
            size: bytes of the KV.
            elsewhere: as for `apply`.
        """

        def edit(record: HandoffRecord, holdings: Holdings) -> None:
            record.bytes = size
            if record.pin:
                try:
                    self._set_pin(record, True, [*elsewhere, *holdings()])
                except HandoffPinsFull:
                    self._set_pin(record, False, [])

        return edit

    def _set_pin(self, record: HandoffRecord, pin: bool, others: list[Holding]) -> None:
        if pin and record.holding.bytes and not self._fits(record.holding, others):
            raise HandoffPinsFull()
        record.pin = pin
        if record.bytes or not pin:  # of what is not there yet it is looked at when it comes
            record.pin = self.pin(record, pin)

    def _fits(self, mine: Holding, others: list[Holding]) -> bool:
        """Whether a handoff may be pinned: within what all may pin, and within its tenant's share of that."""
        room = PINNED_SHARE * int(self.settings.budget)
        beside = mine.beside + sum(other.beside for other in others if other.pin)
        if beside > PINNED_BESIDE_SHARE * int(self.settings.budget):
            return False
        pinned: Counter[str] = Counter()
        for other in others:
            pinned[other.tenant] += other.bytes if other.pin else 0
        share = room / len({mine.tenant, *pinned})
        return pinned[mine.tenant] + mine.bytes <= share and pinned.total() + mine.bytes <= room

    def _renew(self, record: HandoffRecord, seconds: float, now: float) -> None:
        """Let a handoff live so long from now, but no longer in all than one may."""
        lives = min(seconds, self.settings.ttl_s)
        latest = record.created_at + max(self.settings.max_life_s, self.settings.ttl_s)
        until = min(now + lives, max(latest, record.expires_at))
        if until > now:  # else the clock jumped, and it keeps the life it has
            record.expires_at, record.ttl_s = until, until - now
