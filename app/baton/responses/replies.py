"""Store the answer to a request to `/v1/responses`, in one piece or streamed, on its way to the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar

from baton.engines.port import Json, Reply, StreamReply, WholeReply
from baton.responses.service import ResponseRequest, StoredResponses

Result = TypeVar("Result")
SMALL = 64 * 1024
"""Bytes of an answer that are parsed on the event loop."""
LAST = ("response.completed", "response.incomplete")
"""Events with the whole answer."""
WITH_ANSWER = ("response.created", "response.in_progress", "response.failed", *LAST)
"""Events with the answer so far."""


async def stored(responses: StoredResponses, request: ResponseRequest, reply: Reply) -> Reply:
    """Return an engine's reply, which is stored before the client has all of it."""
    if isinstance(reply, StreamReply):
        return StreamReply(_stream(responses, request, reply.events), reply.headers)
    size = len(reply.body)
    body = await _small_or_in_a_thread(size, lambda: json.loads(reply.body))
    body = await responses.keep(request, body)
    told = await _small_or_in_a_thread(size, lambda: json.dumps(body).encode())
    return WholeReply(told, reply.media_type, reply.headers)


async def _stream(
    responses: StoredResponses, request: ResponseRequest, events: AsyncIterator[str]
) -> AsyncIterator[str]:
    async with aclosing(events) as rest:  # type: ignore[type-var]  # engines hand out generators
        async for several in rest:
            told = [await _event(responses, request, event) for event in _events(several)]
            yield "".join(told)


async def _event(responses: StoredResponses, request: ResponseRequest, event: str) -> str:
    head, _, data = event.partition("\ndata: ")
    name = head.removeprefix("event: ")
    if name not in WITH_ANSWER:
        return event
    said: Json = await _small_or_in_a_thread(len(data), lambda: json.loads(data))
    if name in LAST:
        said["response"] = await responses.keep(request, said["response"])
    else:
        said["response"] |= responses.told(request)
    written = await _small_or_in_a_thread(len(data), lambda: json.dumps(said))
    return f"{head}\ndata: {written}\n\n"


async def _small_or_in_a_thread(size: int, work: Callable[[], Result]) -> Result:
    """Parse or write JSON: on the event loop if it takes a millisecond at most, else in a thread."""
    return work() if size <= SMALL else await asyncio.to_thread(work)


def _events(several: str) -> list[str]:
    """Split events that an engine sent together."""
    return [f"{event}\n\n" for event in several.split("\n\n") if event]
