"""Put `X-Baton-Handoff` under any SDK that takes an `httpx.Client` or an `httpx.AsyncClient`."""

from __future__ import annotations

import httpx

from baton_client.handoff_header import AsyncMarkingTransport, MarkingTransport


class HandoffTransport(MarkingTransport[httpx.BaseTransport], httpx.BaseTransport):
    __doc__ = MarkingTransport.__doc__
    usual = httpx.HTTPTransport


class AsyncHandoffTransport(AsyncMarkingTransport[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport):
    __doc__ = AsyncMarkingTransport.__doc__
    usual = httpx.AsyncHTTPTransport
