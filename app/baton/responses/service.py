"""Let requests continue stored responses, and store their answers."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from baton.admission.fair_queue import QueueLimits, watched_queue
from baton.admission.fair_threads import FairThreads
from baton.config.groups import ResponseSettings
from baton.engines.port import Json
from baton.errors import BatonError, GatewayOverloaded, InternalError, ResponseNotFound
from baton.responses.response import NewResponse, Turn
from baton.responses.store import ResponseStore
from baton.telemetry.queues import QueueMetrics
from baton.telemetry.response_metrics import ResponseMetrics

PREVIOUS = "previous_response_id"
NO_STORE = (
    "This server stores no responses (setting responses.budget): leave 'previous_response_id' out, and send "
    "the earlier turns in 'input'."
)

log = structlog.get_logger("baton.responses")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ResponseRequest:
    """A request to `/v1/responses` whose answer may be stored.

    Attributes:
        tenant: the owner of the request.
        previous: id of the response that it continues; None: none.
        input: the items of the request itself.
        stores: whether its answer is to be stored.
    """

    tenant: str
    previous: str | None
    input: list[Json]
    stores: bool


def response_threads(metrics: QueueMetrics, wait_s: float) -> FairThreads:
    """Create the threads of one gateway that read and write stored responses.

    Args:
        metrics: counts waiting requests.
        wait_s: seconds a request may wait for a thread.
    """
    return FairThreads(
        watched_queue(QueueLimits(1, wait_s=wait_s), _no_thread, metrics, "responses"), "baton-responses"
    )


class StoredResponses:
    """The stored responses of one gateway.

    Args:
        settings: how long responses live.
        store: where they are kept; None: they are not.
        threads: read and write them.
        metrics: where they are counted.
    """

    def __init__(
        self,
        settings: ResponseSettings,
        store: ResponseStore | None,
        threads: FairThreads,
        metrics: ResponseMetrics,
    ) -> None:
        self._settings = settings
        self._store = store
        self._threads = threads
        self._metrics = metrics

    def close(self) -> None:
        """Close the file; what is being stored is finished before."""
        self._threads.close()
        if self._store is not None:
            self._store.close()

    @property
    def stores(self) -> bool:
        """Whether responses are stored at all."""
        return self._store is not None

    async def keep(self, request: ResponseRequest, body: Json) -> Json:
        """Store an answer where the request wants that; return the answer, which says whether it is stored.

        An answer that cannot be stored is answered all the same.
        """
        told = body | self.told(request)
        if request.stores:
            lasting = {name: value for name, value in told.items() if name != "handoff"}  # its state changes
            new = NewResponse(
                str(body.get("id")), request.tenant, request.previous, time.time(), request.input, lasting
            )
            told["store"] = await self._save(new)
        return told

    def told(self, request: ResponseRequest) -> Json:
        """Return the fields of an answer that tell what it continues and whether it is stored."""
        return {PREVIOUS: request.previous, "store": request.stores}

    async def body(self, response_id: str, tenant: str) -> str:
        """Return one of a tenant's responses as JSON.

        Raises:
            ResponseNotFound: it is unknown, expired, deleted, or another tenant's; clients cannot tell which.
        """
        found = await self._run(tenant, lambda store: store.body(response_id, tenant))
        if found is None:
            raise ResponseNotFound()
        return found

    async def size(self, response_id: str, tenant: str) -> int:
        """Return about how many bytes a response takes with all that it continues; 0: it does not exist."""
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

    async def _save(self, new: NewResponse) -> bool:
        def work(store: ResponseStore) -> bool:
            stored = store.save(new, self._settings.ttl_s)
            self._measure(store)
            return stored

        try:
            stored = await self._run(new.tenant, work)
        except BatonError:
            stored = False
        self._metrics.stored.labels("stored" if stored else "not_stored").inc()
        if not stored:
            log.warning("response_not_stored", response=new.id)
        return stored

    def _measure(self, store: ResponseStore) -> None:
        number, size = store.usage()
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


def _no_thread(_waited_s: float | None) -> BatonError:
    return GatewayOverloaded("Too many requests use stored responses already; try again shortly.")
