"""Put `X-Baton-Handoff` under any SDK that takes an `httpx.Client` or an `httpx.AsyncClient`."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import httpx

from baton_client.handoff_header import HandoffHeader


class HandoffTransport(HandoffHeader, httpx.BaseTransport):
    """Sends requests with the header `X-Baton-Handoff`; see `HandoffHeader` for `handoff`, `ids` and `last`.

    The gateway refuses a request with the field `handoff` whose header is `save` or an id as well: send such
    a request with the header `X-Baton-Handoff: auto` of its own, which is left as it is.

    Args:
        handoff: `auto`, `off`, `save`, or the id of the handoff that requests start from.
        wrapped: what sends the requests; None: a new `httpx.HTTPTransport`. It is closed with this one.
        remember: number of ids that are kept.
    """

    def __init__(
        self, handoff: str = "auto", *, wrapped: httpx.BaseTransport | None = None, remember: int = 1000
    ) -> None:
        super().__init__(handoff, remember=remember)
        self._wrapped = wrapped or httpx.HTTPTransport()

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

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.mark(request.method, request.url.path, request.headers)
        response = self._wrapped.handle_request(request)
        self.note(response.headers)
        return response

    def close(self) -> None:
        self._wrapped.close()


class AsyncHandoffTransport(HandoffHeader, httpx.AsyncBaseTransport):
    """Sends requests with the header `X-Baton-Handoff`; see `HandoffTransport`.

    Args:
        handoff: `auto`, `off`, `save`, or the id of the handoff that requests start from.
        wrapped: what sends the requests; None: a new `httpx.AsyncHTTPTransport`. It is closed with this one.
        remember: number of ids that are kept.
    """

    def __init__(
        self, handoff: str = "auto", *, wrapped: httpx.AsyncBaseTransport | None = None, remember: int = 1000
    ) -> None:
        super().__init__(handoff, remember=remember)
        self._wrapped = wrapped or httpx.AsyncHTTPTransport()

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

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.mark(request.method, request.url.path, request.headers)
        response = await self._wrapped.handle_async_request(request)
        self.note(response.headers)
        return response

    async def aclose(self) -> None:
        await self._wrapped.aclose()
