"""Store the answer to a request to `/v1/responses`, in one piece or streamed, on its way to the client."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from baton.admission.fair_queue import QueueLimits, watched_queue
from baton.admission.fair_threads import FairThreads
from baton.config.groups import ResponseSettings
from baton.engines.backend import Json, Reply, StreamReply, WholeReply
from baton.errors import BatonError, GatewayOverloaded, InternalError, ResponseNotFound
from baton.responses.response import NewResponse, Turn, replayed_items
from baton.responses.store import ResponseStore
from baton.telemetry.metrics import QueueMetrics, ResponseMetrics

# Let requests continue stored responses, and store their answers.


PREVIOUS = "previous_response_id"
NO_STORE = (
    "This server stores no responses (setting responses.budget): leave 'previous_response_id' out, and send "
    "the earlier turns in 'input'."
)
LEFT_OUT = frozenset({"handoff", "input_messages", "output_messages"})
"""Fields of an answer that are not stored: a handoff's state changes; the others hold the whole prompt."""

log = structlog.get_logger("baton.responses")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ResponseRequest:
    """A request to `/v1/responses` whose answer may be stored.

    Attributes:
        tenant: the owner of the request.
        previous: id of the response that it continues; None: none.
        input: the items of the request itself, a JSON list in ASCII.
        stores: whether its answer is to be stored.
        id: what its answer is called, whatever its engine calls it: no server elsewhere chooses a name that
            another tenant's response has, or that cannot be stored.
    """

    tenant: str
    previous: str | None
    input: str
    stores: bool
    id: str


SMALL = 64 * 1024
"""Bytes of an answer that are parsed on the event loop."""


def response_threads(metrics: QueueMetrics, wait_s: float) -> FairThreads:
    """Create the threads of one gateway that read and write stored responses.

    Args:
        wait_s: seconds a request may wait for a thread.
    """
    return FairThreads(
        watched_queue(QueueLimits(1, wait_s=wait_s), _no_thread, metrics, "responses"), "baton-responses"
    )


class StoredResponses:
    """The stored responses of one gateway.

    Args:
        store: where they are kept; None: they are not.
    """

    def __init__(
        self,
        settings: ResponseSettings,
        store: ResponseStore | None,
        threads: FairThreads,
        body_threads: FairThreads,
        metrics: ResponseMetrics,
    ) -> None:
        self._settings = settings
        self._store = store
        self._threads = threads
        self._body_threads = body_threads
        self._metrics = metrics

    def close(self) -> None:
        """Close the file; what waits for it is not stored any more."""
        self._threads.close()
        if self._store is not None:
            self._store.close()

    @property
    def stores(self) -> bool:
        """True if responses are stored at all."""
        return self._store is not None

    async def keep(self, request: ResponseRequest, body: Json) -> Json:
        """Store an answer where the request wants that; return the answer, which says whether it is stored.

        An answer that cannot be stored is answered all the same.
        """
        told = body | self.told(request)
        if request.stores:
            told["store"] = await self._save(request, told)
        return told

    def told(self, request: ResponseRequest) -> Json:
        """Return the fields of an answer that tell its id, what it continues and whether it is stored."""
        return {"id": request.id, PREVIOUS: request.previous, "store": request.stores}

    async def body(self, response_id: str, tenant: str) -> str:
        """Return one of a tenant's responses as JSON.

        Raises:
            ResponseNotFound: it is unknown, expired, deleted, or another tenant's; clients cannot tell which.
        """
        found = await self._run(tenant, lambda store: store.body(response_id, tenant))
        if found is None:
            raise ResponseNotFound()
        return found

    async def body_size(self, response_id: str, tenant: str) -> int:
        """Return the bytes of one of a tenant's responses.

        Raises:
            ResponseNotFound: as for `body`.
        """
        found = await self._run(tenant, lambda store: store.body_size(response_id, tenant))
        if found is None:
            raise ResponseNotFound()
        return found

    async def size(self, response_id: str, tenant: str) -> int:
        """Return the bytes of a response's items, with all that it continues; 0: it does not exist."""
        return await self._run(tenant, lambda store: store.size(response_id, tenant))

    async def conversation(self, response_id: str, tenant: str) -> list[Turn]:
        """Return the items of one of a tenant's responses and of all that it continues, the oldest first.

        Raises:
            ResponseNotFound: as for `body`, or one that it continues is lost.
        """
        turns = await self._run(tenant, lambda store: store.conversation(response_id, tenant))
        if not turns:
            raise ResponseNotFound()
        return turns

    async def note_use(self, response_id: str, tenant: str) -> None:
        """Note that a response is continued. Where that fails, it may be evicted sooner."""
        with contextlib.suppress(InternalError):
            await self._run(tenant, lambda store: store.note_use(response_id, tenant))

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete one of a tenant's responses.

        Raises:
            ResponseNotFound: as for `body`.
        """

        def work(store: ResponseStore) -> bool:
            gone = store.delete(response_id, tenant)
            self._measure(store)
            return gone

        if not await self._run(tenant, work):
            raise ResponseNotFound()

    async def small_or_in_a_thread(
        self, request: ResponseRequest, size: int, work: Callable[[], Result]
    ) -> Result:
        """Parse or write JSON: on the event loop if it takes a millisecond at most, else in a thread.

        The answer has been computed, so it waits for a thread however long that takes.
        """
        if size <= SMALL:
            return work()
        return await self._body_threads.run(request.tenant, work, patient=True)

    async def _save(self, request: ResponseRequest, body: Json) -> bool:
        def work(store: ResponseStore) -> bool:
            stored = store.save(_new_response(request, body), self._settings.ttl_s)
            self._measure(store)
            return stored

        try:
            stored = await self._run(request.tenant, work)
        except BatonError:
            stored = False
        self._metrics.stored.labels("stored" if stored else "not_stored").inc()
        if not stored:
            log.warning("response_not_stored", response=request.id)
        return stored

    def _measure(self, store: ResponseStore) -> None:
        try:
            number, size = store.usage()
        except sqlite3.Error:  # what was measured is done all the same
            return
        self._metrics.number.set(number)
        self._metrics.bytes.set(size)

    async def _run(self, tenant: str, work: Callable[[ResponseStore], Result]) -> Result:
        """Use the store in a thread.

        Raises:
            ResponseNotFound: there is no store.
            InternalError: its file cannot be used.
            GatewayOverloaded: no thread became free in time.
        """
        store = self._store
        if store is None:
            raise ResponseNotFound(NO_STORE)
        try:
            return await self._threads.run(tenant, lambda: work(store))
        except (sqlite3.Error, RuntimeError) as error:  # RuntimeError: the gateway stops
            log.error("responses_unusable", reason=str(error))
            raise InternalError("The stored responses cannot be used now.") from error


def _new_response(request: ResponseRequest, body: Json) -> NewResponse:
    lasting = {name: value for name, value in body.items() if name not in LEFT_OUT}
    return NewResponse(
        request.id,
        request.tenant,
        request.previous,
        time.time(),
        request.input,
        json.dumps(replayed_items(body), separators=(",", ":")),
        json.dumps(lasting, separators=(",", ":")),
    )


def _no_thread(_waited_s: float | None) -> BatonError:
    return GatewayOverloaded("Too many requests use stored responses already; try again shortly.")


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
