"""Errors of fetching a file.

    FetchError
    ├── FetchRefused   the URL, or one to which it redirects, is not allowed
    └── FetchFailed    the URL is allowed, but the file could not be fetched

Callers translate them to errors of their own. The messages are written for the client and contain no address
of the server.
"""

from __future__ import annotations


class FetchError(Exception):
    """Base class of both.

    Args:
        reason: what is wrong, without the place in the request; for the client.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FetchRefused(FetchError):
    pass


class FetchFailed(FetchError):
    pass
