"""Count the blocks of finished requests that saves keep from other requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

SAVED_WITHIN_S = 1.0
"""If no save has ended for longer than this, the device may hang: nobody waits for blocks any more."""


class HeldBlocks:
    """The blocks that are held until a save has read them. Requests may share blocks of a common prefix.

    Args:
        most: number of different blocks that saves may hold together; a save that somebody waits for may hold
            more while it is the only one.
    """

    YIELDING = 2
    """Saves that nobody waits for begin only while saves hold less than the most divided by this."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._saves: dict[str, tuple[int, ...]] = {}
        self._yielding: set[str] = set()
        self._holders: Counter[int] = Counter()
        self._awaited: Counter[int] = Counter()
        self._moved = 0.0

    @property
    def free_soon(self) -> bool:
        """Whether some are expected to be free within a second."""
        return bool(self._saves) and time.monotonic() - self._moved < SAVED_WITHIN_S

    def has_room_for(self, block_ids: Sequence[int], *, yields: bool = False) -> bool:
        """Return whether a save may hold these blocks.

        Args:
            block_ids: the blocks.
            yields: nobody waits for the save: it leaves room for those that somebody waits for, which do not
                count what such saves hold.
        """
        holders = self._holders if yields else self._awaited
        new = len(set(block_ids) - holders.keys())
        if not holders:
            return not yields or new <= self._most
        return len(holders) + new <= (self._most // self.YIELDING if yields else self._most)

    def hold(self, request_id: str, block_ids: Sequence[int], *, yields: bool = False) -> None:
        """Count the blocks of a request whose save begins."""
        if not self._saves:
            self._moved = time.monotonic()
        self._saves[request_id] = tuple(set(block_ids))
        self._holders.update(self._saves[request_id])
        if yields:
            self._yielding.add(request_id)
        else:
            self._awaited.update(self._saves[request_id])

    def release(self, request_id: str) -> None:
        """Forget the blocks of a request whose save has ended on every rank."""
        self._moved = time.monotonic()
        blocks = Counter(self._saves.pop(request_id, ()))
        self._holders -= blocks  # drops those that nobody holds
        if request_id in self._yielding:
            self._yielding.remove(request_id)
        else:
            self._awaited -= blocks
