"""How an engine gets on: when it last did, and how long its longest step took."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """Signs of progress of one engine.

    Args:
        clock: seconds on a monotonic clock.

    Attributes:
        longest_s: the longest time between two signs while there was work.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self.longest_s = 0.0

    def begin(self) -> None:
        """The engine is ready; what its start took tells nothing."""
        self.longest_s = 0.0
        self._last = self._clock()

    def made(self) -> None:
        """The engine took a step."""
        self.longest_s = max(self.longest_s, self.since())
        self._last = self._clock()

    def rest(self) -> None:
        """It has nothing to do."""
        self._last = self._clock()

    def since(self) -> float:
        """Seconds since the last sign."""
        return self._clock() - self._last
