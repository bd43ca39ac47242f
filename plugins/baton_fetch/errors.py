"""Why nothing is fetched.

    FetchError
    ├── FetchRefused   the address, or one it redirects to, is none that may be fetched
    └── FetchFailed    it may be, and could not be

Whoever fetches says it to the client in errors of its own. The text is written for that client, and holds no
address of the server's.
"""

from __future__ import annotations


class FetchError(Exception):
    """Base of both.

    Args:
        reason: what is wrong, without the place in the request.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FetchRefused(FetchError):
    pass


class FetchFailed(FetchError):
    pass
