"""Send requests on to a server elsewhere: the `Forwarding` port."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog

from baton.config.groups import EngineSettings
from baton.engines.port import Json, Operation, Peer, Reply, StreamReply, WholeReply
from baton.engines.remote.answers import Names, StreamReader, TokenCount
from baton.engines.remote.breaker import Breaker
from baton.engines.remote.client import Answer, RemoteClient
from baton.engines.remote.keys import Key, RemoteKeys
from baton.engines.remote.probe import ask_peer
from baton.engines.remote.refusals import ERROR_BYTES, refusal
from baton.engines.remote.replies import EVENTS, RemoteEvents, passed_on, whole_reply
from baton.engines.remote.requests import (
    HANDOFFS,
    MOST_HOPS,
    PATHS,
    STREAMED,
    Salts,
    asks_for_usage,
    body_of,
    headers_of,
)
from baton.errors import (
    BatonError,
    ClientError,
    RemoteBusy,
    RemoteFailed,
    RemoteTimeout,
    RemoteUnreachable,
)
from baton.telemetry.ids import RequestContext
from baton.telemetry.remote_metrics import RemoteMetrics

ANSWERED = (200, 201, 202)


class RemoteServer:
    """The server of one engine.

    Args:
        engine: the engine's settings.
        client: connections to the server.
        keys: for the server.
        breaker: where connections that fail are counted.
        metrics: where requests are counted.
        doubt: called when the server should be looked at.
        tenants: whether several tenants' requests are sent on.

    Attributes:
        active: number of requests that the server works on.
    """

    def __init__(
        self,
        engine: EngineSettings,
        client: RemoteClient,
        keys: RemoteKeys,
        breaker: Breaker,
        metrics: RemoteMetrics,
        doubt: Callable[[], None],
        *,
        tenants: bool,
    ) -> None:
        self._engine = engine
        self._client = client
        self._keys = keys
        self._breaker = breaker
        self._metrics = metrics
        self._doubt = doubt
        self._tenants = tenants
        self._salts = Salts()
        self._names = Names(engine.model, engine.name)
        self._peer: Peer | None = None
        self._is_vllm = False
        self._unknown = True
        self._log = structlog.get_logger("baton.engine").bind(engine=engine.name)
        self.active = 0

    @property
    def is_gateway(self) -> bool:
        return self._peer is not None

    async def learn(self, *, is_vllm: bool, afresh: bool) -> None:
        """Ask the server who it is.

        Args:
            is_vllm: whether its list of models says that it is vLLM.
            afresh: whether one that was no gateway is asked again.
        """
        self._is_vllm = is_vllm
        if not (afresh or self._unknown or self.is_gateway):
            return
        self._unknown = True
        with contextlib.suppress(BatonError):  # it is asked again at the next look
            self._peer = await ask_peer(self._client, self._engine, self._keys.of_looks)
            self._unknown = False

    def key_id(self, tenant: str) -> str:
        return self._salts.of(
            self._keys.of(tenant).value or ""
        )  # made like a salt: it tells nothing of the key

    async def send(
        self, operation: Operation, body: Json, context: RequestContext, *, automatic: bool
    ) -> Reply:
        key = self._keys.of(context.tenant)
        apart = self._apart(context, key)
        salted = apart and self._is_vllm and not self.is_gateway
        salt = self._salts.of(context.tenant) if salted else None
        content = body_of(operation, body, self._engine.model, salt)
        off = operation in STREAMED and (apart or not automatic)
        headers = headers_of(context, key, automatic=not off)
        streams = bool(body.get("stream")) and operation in STREAMED
        over = self._begun()
        try:
            answer = await self._asked(PATHS[operation], headers, content, context)
            count = TokenCount(context)
            if not streams:
                reply = await whole_reply(answer, self._most, self._names, count)
                over("answered")
                return reply
            if answer.media_type != EVENTS:
                await answer.close()
                raise RemoteFailed("The server that answers for this model did not answer with a stream.")
            reader = StreamReader(operation, self._names, count, asks_for_usage(operation, body))
            return StreamReply(RemoteEvents(answer, reader, self._most, over), passed_on(answer.headers))
        except BaseException as error:
            over(_outcome(error))
            raise

    async def create_handoff(self, body: Json, context: RequestContext) -> WholeReply:
        key = self._keys.of(context.tenant)
        content = body_of(Operation.TOKENIZE, body, self._engine.model, None)
        over = self._begun()
        try:
            answer = await self._asked(HANDOFFS, headers_of(context, key), content, context)
            reply = await whole_reply(answer, self._most, self._names, TokenCount(context))
            over("answered")
            return reply
        except BaseException as error:
            over(_outcome(error))
            raise

    async def peer(self, challenge: str, context: RequestContext) -> Peer | None:
        key = self._keys.of(context.tenant)
        return await ask_peer(self._client, self._engine, key, challenge, context)

    @property
    def _most(self) -> int:
        return int(self._engine.remote.answer_bytes)

    def _apart(self, context: RequestContext, key: Key) -> bool:
        """Return whether other tenants' requests are sent with the same key, so that none may share KV."""
        theirs = self._peer.tenant if self._peer is not None else None
        alone = key.own or (self._keys.common is not None and theirs == context.tenant)
        return self._tenants and not alone

    async def _asked(
        self, path: str, headers: dict[str, str], content: bytes, context: RequestContext
    ) -> Answer:
        """Return the answer to a request.

        Raises:
            BatonError: the server refuses it, failed, or cannot be reached.
        """
        if context.hops >= MOST_HOPS:
            raise RemoteFailed(
                f"The request was sent on by {context.hops} gateways already: do their `url`s form a circle?"
            )
        began = time.monotonic()
        try:
            answer = await self._client.ask("POST", path, headers, content, tenant=context.tenant)
        except RemoteUnreachable as error:
            if self._breaker.failed():
                self._log.error("remote_unreachable", reason=str(error.__cause__)[:300])
            self._doubt()
            raise
        except (RemoteFailed, RemoteTimeout):
            self._doubt()
            raise
        self._breaker.succeeded()
        self._metrics.began(time.monotonic() - began)
        if answer.status in ANSWERED:
            return answer
        body = await answer.read(ERROR_BYTES, cut=True)
        refused = refusal(self._engine.name, answer.status, answer.headers, body)
        if not isinstance(refused, ClientError | RemoteBusy):
            self._log.error("remote_request_failed", path=path, status=answer.status)
        raise refused

    def _begun(self) -> Callable[[str], None]:
        """Count a request as active; returns what is called once with its outcome."""
        self.active += 1

        def over(outcome: str) -> None:
            self.active -= 1
            self._metrics.count(outcome)

        return over


def _outcome(error: BaseException) -> str:
    """Return the outcome that an error is counted as."""
    kinds: tuple[tuple[type[BaseException], str], ...] = (
        (ClientError, "refused"),
        (RemoteBusy, "busy"),
        (RemoteUnreachable, "unreachable"),
        (RemoteTimeout, "timeout"),
        (asyncio.CancelledError, "cancelled"),
    )
    return next((outcome for kind, outcome in kinds if isinstance(error, kind)), "failed")
