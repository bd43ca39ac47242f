"""Change a handoff's pin, label and lifetime, under the lock that all gateways over the store share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from baton.config.groups import HandoffSettings
from baton.errors import HandoffPinsFull
from baton.handoffs.records.record import HandoffRecord, Usage, scope_of
from baton.handoffs.records.repository import Edit, OtherUsage

PINNED_SHARE = 0.5
"""Share of the budget that may be pinned, divided among the tenants; the rest stays for unpinned handoffs."""

PINNED_NON_KV_SHARE = 0.25
"""Share of the budget for the images and records of pinned handoffs: half of what all of these may take."""


@dataclass(frozen=True)
class ChangeRules:
    """The rules by which one gateway changes handoffs.

    Attributes:
        settings: the gateway's.
        pin: pins a handoff's KV in the store, or unpins it; returns whether it is pinned then.
        pinned_kv: returns the bytes of KV that pins protect, by scope, if this handoff were pinned too.
    """

    settings: HandoffSettings
    pin: Callable[[HandoffRecord, bool], bool]
    pinned_kv: Callable[[HandoffRecord], dict[str, int]]

    def apply(self, changes: dict[str, Any], now: float, unsaved: Iterable[Usage], /) -> Edit:
        """Return an edit that sets `label`, `ttl_s` (from now) or `pin`, as a client asked.

        Args:
            changes: the fields that are set.
            now: seconds since the epoch.
            unsaved: usage of the handoffs that are in memory only.

        Raises:
            HandoffPinsFull: by the edit, when `pin` would take more than may be pinned.
        """

        def edit(record: HandoffRecord, others: OtherUsage) -> None:
            if "pin" in changes:
                self._set_pin(record, bool(changes["pin"]), [*unsaved, *others()])
            if "label" in changes:
                record.label = changes["label"]
            if changes.get("ttl_s") is not None:
                self._renew(record, changes["ttl_s"], now)

        return edit

    def settle(self, size: int, unsaved: Iterable[Usage], /) -> Edit:
        """Return an edit for the end of the saving request: it notes the KV's size and sets a requested pin.

        Args:
            size: bytes of the KV.
            unsaved: as for `apply`.
        """

        def edit(record: HandoffRecord, others: OtherUsage) -> None:
            record.bytes = size
            if record.pin:
                try:
                    self._set_pin(record, True, [*unsaved, *others()])
                except HandoffPinsFull:
                    self._set_pin(record, False, [])

        return edit

    def _set_pin(self, record: HandoffRecord, pin: bool, others: list[Usage]) -> None:
        if pin and not self._fits(record, others):
            raise HandoffPinsFull()
        record.pin = pin
        if record.bytes or not pin:  # KV that is not saved yet is pinned when it is
            record.pin = self.pin(record, pin)

    def _fits(self, record: HandoffRecord, others: list[Usage]) -> bool:
        """Return whether a pin fits what may be pinned in all, and its tenant's share of that."""
        budget, mine = PINNED_SHARE * self.settings.whole_budget, record.usage
        non_kv = mine.non_kv_bytes + sum(other.non_kv_bytes for other in others if other.pin)
        if non_kv > PINNED_NON_KV_SHARE * self.settings.whole_budget:
            return False
        pinned = Counter(self.pinned_kv(record))
        for other in others:
            pinned[scope_of(other.tenant)] += other.non_kv_bytes if other.pin else 0
        pinned[scope_of(mine.tenant)] += mine.non_kv_bytes
        share = budget / len(pinned)
        return pinned[scope_of(mine.tenant)] <= share and pinned.total() <= budget

    def _renew(self, record: HandoffRecord, seconds: float, now: float) -> None:
        """Set the lifetime to `seconds` from now, within the longest one that the settings allow."""
        lives = min(seconds, self.settings.ttl_s)
        latest = record.created_at + max(self.settings.max_life_s, self.settings.ttl_s)
        until = min(now + lives, max(latest, record.expires_at))
        if until > now:  # otherwise the clock jumped, and the lifetime stays as it is
            record.expires_at, record.ttl_s = until, until - now
