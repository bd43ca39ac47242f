"""Put `X-Baton-Handoff` under SDKs that are built on httpx2: those of OpenAI (3.x) and Anthropic (2.x).

Neither library takes the other's requests. httpx2 is no dependency of this package: the SDK brings it.
"""

from __future__ import annotations

import httpx2

from baton_client.handoff_header import AsyncMarkingTransport, MarkingTransport


class HandoffTransport(MarkingTransport[httpx2.BaseTransport], httpx2.BaseTransport):
    __doc__ = MarkingTransport.__doc__
    usual = httpx2.HTTPTransport


class AsyncHandoffTransport(AsyncMarkingTransport[httpx2.AsyncBaseTransport], httpx2.AsyncBaseTransport):
    __doc__ = AsyncMarkingTransport.__doc__
    usual = httpx2.AsyncHTTPTransport
