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
"""Most prompts that are remembered, of all tenants, to see whether one comes again."""


@dataclass
class Usage:
    """How many of a tenant's automatic handoffs were used.

    Attributes:
        saved: number of saves.
        used: number of requests that continued one of them, which shared more with no other.
    """

    saved: int = 0
    used: int = 0


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
        self._begun: OrderedDict[bytes, float] = OrderedDict()
        self._usage: OrderedDict[str, Usage] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()

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
        shared = array("i", prompt[: 1 << max(0, len(prompt).bit_length() - 1)])
        digest = hashlib.blake2b(shared.tobytes(), digest_size=16, person=_person(tenant)).digest()
        now = self._clock()
        before = self._begun.pop(digest, None)
        begun = before is not None and now - before < BEGUN_S
        self._begun[digest] = before if begun and before is not None else now
        if len(self._begun) > SEEN:
            self._begun.popitem(last=False)
        return begun

    def _seen_before(self, tenant: str, prompt: Sequence[int], stored: int) -> bool:
        """Return whether a prompt began so before, up to the fewest tokens that would be worth saving."""
        begins = array("i", prompt[: stored + self._least])
        digest = hashlib.blake2b(begins.tobytes(), digest_size=16, person=_person(tenant)).digest()
        seen = digest in self._seen
        self._seen[digest] = None
        self._seen.move_to_end(digest)
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return seen


def _person(tenant: str) -> bytes:
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest()
