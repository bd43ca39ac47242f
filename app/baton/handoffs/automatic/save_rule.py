"""Decide which contexts are worth saving, for requests that do not ask for it."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.handoffs.records.prefix_index import PrefixMatch

LONG = 8
"""A prompt without messages is long if it has so many times the fewest tokens that are worth saving."""
TRIED = 32
"""So many contexts of a tenant are saved before it counts how many of them were used."""
USED_SHARE = 1 / 8
"""With a smaller share in use, a tenant's new contexts are not saved until one of them is seen again."""
COUNTED = 256
"""After so many saves the counts of a tenant are halved, so that what it does now counts most."""
BEGUN_S = 5.0
"""For so long after a save was chosen, no other is that shares half of its prompt with it."""
TENANTS = 10_000
SEEN = 10_000
"""Most prompts that are remembered, of all tenants, to see whether one comes again; each has a share."""


@dataclass
class Usage:
    """How many of a tenant's automatic handoffs were used.

    Attributes:
        saved: number of saves.
        used: number of requests that continued one of them, which shared more with no other.
    """

    saved: int = 0
    used: int = 0


class Prompts:
    """Prompts that tenants sent, each with a number. Whoever sent most forgets first."""

    def __init__(self) -> None:
        self._tenants: dict[str, OrderedDict[bytes, float]] = {}
        self._count = 0

    def pop(self, tenant: str, prompt: Sequence[int]) -> float | None:
        """Forget a prompt; returns its number, None: it is not known."""
        found = self._tenants.get(tenant, OrderedDict()).pop(_digest(prompt), None)
        self._count -= found is not None
        return found

    def add(self, tenant: str, prompt: Sequence[int], number: float) -> None:
        """Remember a prompt that is not known."""
        self._tenants.setdefault(tenant, OrderedDict())[_digest(prompt)] = number
        self._count += 1
        if self._count <= SEEN:
            return
        over = tenant
        if len(self._tenants[tenant]) <= SEEN // len(self._tenants):
            over = max(self._tenants, key=lambda each: len(self._tenants[each]))
        self._tenants[over].popitem(last=False)
        self._count -= 1
        if not self._tenants[over]:
            del self._tenants[over]


class SaveRule:
    """Saves what is likely to be continued: conversations, long prompts, and what is seen twice.

    Requests that share only a long beginning, such as one question about each of many documents, leave
    contexts that nobody continues. Once most of a tenant's are like that, only those are saved that go on
    after a saved one or are seen again.

    Args:
        least: fewest tokens, beyond those that are stored already, that are worth saving.
        clock: monotonic seconds.
    """

    def __init__(self, least: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._least = least
        self._clock = clock
        self._begun = Prompts()
        self._usage: OrderedDict[str, Usage] = OrderedDict()
        self._seen = Prompts()

    def is_worth_saving(
        self, tenant: str, prompt: Sequence[int], match: PrefixMatch | None, *, conversation: bool
    ) -> bool:
        """Return whether the context of a request should be saved when it is answered.

        Args:
            tenant: its owner.
            prompt: its token ids.
            match: the stored context that it shares most tokens with.
            conversation: whether it consists of messages.

        Raises:
            OverflowError: a token id does not fit into 32 bits.
        """
        again = self._seen_before(tenant, prompt, match.tokens if match is not None else 0)
        if match is not None and match.continues:
            return True
        likely = conversation or len(prompt) >= LONG * self._least
        worth = again or (likely and not self._mostly_unused(tenant))
        return worth and not self._just_begun(tenant, prompt)

    def saved(self, tenant: str) -> None:
        """Count a save."""
        usage = self._usage_of(tenant)
        usage.saved += 1
        if usage.saved >= COUNTED:
            usage.saved, usage.used = usage.saved // 2, usage.used // 2

    def used(self, tenant: str) -> None:
        """Count a request that continued a saved context."""
        self._usage_of(tenant).used += 1

    def _mostly_unused(self, tenant: str) -> bool:
        usage = self._usage_of(tenant)
        return usage.saved >= TRIED and usage.used < usage.saved * USED_SHARE

    def _usage_of(self, tenant: str) -> Usage:
        usage = self._usage.setdefault(tenant, Usage())
        self._usage.move_to_end(tenant)
        if len(self._usage) > TENANTS:
            self._usage.popitem(last=False)
        return usage

    def _just_begun(self, tenant: str, prompt: Sequence[int]) -> bool:
        """Return whether a prompt that shares at least half of this one was found worth saving just now.

        What agents that begin at the same time share is saved once.
        """
        shared = prompt[: 1 << max(0, len(prompt).bit_length() - 1)]
        now = self._clock()
        before = self._begun.pop(tenant, shared)
        begun = before is not None and now - before < BEGUN_S
        self._begun.add(tenant, shared, before if begun and before is not None else now)
        return begun

    def _seen_before(self, tenant: str, prompt: Sequence[int], stored: int) -> bool:
        """Return whether a prompt began so before, up to the fewest tokens that would be worth saving."""
        begins = prompt[: stored + self._least]
        seen = self._seen.pop(tenant, begins) is not None
        self._seen.add(tenant, begins, self._clock())
        return seen


def _digest(prompt: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", prompt).tobytes(), digest_size=16).digest()
