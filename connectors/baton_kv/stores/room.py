"""Keep the entries of a file store within its budget: when to list them, and which of them to evict."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass

from baton_kv.contract import EXPENDABLE
from baton_kv.stores.base import StoreFull
from baton_kv.stores.tree import Listing, StoredEntry, StoreTree

LIST_EVERY_S = 60.0
"""The entries are listed that often at least while some are written, whatever else changes the folder."""
AHEAD_SHARE = 64
"""A full store with many entries is emptied by its budget divided by this, so that it is not listed for each
entry."""
MANY_ENTRIES = 512


@dataclass(frozen=True)
class Held:
    """The entries of a store when it was listed last. What was removed since then only makes more room.

    Attributes:
        size: bytes of its files.
        written: bytes of all entries that had ever been placed.
        listed_at: monotonic seconds.
    """

    size: int
    written: int
    listed_at: float

    def at_most(self, written: int) -> float:
        """Return the most bytes of its files, with `written` placed until now; infinity: list them again."""
        old = time.monotonic() > self.listed_at + LIST_EVERY_S
        return math.inf if old else self.size + written - self.written


class Room:
    """The budget in bytes of one store, None for no limit. Several processes may write into the same one."""

    def __init__(self, tree: StoreTree, budget: int | None) -> None:
        self._tree = tree
        self._budget = budget
        self._held: Held | None = None
        self._written = 0

    def require_possible(self, size: int) -> None:
        """Refuse an entry that is larger than the budget.

        Raises:
            StoreFull: it is.
        """
        if self._budget is not None and size > self._budget:
            raise StoreFull(f"an entry of {size} bytes does not fit the store's budget of {self._budget}")

    def make(
        self, size: int, *, replaced: tuple[str, str] | None = None, linked: str = "", written_as: str = ""
    ) -> None:
        """Evict entries until `size` more bytes fit the budget; called with the store's lock held.

        Args:
            size: bytes to be written.
            replaced: scope and file name of the entry that is overwritten.
            linked: stem of the names that are linked for the entry that is being written.
            written_as: name in `writing` of the file with these bytes; what others write counts too.

        Raises:
            StoreFull: they do not fit even if all unpinned entries are evicted.
            StoreError: the store could not be listed.
        """
        if self._budget is None:
            return
        beside, written = self._tree.bytes_beside(), self._tree.written()
        expendable = replaced is not None and replaced[1].startswith(EXPENDABLE)
        # What clients asked for does not make room for what nobody did: that meets the budget at its own end.
        beside += self._tree.being_written(written_as, without="" if expendable else EXPENDABLE)
        damaged, self._written = written < self._written, written
        held = math.inf if self._held is None or damaged else self._held.at_most(written)
        if held + beside + size <= self._budget:
            return
        self._tree.unlink_loose(linked)
        listing = self._tree.listing()
        chosen = to_fit_budget(listing, size, beside=beside, budget=self._budget, replaced=replaced)
        for each in chosen:
            self._tree.evict(each)
        self._held = Held(left_by(listing, chosen), written, time.monotonic())

    def count(self, size: int) -> None:
        """Count an entry that is about to be placed, which `make` has made room for; with the lock held.

        A writer that is killed in between has counted too much, never too little.
        """
        self._tree.add_written(size)
        self._written += size

    def free(self, size: int) -> bool:
        """Evict entries of at least `size` bytes in all; return whether there were enough."""
        with self._tree.locked():
            chosen = to_free(self._tree.listing(), size, budget=self._budget)
            for each in chosen or ():
                self._tree.evict(each)
        return chosen is not None


def to_fit_budget(
    listing: Listing, size: int, *, beside: int, budget: int, replaced: tuple[str, str] | None
) -> list[StoredEntry]:
    """Choose the entries to evict so that `size` more bytes fit the budget.

    Args:
        size: bytes of the entry to be written.
        beside: bytes of other files that count towards the budget.
        budget: bytes that all of them may take.
        replaced: scope and file name of the entry that is written, whose own file is overwritten; or None.
            For an expendable one others are not evicted.

    Raises:
        StoreFull: the bytes do not fit even if all entries are evicted that may be.
    """
    expendable = replaced is not None and replaced[1].startswith(EXPENDABLE)
    holders = _holders(listing)
    overwritten = (
        each.file
        for each in listing.entries
        if (each.scope, each.name) == replaced and each.file not in each.shared
    )
    total = beside + listing.size - sum(listing.sizes[file] for file in overwritten if holders[file] == 1)
    excess, chosen = total + size - budget, None
    if excess > 0 and len(listing.entries) >= MANY_ENTRIES:
        ahead = excess + budget // AHEAD_SHARE
        chosen = _choose(listing, ahead, budget=budget, spared=replaced, expendable=expendable)
    if chosen is None:
        chosen = _choose(listing, excess, budget=budget, spared=replaced, expendable=expendable)
    if chosen is None:
        raise StoreFull(f"an entry of {size} bytes does not fit the store's budget of {budget}")
    return chosen


def left_by(listing: Listing, evicted: list[StoredEntry]) -> int:
    """Return the bytes of the files that remain after these entries are evicted."""
    holders = _holders(listing)
    for each in evicted:
        holders.subtract(each.files)
    return sum(size for file, size in listing.sizes.items() if holders[file] > 0)


def to_free(listing: Listing, size: int, *, budget: int | None) -> list[StoredEntry] | None:
    """Choose the entries to evict to free `size` bytes on the device; None: all unpinned are not enough."""
    return _choose(listing, size, budget=budget, spared=None)


def _choose(
    listing: Listing,
    size: int,
    *,
    budget: int | None,
    spared: tuple[str, str] | None,
    expendable: bool = False,
) -> list[StoredEntry] | None:
    """Choose unpinned entries in order until the files that nobody else holds have `size` bytes.

    With `expendable`, only of entries that nobody asked for.

    An entry whose own file another one needs frees nothing by itself, so it goes only after that one.
    """
    holders = _holders(listing)
    freed, chosen = 0, []
    for each in _in_order(listing, budget, spared, expendable=expendable):
        if freed >= size:
            break
        chosen.append(each)
        for file in each.files:
            holders[file] -= 1
            freed += 0 if holders[file] else listing.sizes[file]
    return [each for each in chosen if not holders[each.file]] if freed >= size else None


def _holders(listing: Listing) -> Counter[int]:
    """Return the number of entries that need each file."""
    return listing.loose + Counter(file for each in listing.entries for file in each.files)


def _in_order(
    listing: Listing, budget: int | None, spared: tuple[str, str] | None, *, expendable: bool
) -> list[StoredEntry]:
    """Order the entries that may go: scopes above their fair share first, then expendable entries.

    Of equal ones the least recently used goes first. An entry is used when one is used that continues it,
    which goes first; it is as little expendable as that one.
    """
    held = listing.by_scope()
    share = (budget or sum(held.values())) / max(1, len(held))
    kept, used, needed = set(listing.loose), dict[int, int](), set[int]()
    for each in listing.entries:
        for file in each.files:
            used[file] = max(used.get(file, 0), each.used_ns)
        if not each.name.startswith(EXPENDABLE):
            needed.update(each.files)
        if each.pinned:
            kept.update(each.files)
    unpinned = [
        each
        for each in listing.entries
        if each.file not in kept
        and (each.scope, each.name) != spared
        and not (expendable and each.file in needed)
    ]
    return sorted(
        unpinned,
        key=lambda each: (
            held[each.scope] <= share,
            each.file in needed,
            used[each.file],
            -len(each.files),
        ),
    )
