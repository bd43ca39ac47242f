"""Turn the answer of a server elsewhere into a reply: in one piece, or event by event."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Mapping

from baton.admission.fair_threads import in_own_thread
from baton.engines.port import Json, WholeReply
from baton.engines.remote.answers import Names, StreamReader, TokenCount
from baton.engines.remote.client import Answer
from baton.engines.remote.refusals import not_an_answer, parsed_json
from baton.engines.remote.server_events import EventSplitter
from baton.errors import BatonError, RemoteFailed, RemoteTimeout
from baton.telemetry.ids import CUT_HEADER

JSON = "application/json"
BYTES = "application/octet-stream"
"""Media type of packed embeddings."""
EVENTS = "text/event-stream"
PASSED_ON = {
    "metadata": re.compile(r"[\x20-\x7e]+"),
    "x-handoff-id": re.compile(r"[A-Za-z0-9_-]{16,64}"),
    CUT_HEADER.lower(): re.compile(r"[1-9][0-9]{0,9}"),
}
"""Headers of an answer that clients get, and their form: those of packed embeddings, a handoff's id, and the
limit that an answer was cut to."""
SMALL = 64 * 1024
"""Bytes of an answer that are parsed on the event loop."""
COPIES = 2
"""Times that an answer's bytes are in memory once it is parsed, about: they are counted as they come."""
END_S = 1.0
"""Seconds that a server gets to end a stream after its last event, so that its connection can be kept."""
Over = Callable[[str], None]
"""Called once with the outcome of a request."""


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of an answer that clients get."""
    return {name: headers[name] for name, form in PASSED_ON.items() if form.fullmatch(headers.get(name, ""))}


async def whole_reply(answer: Answer, most: int, names: Names, count: TokenCount) -> WholeReply:
    """Read an answer in one piece.

    Args:
        answer: the answer, which is closed.
        most: bytes that it may have.
        names: of the model.
        count: of the tokens.

    Raises:
        RemoteFailed: it is too long, no JSON object, or incomplete.
    """
    kind, headers, status = answer.media_type, passed_on(answer.headers), answer.status
    if kind not in (JSON, BYTES):
        await answer.close()
        raise not_an_answer("an answer of an unknown kind")
    body = await answer.read(most, take=lambda size: count.context.take_memory(COPIES * size))
    if kind == BYTES:
        return WholeReply(body, BYTES, headers, status)

    def read() -> tuple[Json, bytes]:
        try:
            parsed, nulled = parsed_json(body)
        except ValueError:
            parsed, nulled = None, False
        if not isinstance(parsed, dict):
            raise not_an_answer("an answer that is no JSON object")
        return parsed, json.dumps(parsed).encode() if names.put(parsed) or nulled else body

    parsed, told = read() if len(body) <= SMALL else await in_own_thread(read)
    count.read(parsed)
    return WholeReply(told, JSON, headers, status)


class RemoteEvents:
    """The events of a streamed answer, each passed on when it has come.

    Args:
        answer: the answer; it is closed at the end, and by `aclose`.
        reader: reads the events.
        most: bytes that one event may have.
        over: called at the end.
    """

    def __init__(self, answer: Answer, reader: StreamReader, most: int, over: Over) -> None:
        self._answer = answer
        self._reader = reader
        self._splitter = EventSplitter(most)
        self._ready: list[str] = []
        self._failure: BatonError | None = None
        self._over: Over | None = over
        self._counted = 0

    def __aiter__(self) -> RemoteEvents:
        return self

    async def __anext__(self) -> str:
        try:
            async with asyncio.timeout(self._answer.event_s):
                while not self._ready:
                    if self._failure is not None:
                        raise self._failure
                    if self._reader.complete:
                        await self._finish()
                        raise StopAsyncIteration
                    await self._read()
        except TimeoutError:
            await self._end("timeout")
            raise RemoteTimeout() from None
        except BatonError:
            await self._end("failed")
            raise
        except asyncio.CancelledError:
            await self._end("cancelled")
            raise
        told, self._ready = "".join(self._ready), []
        return told

    async def aclose(self) -> None:
        """Close the connection; the server then drops the request."""
        await self._end("answered" if self._reader.complete else "cancelled")

    async def _read(self) -> None:
        data = await self._answer.next()
        if data is None:
            if not (self._reader.may_just_end and self._answer.ends_itself):
                raise RemoteFailed("The server that answers for this model ended its stream too early.")
            self._reader.complete = True
            return
        try:
            events = self._splitter.feed(data)
            if (more := self._splitter.held - self._counted) > 0:
                self._counted += more
                self._reader.count.context.take_memory(more)
            for event in events:
                if self._reader.complete:
                    break
                if told := self._reader.passed_on(event):
                    self._ready.append(told)
        except RemoteFailed as error:
            self._failure = error  # raised once the events before it have been passed on

    async def _finish(self) -> None:
        """Wait a moment for the end of a stream whose last event has come, whatever else the server sends."""
        with contextlib.suppress(BatonError, TimeoutError):  # all of the answer is there
            async with asyncio.timeout(END_S):
                while await self._answer.next() is not None:
                    pass
        await self._end("answered")

    async def _end(self, outcome: str) -> None:
        over, self._over = self._over, None
        if over is not None:
            over(outcome)
        await self._answer.close()
