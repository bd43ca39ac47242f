"""An engine without a model: it answers at once, and always the same to the same question.

For protocol tests and for trying a client out. It speaks the shapes of the real one, no more: its
"tokens" are the words of the prompt, and it says them again in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from baton.engines.fake.answers import (
    CHUNK,
    IMAGE,
    KINDS,
    MAX_MODEL_LEN,
    WHOLE,
    chat_chunk,
    deltas_of,
    event,
    token_id,
    with_images,
)
from baton.engines.port import (
    EngineState,
    ImageInput,
    Json,
    Operation,
    PlacedImage,
    Plugin,
    Reply,
    Report,
    StreamReply,
    TransferRequest,
    WholeReply,
)
from baton.engines.throughput import Throughput
from baton.errors import (
    BatonError,
    ContextTooLong,
    EngineRestarting,
    InvalidRequest,
    OperationUnsupported,
    StartError,
)
from baton.images.client_image import ClientImage
from baton.telemetry.ids import RequestContext

DEFAULT_TOKENS = 16


@dataclass
class FakeBehaviour:
    """What a test wants to go wrong, or to take time.

    Attributes:
        token_seconds: time between two tokens.
        start_seconds: time the start takes.
        start_error: raised by the start.
        call_error: raised before the first token.
        stream_error: raised after `stream_error_after` tokens of a stream.
        stream_error_after: see `stream_error`.
        ends_answers: an answer's last token is one that ends answers.
        encode_seconds: time one prompt of a plugin takes; a prompt that is a number takes so many.
        encode_error: raised by every such prompt.
        stalled_seconds: what it says of how long it has made no progress.
        forgets_answers: its template leaves earlier answers out, as those of some thinking models do.
        slots: how many requests it works on at once, the others wait; 0: all.
        parsed: the message that a tool or reasoning parser makes of a chat's answer, in place of its words.
    """

    token_seconds: float = 0.0
    start_seconds: float = 0.0
    start_error: StartError | None = None
    call_error: BaseException | None = None
    stream_error: BatonError | None = None
    stream_error_after: int = 2
    forgets_answers: bool = False
    ends_answers: bool = False
    encode_seconds: float = 0.0
    encode_error: BatonError | None = None
    stalled_seconds: float = 0.0
    slots: int = 0
    parsed: Json | None = None


@dataclass
class FakeEngine:
    """The `Engine` port without vLLM.

    Attributes:
        name: the word a request's `model` picks it by.
        aliases: further words that pick it.
        pooling: it embeds instead of generating.
        supports_handoffs: handoffs are on; there is no KV, so they are always tokens only.
        plugin: what does its pooling, if a plugin does.
        placeholder: the token id that stands for a latent step, which costs it nothing.
        weights: what it says of where its weights are.
        images: what images are to it; a text model's nothing, unless a test says otherwise.
        behaviour: what is to go wrong or to take time.
        bodies: every request it got, for tests to look at.
        transfers: what requests with handoffs were to load and save.
        active: requests under way now.
        aborted: requests that were ended from outside.
        starts: how often it was started.
        kills: how often it was ended without being asked.
        longest_step_s: what it says of its longest step.
        slots: what a request waits for before it is worked on.
    """

    name: str
    pooling: bool = False
    supports_handoffs: bool = False
    placeholder: int | None = None
    weights: str = "fake"
    images: ImageInput = field(default_factory=ImageInput)
    behaviour: FakeBehaviour = field(default_factory=FakeBehaviour)
    aliases: tuple[str, ...] = ()
    state: EngineState = EngineState.STARTING
    plugin: Plugin | None = None
    throughput: Throughput = field(default_factory=Throughput)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    bodies: list[Json] = field(default_factory=list)
    transfers: list[TransferRequest] = field(default_factory=list)
    active: int = 0
    aborted: int = 0
    starts: int = 0
    kills: int = 0
    longest_step_s: float = 0.0
    slots: contextlib.AbstractAsyncContextManager[None] = field(init=False)

    def __post_init__(self) -> None:
        self._tokens = Counter(
            "vllm:generation_tokens",
            "Number of generation tokens processed.",
            ("model_name", "engine"),
            registry=self.registry,
        ).labels(self.name, "0")
        slots = self.behaviour.slots
        self.slots = asyncio.Semaphore(slots) if slots else contextlib.nullcontext()

    async def start(self, report: Report) -> None:
        self.state = EngineState.STARTING
        self.starts += 1
        report("pretending to load")
        await asyncio.sleep(self.behaviour.start_seconds)
        if self.behaviour.start_error is not None:
            self.state = EngineState.FAILED
            raise self.behaviour.start_error
        self.state = EngineState.READY

    async def stop(self) -> None:
        self.state = EngineState.STOPPED

    async def kill(self) -> None:
        self.kills += 1
        self.die()

    def die(self) -> None:
        """Be lost: running streams end with the error the real engine's end with."""
        self.state = EngineState.FAILED
        self.behaviour.stalled_seconds = 0.0

    def stalled_s(self) -> float:
        return self.behaviour.stalled_seconds

    async def place(
        self, prompt: list[int], images: Sequence[ClientImage], *, begins: bool
    ) -> tuple[list[int], list[PlacedImage]]:
        return with_images(prompt, images)

    async def render(self, body: Json) -> str:
        """One line a message, a system line first as many models' templates have it."""
        messages = body["messages"]
        texts = [_message_text(message) for message in messages]
        lines = [f"<{message['role']}> {text} <end>" for message, text in zip(messages, texts, strict=True)]
        if messages and messages[0]["role"] != "system":
            lines.insert(0, "<system> be kind <end>")
        if self.behaviour.forgets_answers:
            lines = [line for line in lines[:-1] if not line.startswith("<assistant>")] + lines[-1:]
        return " ".join(lines) + (" <assistant> " if body.get("add_generation_prompt") else " ")

    def cards(self) -> list[Json]:
        return [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "baton",
                "max_model_len": MAX_MODEL_LEN,
            }
            for name in (self.name, *self.aliases)
        ]

    async def call(
        self,
        operation: Operation,
        body: Json,
        context: RequestContext,
        transfer: TransferRequest | None = None,
    ) -> Reply:
        if transfer is not None:
            self.transfers.append(transfer)
        transfer = transfer or TransferRequest()
        if transfer.prompt is not None:
            body = body | {"prompt": transfer.prompt}
        self.bodies.append(body)
        if self.behaviour.call_error is not None:
            raise self.behaviour.call_error
        embeds = operation in POOLING
        if embeds and self.plugin is not None:
            raise OperationUnsupported(f"The model '{self.name}' does not support {operation.value}.")
        tokens_only = operation in (Operation.TOKENIZE, Operation.DETOKENIZE)
        if not tokens_only and embeds is not self.pooling:
            raise OperationUnsupported(f"The model '{self.name}' does not support {operation.value}.")
        answer = Answer(self, operation, body, context, transfer)
        if body.get("stream") and operation in STREAMS:
            return StreamReply(answer.events())
        return await answer.whole()

    async def encode(
        self, prompt: Any, params: Any, context: RequestContext, *, number: int, priority: int
    ) -> FakeOutput:
        """The prompt itself is the output."""
        self.active += 1
        try:
            if self.behaviour.encode_error is not None:
                raise self.behaviour.encode_error
            takes = prompt if isinstance(prompt, float) else self.behaviour.encode_seconds
            await asyncio.sleep(takes)
            return FakeOutput(f"{context.request_id}-{number}", prompt)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.active -= 1

    def count(self) -> None:
        self._tokens.inc()


