"""Store the answer to a request to `/v1/responses`, in one piece or streamed, on its way to the client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from baton.engines.port import Json, Reply, StreamReply, WholeReply
from baton.responses.service import ResponseRequest, StoredResponses

LAST = ("response.completed", "response.incomplete")
"""Events with the whole answer."""
WITH_ANSWER = ("response.created", "response.in_progress", "response.failed", *LAST)
"""Events with the answer so far."""


async def stored(responses: StoredResponses, request: ResponseRequest, reply: Reply) -> Reply:
    """Return an engine's reply, which is stored before the client has all of it."""
    if isinstance(reply, StreamReply):
        return StreamReply(_StoredEvents(responses, request, reply.events), reply.headers)
    size = len(reply.body)
    body = await responses.small_or_in_a_thread(request, size, lambda: json.loads(reply.body))
    body = await responses.keep(request, body)
    told = await responses.small_or_in_a_thread(request, size, lambda: json.dumps(body).encode())
    return WholeReply(told, reply.media_type, reply.headers)


class _StoredEvents:
    """The events of a streamed answer, which is stored with its last one.

    No generator: closing one that was never read would not close the engine's stream.

    Args:
        responses: where it is stored.
        request: what it answers.
        events: the engine's.
    """

    def __init__(
        self, responses: StoredResponses, request: ResponseRequest, events: AsyncIterator[str]
    ) -> None:
        self._responses = responses
        self._request = request
        self._engine_events = events

    def __aiter__(self) -> _StoredEvents:
        return self

    async def __anext__(self) -> str:
        several = _events(await anext(self._engine_events))
        return "".join([await _event(self._responses, self._request, event) for event in several])

    async def aclose(self) -> None:
        """Close the engine's stream; the engine then drops the request."""
        await self._engine_events.aclose()  # type: ignore[attr-defined]  # all engines' have it


async def _event(responses: StoredResponses, request: ResponseRequest, event: str) -> str:
    head, _, data = event.partition("\ndata: ")
    name = head.removeprefix("event: ")
    if name not in WITH_ANSWER:
        return event
    said: Json = await responses.small_or_in_a_thread(request, len(data), lambda: json.loads(data))
    if name in LAST:
        said["response"] = await responses.keep(request, said["response"])
    else:
        said["response"] |= responses.told(request)
    written = await responses.small_or_in_a_thread(request, len(data), lambda: json.dumps(said))
    return f"{head}\ndata: {written}\n\n"


def _events(several: str) -> list[str]:
    """Split events that an engine sent together."""
    return [f"{event}\n\n" for event in several.split("\n\n") if event]
