"""Measure how long ago an engine took its last step, and how long its longest step took."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """The progress of one engine.

    Args:
        clock: seconds on a monotonic clock.

    Attributes:
        longest_s: longest time in seconds between two steps while there was work.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self.longest_s = 0.0

    def begin(self) -> None:
        """Start measuring: the engine is ready, and the time that its start took does not count."""
        self.longest_s = 0.0
        self._last = self._clock()

    def made(self) -> None:
        """Note that the engine took a step."""
        self.longest_s = max(self.longest_s, self.since())
        self._last = self._clock()

    def rest(self) -> None:
        """Note that the engine has no work, so that idle time does not count."""
        self._last = self._clock()

    def since(self) -> float:
        """Return the seconds since the last step, or since the engine last had no work."""
        return self._clock() - self._last
