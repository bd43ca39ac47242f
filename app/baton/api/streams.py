"""Server-sent events on their way out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Scope

from baton.api.faults import error_event
from baton.errors import BatonError
from baton.telemetry.metrics import GatewayMetrics

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""No proxy on the way may hold events back."""


def event_stream(
    first: str,
    rest: AsyncIterator[str],
    scope: Scope,
    metrics: GatewayMetrics,
    headers: Mapping[str, str],
) -> StreamingResponse:
    """The answer to a streaming request.

    Args:
        first: the first event, already here, so that whatever fails before it has its own status.
        rest: the events after it.
        scope: the request's.
        metrics: where a client that goes away is counted.
        headers: of this answer.
    """
    body = _events(first, rest, scope, metrics)
    return StreamingResponse(body, media_type="text/event-stream", headers=HEADERS | dict(headers))


async def _events(
    first: str, rest: AsyncIterator[str], scope: Scope, metrics: GatewayMetrics
) -> AsyncIterator[str]:
    try:
        yield first
        async for event in rest:
            yield event
    except BatonError as error:
        yield error_event(error, scope)
    except (asyncio.CancelledError, GeneratorExit):
        metrics.disconnects.labels("stream").inc()
        raise
    finally:
        close = getattr(rest, "aclose", None)
        if close is not None:
            await close()