@dataclass(frozen=True)
class FakeOutput:
    """What a prompt of a plugin comes back as: `vllm.PoolingRequestOutput`, as far as plugins look at it."""

    request_id: str
    outputs: Any
    finished: bool = True


POOLING = (
    Operation.EMBEDDINGS,
    Operation.POOLING,
    Operation.CLASSIFY,
    Operation.SCORE,
    Operation.RERANK,
)
STREAMS = (Operation.COMPLETIONS, Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES)


class Answer:
    """One request under way in a fake engine."""

    def __init__(
        self,
        engine: FakeEngine,
        operation: Operation,
        body: Json,
        context: RequestContext,
        transfer: TransferRequest,
    ) -> None:
        self._engine = engine
        self._operation = operation
        self._body = body
        self._id = context.request_id
        self._context = context
        self._created = int(time.time())
        self._words = _prompt_words(operation, body, transfer)
        limit = _limit(operation, body)
        if len(self._words) + limit > MAX_MODEL_LEN:
            raise ContextTooLong(
                f"This model's maximum context length is {MAX_MODEL_LEN} tokens.", param="max_tokens"
            )
        said = [self._words[index % len(self._words)] for index in range(limit)]
        self._said = [word if index == 0 else f" {word}" for index, word in enumerate(said)]
        self._transfer = transfer
        if operation in (*STREAMS, *POOLING):
            context.prompt_tokens += len(self._words)
        transfer.report.prompt_ids = [token_id(word) for word in self._words]
        transfer.report.saves = False  # there is no KV

    async def _tokens(self) -> AsyncIterator[str]:
        engine = self._engine
        engine.active += 1
        try:
            async with engine.slots:
                for word in self._said:
                    await asyncio.sleep(engine.behaviour.token_seconds)
                    if engine.state is EngineState.FAILED:
                        raise EngineRestarting()
                    engine.count()
                    self._context.generated_tokens += 1
                    self._transfer.report.output_ids.append(token_id(word.strip()))
                    yield word
            self._transfer.report.ended_by_token = engine.behaviour.ends_answers
        except (asyncio.CancelledError, GeneratorExit):
            engine.aborted += 1
            raise
        finally:
            engine.active -= 1

    async def whole(self) -> WholeReply:
        shape = WHOLE[self._operation]
        said = [token async for token in self._tokens()] if self._operation in STREAMS else []
        text = "".join(said)
        return WholeReply(json.dumps(shape(self, text) | self.transfer()).encode())

    async def events(self) -> AsyncIterator[str]:
        shape = CHUNK[self._operation]
        failure = self._engine.behaviour.stream_error
        said = 0
        async for token in self._tokens():
            if failure is not None and said == self._engine.behaviour.stream_error_after:
                raise failure
            said += 1
            if self.parsed is None:
                yield shape(self, token)
        for delta in deltas_of(self.parsed) if self.parsed is not None else ():
            yield chat_chunk(self, delta)
        options = self._body.get("stream_options") or {}
        if self._operation in (Operation.COMPLETIONS, Operation.CHAT):
            if transfer := self.transfer():
                yield event(self.head() | {"choices": []} | transfer)
            if options.get("include_usage"):
                yield event(self.head() | {"choices": [], "usage": self.usage()})
            yield "data: [DONE]\n\n"

    def head(self) -> Json:
        prefix, kind = KINDS[self._operation]
        return {
            "id": f"{prefix}-{self._id}",
            "object": kind,
            "created": self._created,
            "model": self._engine.name,
        }

    def transfer(self) -> Json:
        """What a connector adds to the answer of a request that loads or saves KV: it names the entry."""
        if not self._transfer.moves_kv or self._operation not in (Operation.COMPLETIONS, Operation.CHAT):
            return {}
        return {
            "kv_transfer_params": {"baton_kv": {"save": self._transfer.save, "load": self._transfer.load}}
        }

    @property
    def parsed(self) -> Json | None:
        """The message that a parser makes of a chat's answer, if one does."""
        return self._engine.behaviour.parsed if self._operation is Operation.CHAT else None

    def usage(self) -> Json:
        prompt, said = len(self._words), len(self._said)
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}

    @property
    def words(self) -> list[str]:
        return self._words

    @property
    def body(self) -> Json:
        return self._body


