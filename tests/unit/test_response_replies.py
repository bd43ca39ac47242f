"""A stream that is stored on its way to the client is closed with everything behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.engines.backend import StreamReply
from baton.responses.service import stored


class Events:
    """A server's stream that knows whether it was closed."""

    def __init__(self, *events: str) -> None:
        self._events = list(events)
        self.closed = 0

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        if not self._events:
            await asyncio.Event().wait()
        return self._events.pop(0)

    async def aclose(self) -> None:
        self.closed += 1


EVENT = 'event: response.output_text.delta\ndata: {"delta": "a"}\n\n'


async def of(events: Events) -> Any:
    reply = await stored(object(), object(), StreamReply(events))  # type: ignore[arg-type]  # unused by these events
    assert isinstance(reply, StreamReply)
    return reply.events


async def test_a_stream_that_is_closed_before_it_is_read_is_closed_at_the_server() -> None:
    """A generator that never ran would not: its connection stayed open until it was collected."""
    events = Events(EVENT)
    await (await of(events)).aclose()
    assert events.closed == 1


@pytest.mark.parametrize("read", [0, 1])
async def test_a_stream_that_is_cancelled_is_closed_once_its_reader_closes_it(read: int) -> None:
    events = Events(*[EVENT] * read)
    told = await of(events)
    assert [await anext(told) for _ in range(read)] == [EVENT] * read
    waiting = asyncio.ensure_future(anext(told))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await told.aclose()
    assert events.closed >= 1
