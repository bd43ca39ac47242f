"""Send requests to a server elsewhere and pass its answers on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from pydantic_core import to_json

from baton.admission.breaker import Breaker
from baton.admission.fair_threads import in_own_thread
from baton.config.groups import EngineSettings, RemoteSettings
from baton.engines.backend import CAPABILITIES, Json, Operation, Peer, Reply, StreamReply, WholeReply
from baton.engines.elsewhere.answers import (
    BUSY,
    ERROR_BYTES,
    KEY_REFUSED,
    WITH_USAGE,
    EventSplitter,
    Names,
    StreamReader,
    TokenCount,
    not_an_answer,
    parsed_json,
    refusal,
)
from baton.engines.elsewhere.client import Answer, RemoteClient
from baton.engines.elsewhere.keys import Key, RemoteKeys
from baton.errors import (
    BatonError,
    ClientError,
    RemoteBusy,
    RemoteFailed,
    RemoteTimeout,
    RemoteUnreachable,
    StartError,
)
from baton.telemetry.ids import CUT_HEADER, HOPS_HEADER, RequestContext
from baton.telemetry.metrics import RemoteMetrics

PATHS = {
    Operation.COMPLETIONS: "/v1/completions",
    Operation.CHAT: "/v1/chat/completions",
    Operation.RESPONSES: "/v1/responses",
    Operation.MESSAGES: "/v1/messages",
    Operation.COUNT_TOKENS: "/v1/messages/count_tokens",
    Operation.EMBEDDINGS: "/v1/embeddings",
    Operation.POOLING: "/pooling",
    Operation.CLASSIFY: "/classify",
    Operation.SCORE: "/score",
    Operation.RERANK: "/rerank",
    Operation.TOKENIZE: "/tokenize",
    Operation.DETOKENIZE: "/detokenize",
}
HANDOFFS = "/v1/handoffs"
MODELS = "/v1/models"
PEER = "/v1/peer"
STREAMED = (Operation.COMPLETIONS, Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES)
SALTED = (Operation.COMPLETIONS, Operation.CHAT, Operation.RESPONSES)
"""Operations that take vLLM's `cache_salt`."""
MOST_HOPS = 4
"""Most gateways that a request passes."""
HANDOFF_HEADER = "X-Baton-Handoff"


def headers_of(context: RequestContext | None, key: Key, *, automatic: bool = True) -> dict[str, str]:
    """Return the headers of a request. None of the client's are among them but its trace context and session.

    Args:
        context: of the client's request; None: there is none.
        automatic: whether the server may load and save handoffs by itself.
    """
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    if key.value is not None:
        headers["Authorization"] = f"Bearer {key.value}"
    if context is not None:
        headers["X-Request-Id"] = context.request_id
        headers[HOPS_HEADER.decode()] = str(context.hops + 1)
        if context.session_id is not None:  # a proxy before the server keeps the session on one gateway
            headers["X-Session-Id"] = context.session_id
        if context.traceparent:
            headers["traceparent"] = context.traceparent
        if context.tracestate:
            headers["tracestate"] = context.tracestate
    if not automatic:
        headers[HANDOFF_HEADER] = "off"
    return headers


def asks_for_usage(operation: Operation, body: Mapping[str, Any]) -> bool:
    """Return whether a stream does not tell the number of its tokens, though it could."""
    options = body.get("stream_options")
    if operation not in WITH_USAGE or not body.get("stream") or not isinstance(options, dict | None):
        return False
    return not (options or {}).get("include_usage")


