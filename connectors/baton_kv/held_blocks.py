"""Count the blocks of finished requests that saves keep from other requests."""

from __future__ import annotations

import time

SAVED_WITHIN_S = 1.0
"""A save that takes longer may hang with its device; nobody waits for its blocks."""


class HeldBlocks:
    """The blocks that are held until a save has read them.

    Args:
        most: number of blocks that saves may hold together; a save is allowed more while it is the only one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[str, tuple[int, float]] = {}

    @property
    def free_soon(self) -> bool:
        """Whether some are expected to be free within a second."""
        began_after = time.monotonic() - SAVED_WITHIN_S
        return any(began > began_after for _, began in self._held.values())

    def has_room_for(self, count: int) -> bool:
        """Return whether a save may hold this many blocks."""
        return not self._held or sum(held for held, _ in self._held.values()) + count <= self._most

    def hold(self, request_id: str, count: int) -> None:
        """Count the blocks of a request whose save begins."""
        self._held[request_id] = count, time.monotonic()

    def release(self, request_id: str) -> None:
        """Forget the blocks of a request whose save has ended on every rank."""
        self._held.pop(request_id, None)
