"""Tell by the connections that fail in a row whether a server can be reached."""

from __future__ import annotations


class Breaker:
    """Open while a server cannot be reached; then its requests are refused at once.

    Only connections count, not what the server answers, so that no client can open it with its requests.

    Args:
        failures: how many must fail in a row.
    """

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self._failed = 0

    @property
    def open(self) -> bool:
        """Whether the server cannot be reached."""
        return self._failed >= self._failures

    @property
    def doubtful(self) -> bool:
        """Whether the last connection failed."""
        return self._failed > 0

    def failed(self) -> bool:
        """Count a connection that failed; returns whether that opened the breaker."""
        was_open = self.open
        self._failed += 1
        return self.open and not was_open

    def succeeded(self) -> bool:
        """Note that the server answered; returns whether that closed the breaker."""
        was_open, self._failed = self.open, 0
        return was_open

    def trip(self) -> None:
        """Open the breaker at once."""
        self._failed = self._failures