_PROMPT_FIELDS = {
    Operation.COMPLETIONS: "prompt",
    Operation.CHAT: "messages",
    Operation.RESPONSES: "input",
    Operation.MESSAGES: "messages",
    Operation.COUNT_TOKENS: "messages",
    Operation.EMBEDDINGS: "input",
    Operation.POOLING: "input",
    Operation.CLASSIFY: "input",
    Operation.SCORE: "queries",
    Operation.RERANK: "query",
    Operation.TOKENIZE: "prompt",
    Operation.DETOKENIZE: "tokens",
}
_LIMIT_FIELDS = {
    Operation.CHAT: ("max_completion_tokens", "max_tokens"),
    Operation.RESPONSES: ("max_output_tokens",),
}


def _prompt_words(operation: Operation, body: Json, transfer: TransferRequest) -> list[str]:
    if transfer.prompt is not None:
        return [str(token) for token in transfer.prompt]
    name = _PROMPT_FIELDS[operation]
    if operation is Operation.TOKENIZE and "messages" in body:
        name = "messages"
    prompt = body.get(name)
    if operation is Operation.TOKENIZE and prompt == "":
        return []
    if prompt is None or prompt in ([], ""):
        raise InvalidRequest(f"{name}: Field required", param=name)
    if not isinstance(prompt, str | list):
        raise InvalidRequest(f"{name}: Input should be a text or a list", param=name)
    if name == "messages":
        prompt = [_message_text(message) for message in prompt]
    words = prompt.split() if isinstance(prompt, str) else [str(item) for item in prompt]
    return [word for part in words for word in part.split()] or ["nothing"]


def _message_text(message: Any) -> str:
    if not isinstance(message, dict) or "role" not in message or "content" not in message:
        raise InvalidRequest("messages: Input should have a role and a content", param="messages")
    content = message["content"]
    if isinstance(content, list) and any(part.get("type") == "image_url" for part in content):
        return " ".join(IMAGE if part["type"] == "image_url" else part["text"] for part in content)
    return str(content)


def _limit(operation: Operation, body: Json) -> int:
    if operation not in STREAMS:
        return 0
    for name in _LIMIT_FIELDS.get(operation, ("max_tokens",)):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidRequest(f"{name} must be at least 1.", param=name)
        return value
    return DEFAULT_TOKENS
