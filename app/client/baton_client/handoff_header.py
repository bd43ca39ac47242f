"""Write the header `X-Baton-Handoff` on requests that generate, and collect the ids of what they saved.

All transports share this, whatever HTTP library they are of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

W = TypeVar("W")
HEADER = "X-Baton-Handoff"
ID_HEADER = "X-Handoff-Id"
GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
"""Paths of the routes that the header is for; a gateway may stand under a prefix."""
LONGEST = 64
"""Most characters of a handoff's id."""


class HandoffHeader:
    """The header that a transport adds to requests, and the ids that it keeps of responses.

    Args:
        remember: number of ids that are kept; the oldest go first.

    Attributes:
        handoff: value of the header: `auto` (as the gateway's settings say), `off`, `save`, or the id of the
            handoff that requests start from. It may be set anew between requests.
        ids: ids of the handoffs that were saved, the oldest first.
    """

    def __init__(self, handoff: str = "auto", *, remember: int = 1000) -> None:
        self.handoff = handoff
        self.ids: deque[str] = deque(maxlen=remember)

    @property
    def handoff(self) -> str:
        """Value of the header.

        Raises:
            ValueError: when it is set to something that is neither a mode nor an id.
        """
        return self._handoff

    @handoff.setter
    def handoff(self, value: str) -> None:
        if not (0 < len(value) <= LONGEST and value.isascii() and value.isprintable() and " " not in value):
            raise ValueError("'handoff' is 'auto', 'off', 'save' or the id of a handoff.")
        self._handoff = value

    @property
    def last(self) -> str | None:
        """Id of the handoff that was saved last; None: none was."""
        return self.ids[-1] if self.ids else None

    def mark(self, method: str, path: str, headers: MutableMapping[str, str]) -> None:
        """Set the header on a request that generates, unless it has one."""
        if method == "POST" and path.rstrip("/").endswith(GENERATE) and HEADER not in headers:
            headers[HEADER] = self.handoff

    def note(self, headers: Mapping[str, str]) -> None:
        """Keep the id that a response names."""
        if (saved := headers.get(ID_HEADER)) is not None:
            self.ids.append(saved)


class MarkingTransport(HandoffHeader, Generic[W]):
    """Sends requests with the header `X-Baton-Handoff`; see `HandoffHeader` for `handoff`, `ids` and `last`.

    The gateway refuses a request with the field `handoff` whose header is `save` or an id as well: send such
    a request with the header `X-Baton-Handoff: auto` of its own, which is left as it is.

    Args:
        handoff: `auto`, `off`, `save`, or the id of the handoff that requests start from.
        wrapped: what sends the requests; None: a new `HTTPTransport`. It is closed with this one.
    """

    usual: ClassVar[Callable[[], Any]]

    def __init__(self, handoff: str = "auto", *, wrapped: W | None = None, remember: int = 1000) -> None:
        super().__init__(handoff, remember=remember)
        self._wrapped: Any = wrapped or type(self).usual()

    def __enter__(self) -> Self:
        self._wrapped.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._wrapped.__exit__(exc_type, exc_value, traceback)

    def handle_request(self, request: Any) -> Any:
        self.mark(request.method, request.url.path, request.headers)
        response = self._wrapped.handle_request(request)
        self.note(response.headers)
        return response

    def close(self) -> None:
        self._wrapped.close()


class AsyncMarkingTransport(HandoffHeader, Generic[W]):
    """Sends requests with the header `X-Baton-Handoff`; see `HandoffTransport`."""

    usual: ClassVar[Callable[[], Any]]

    def __init__(self, handoff: str = "auto", *, wrapped: W | None = None, remember: int = 1000) -> None:
        super().__init__(handoff, remember=remember)
        self._wrapped: Any = wrapped or type(self).usual()

    async def __aenter__(self) -> Self:
        await self._wrapped.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._wrapped.__aexit__(exc_type, exc_value, traceback)

    async def handle_async_request(self, request: Any) -> Any:
        self.mark(request.method, request.url.path, request.headers)
        response = await self._wrapped.handle_async_request(request)
        self.note(response.headers)
        return response

    async def aclose(self) -> None:
        await self._wrapped.aclose()
