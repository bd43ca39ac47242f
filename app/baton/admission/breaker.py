"""Leave a server alone that failed several times in a row, but for one probe at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FAILURES = 3
REST_S = 5.0
"""After so many failures in a row a server is left alone for so long."""


class Breaker:
    """Open after failures in a row; safe for several threads.

    What counts as a failure is its owner's to say: no client may open it with requests.

    Args:
        failures: how many must come in a row.
        clock: monotonic seconds.

    Attributes:
        resting_until: when the next probe may be sent.
    """

    def __init__(self, failures: int = FAILURES, clock: Callable[[], float] = time.monotonic) -> None:
        self.resting_until = 0.0
        self._failures = failures
        self._failed = 0
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """True if the server is thought to be unreachable."""
        return self._failed >= self._failures

    @property
    def doubtful(self) -> bool:
        """True if the last exchange failed."""
        return self._failed > 0

    def resting(self) -> bool:
        """Return whether to leave the server alone; if not while this is open, the caller is its probe."""
        with self._lock:
            if self._clock() < self.resting_until:
                return True
            if self.open:
                self.resting_until = self._clock() + REST_S
            return False

    def failed(self) -> bool:
        """Count a failure; returns whether that opened the breaker."""
        with self._lock:
            was_open = self.open
            self._failed += 1
            if self.open:
                self.resting_until = self._clock() + REST_S
            return self.open and not was_open

    def succeeded(self) -> bool:
        """Note an answer; returns whether that closed the breaker."""
        with self._lock:
            was_open, self._failed, self.resting_until = self.open, 0, 0.0
            return was_open

    def trip(self) -> None:
        """Open it at once."""
        self._failed = self._failures