def body_of(operation: Operation, body: Json, model: str, salt: str | None) -> bytes:
    """Return the body that the server gets.

    Args:
        body: the client's body; not changed.
        salt: sets vLLM's prefix cache apart for the tenant; None: nothing does.
    """
    sent = body | {"model": model}
    if asks_for_usage(operation, body):
        sent["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    if salt is not None and operation in SALTED:
        sent["cache_salt"] = salt
    return to_json(sent)


LIST_BYTES = 4 * 1024 * 1024
ANSWER_S = 10.0
"""Seconds that a look may take beyond those of the connection."""
OF_THE_MODEL = ("created", "object", "owned_by", "max_model_len")
"""Fields of a model's card that our clients see; others hold paths and names of the other machine."""


@dataclass(frozen=True)
class Look:
    """The findings of a look.

    Attributes:
        key_refused: whether the server refuses the key.
        card: of the model in the server's list; None: there is no list, or the model is not on it.
        models: names on that list; None: there is no list.
    """

    key_refused: bool = False
    card: Json | None = None
    models: tuple[str, ...] | None = None

    def require_usable(self, engine: str, url: str, model: str) -> None:
        """Refuse a server whose faults no later try can mend.

        Raises:
            StartError: the server refuses the key, or has other models.
        """
        if self.key_refused:
            raise StartError(f"engines '{engine}': {url} refuses the key: correct `remote.key_file`.")
        if self.models is not None and self.card is None:
            listed = ", ".join(self.models[:20]) or "none"
            raise StartError(
                f"engines '{engine}': {url} serves no model '{model}': name one of its own in `model`; it "
                f"serves: {listed}."
            )


async def look(client: RemoteClient, settings: RemoteSettings, key: Key, model: str) -> Look:
    """Ask the server for its models.

    Raises:
        RemoteFailed: it failed, or cannot be reached.
        RemoteTimeout: it did not answer in time.
    """
    answer, body = await _got(client, settings, MODELS, headers_of(None, key), LIST_BYTES)
    if answer.status in (401, 403):
        return Look(key_refused=True)
    if answer.status >= 500:
        raise RemoteFailed()
    if answer.status != 200:
        return Look()
    try:
        found = json.loads(body)["data"]
        cards = {card["id"]: card for card in found if isinstance(card["id"], str)}
    except (ValueError, TypeError, KeyError, RecursionError):
        return Look()
    card = cards.get(model)
    shown = {name: card[name] for name in OF_THE_MODEL if name in card} if card is not None else None
    if card is not None and shown is not None and isinstance(can := card.get("capabilities"), list):
        shown["capabilities"] = [word for word in CAPABILITIES if word in can]
    return Look(card=shown, models=tuple(cards))


async def _got(
    client: RemoteClient,
    settings: RemoteSettings,
    path: str,
    headers: Mapping[str, str],
    most: int,
    *,
    query: Mapping[str, str] | None = None,
) -> tuple[Answer, bytes]:
    """Return an answer and its body, both within the seconds of a look.

    Raises:
        BatonError: the server failed, or cannot be reached.
    """
    try:
        async with asyncio.timeout(settings.connect_s + ANSWER_S):
            answer = await client.ask("GET", path, headers, query=query)
            return answer, await answer.read(most)
    except TimeoutError as error:
        raise RemoteTimeout() from error


def _peer(body: bytes) -> Peer | None:
    try:
        found = json.loads(body)
        if found["object"] != "peer":
            return None
        tenant, proof, hands_over = found["tenant"], found["store"], found["handoff"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if isinstance(tenant, str) and isinstance(proof, str | None) and isinstance(hands_over, bool):
        return Peer(tenant, proof, hands_over)
    return None


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
        most: bytes that it may have.

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


ANSWERED = (200, 201, 202)
OUTCOMES: tuple[tuple[type[BaseException], str], ...] = (
    (ClientError, "refused"),
    (RemoteBusy, "busy"),
    (RemoteUnreachable, "unreachable"),
    (RemoteTimeout, "timeout"),
    (asyncio.CancelledError, "cancelled"),
)
"""What errors of a request are counted as; others have `failed`."""


class RemoteServer:
    """The server of one engine: the `Forwarding` port.

    Args:
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
        self._secret = secrets.token_bytes(32)
        self._most = int(engine.remote.answer_bytes)
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
            self._peer = await self._ask_peer(self._keys.of_looks, secrets.token_hex(16), None)
            self._unknown = False

    def _names(self, context: RequestContext) -> Names:
        return Names(self._engine.model, self._engine.name, context.model or self._engine.name)

    def key_id(self, tenant: str) -> str:
        return self._digest(self._keys.of(tenant).value or "")

    def _digest(self, text: str) -> str:
        """Hide a text behind one that is the same for each request, and another one for another server."""
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    async def send(
        self, operation: Operation, body: Json, context: RequestContext, *, automatic: bool
    ) -> Reply:
        key = self._keys.of(context.tenant)
        apart = self._apart(context, key)
        salted = apart and self._is_vllm and not self.is_gateway
        salt = self._digest(context.tenant) if salted else None
        content = body_of(operation, body, self._engine.model, salt)
        off = operation in STREAMED and (apart or not automatic)
        headers = headers_of(context, key, automatic=not off)
        if not (body.get("stream") and operation in STREAMED):
            return await self._whole(PATHS[operation], headers, content, context)
        with self._counted() as over:
            answer = await self._asked(PATHS[operation], headers, content, context)
            if answer.media_type != EVENTS:
                await answer.close()
                raise RemoteFailed("The server that answers for this model did not answer with a stream.")
            hides_usage = asks_for_usage(operation, body)
            reader = StreamReader(operation, self._names(context), TokenCount(context), hides_usage)
            return StreamReply(RemoteEvents(answer, reader, self._most, over), passed_on(answer.headers))

    async def create_handoff(self, body: Json, context: RequestContext) -> WholeReply:
        headers = headers_of(context, self._keys.of(context.tenant))
        content = body_of(Operation.TOKENIZE, body, self._engine.model, None)
        return await self._whole(HANDOFFS, headers, content, context)

    async def _whole(
        self, path: str, headers: dict[str, str], content: bytes, context: RequestContext
    ) -> WholeReply:
        with self._counted() as over:
            answer = await self._asked(path, headers, content, context)
            reply = await whole_reply(answer, self._most, self._names(context), TokenCount(context))
            over("answered")
            return reply

    async def peer(self, challenge: str, context: RequestContext) -> Peer | None:
        return await self._ask_peer(self._keys.of(context.tenant), challenge, context)

    async def _ask_peer(self, key: Key, challenge: str, context: RequestContext | None) -> Peer | None:
        query = {"challenge": challenge, "model": self._engine.model}
        headers = headers_of(context, key)
        answer, body = await _got(self._client, self._engine.remote, PEER, headers, ERROR_BYTES, query=query)
        if answer.status in (*BUSY, *KEY_REFUSED) or answer.status >= 500:
            raise refusal(self._engine.name, answer.status, answer.headers, body)
        return _peer(body) if answer.status == 200 else None

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

    @contextlib.contextmanager
    def _counted(self) -> Iterator[Over]:
        """Count a request as active until its outcome is told, or it fails here."""
        self.active += 1

        def over(outcome: str) -> None:
            self.active -= 1
            self._metrics.count(outcome)

        try:
            yield over
        except BaseException as error:
            over(next((outcome for kind, outcome in OUTCOMES if isinstance(error, kind)), "failed"))
            raise
