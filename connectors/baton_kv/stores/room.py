"""Keep the entries of a file store within its budget, without listing them for each entry that is written."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from baton_kv.stores.base import StoreFull
from baton_kv.stores.eviction import left_by, to_fit_budget, to_free
from baton_kv.stores.tree import StoreTree

LIST_EVERY_S = 60.0
"""The entries are listed that often at least while some are written, whatever else changes the folder."""


@dataclass(frozen=True)
class Held:
    """What a store held when it was listed last. What was removed since then only makes more room.

    Attributes:
        size: bytes of its files.
        written: bytes of all entries that had ever been placed.
        listed_at: monotonic seconds.
    """

    size: int
    written: int
    listed_at: float

    def at_most(self, written: int) -> float:
        """Return the most bytes that its files may take now; infinity: they must be listed again.

        Args:
            written: bytes of all entries that have been placed until now.
        """
        old = time.monotonic() > self.listed_at + LIST_EVERY_S
        return math.inf if old else self.size + written - self.written


class Room:
    """The budget of one store. Several processes may write into the same one.

    Args:
        tree: the store's folders.
        budget: bytes that entries may take in all; None for no limit.
    """

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

    def make(self, size: int, *, replaced: tuple[str, str] | None = None, linked: str = "") -> None:
        """Evict entries until `size` more bytes fit the budget; called with the store's lock held.

        Args:
            size: bytes to be written.
            replaced: scope and file name of the entry that is overwritten.
            linked: stem of the names that are linked for the entry that is being written.

        Raises:
            StoreFull: they do not fit even if all unpinned entries are evicted.
            StoreError: the store could not be listed.
        """
        if self._budget is None:
            return
        beside, written = self._tree.bytes_beside(), self._tree.written()
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
