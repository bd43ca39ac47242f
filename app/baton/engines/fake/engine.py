"""The `LocalEngine` port without a model, for protocol tests and for trying a client out.

It answers at once, and the same request always alike, in the shapes of the real engine. Its "tokens" are
words, and its answer repeats the prompt's words in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry, Counter

from baton.engines.adapters import Adapter
from baton.engines.backend import (
    EngineState,
    ImageInput,
    Json,
    Operation,
    Reply,
    Report,
    StreamReply,
    unsupported,
)
from baton.engines.engine import Plugin
from baton.engines.fake.answers import MAX_MODEL_LEN, POOLING, STREAMS, Answer, message_text, with_images
from baton.engines.transfers import Throughput, TransferChooser, TransferRequest
from baton.errors import BatonError, InvalidRequest, StartError
from baton.images.image import ClientImage, PlacedImage
from baton.telemetry.ids import RequestContext
from baton_kv.contract import TransferFailure, Warmed


@dataclass
class FakeBehaviour:
    """Faults and delays that a test wants.

    Attributes:
        wait: lets the seconds below pass; a test may hold them.
        token_seconds: seconds between two tokens.
        start_seconds: seconds that the start takes.
        start_error: raised by the start.
        call_error: raised before the first token.
        stream_error: raised after `stream_error_after` tokens of a stream.
        stream_error_after: number of tokens before `stream_error`.
        ends_answers: whether an answer's last token is an end-of-sequence token.
        encode_seconds: seconds that a plugin's prompt takes; a prompt that is a float takes that many.
        encode_error: raised for every plugin's prompt.
        warm_seconds: seconds that KV takes into memory.
        cached_tokens: tokens of each prompt that it says to have had in its own cache.
        forgets_answers: whether the chat template drops earlier answers, as those of reasoning models do.
        alternates: whether the chat template refuses two messages of one role in a row.
        slots: number of requests worked on at once, the others wait; 0: all.
        parsed: message that a tool or reasoning parser puts in place of a chat's answer.
    """

    wait: Callable[[float], Awaitable[object]] = asyncio.sleep
    token_seconds: float = 0.0
    start_seconds: float = 0.0
    start_error: StartError | None = None
    call_error: BaseException | None = None
    stream_error: BatonError | None = None
    stream_error_after: int = 2
    forgets_answers: bool = False
    alternates: bool = False
    ends_answers: bool = False
    encode_seconds: float = 0.0
    encode_error: BatonError | None = None
    warm_seconds: float = 0.0
    cached_tokens: int = 0
    stalled_seconds: float = 0.0
    slots: int = 0
    parsed: Json | None = None


@dataclass
class FakeEngine:
    """An engine without a model.

    Attributes:
        name: see `LocalEngine.name`.
        aliases: see `LocalEngine.aliases`.
        default: see `LocalEngine.default`.
        pooling: whether it embeds instead of generating.
        supports_handoffs: whether handoffs are on; there is no KV, so they only carry tokens.
        plugin: the plugin that answers `/pooling`, if any.
        moves_unsupported: see `LocalEngine.moves_unsupported`.
        translates: see `LocalEngine.translates`.
        rosetta_pairs: see `LocalEngine.rosetta_pairs`.
        special_tokens: see `LocalEngine.special_tokens`.
        placeholder: token id of a latent step, which takes no time here.
        weights: see `LocalEngine.weights`.
        images: how it takes images; by default it takes none.
        behaviour: faults and delays.
        bodies: bodies of all requests so far.
        transfers: transfers that requests with handoffs asked for so far, and those chosen for others.
        active: number of requests it works on now.
        memory_bytes: see `LocalEngine.memory_bytes`.
        saving: see `LocalEngine.saving`.
        aborted: number of requests that were cancelled.
        deaths: number of calls of `die`, after which earlier requests get no further tokens.
        forgets: number of calls of `forget_prefixes`.
        memory: what it says of stored KV that it is to bring into memory, by key: a test puts it there.
        warmed: the keys that it was asked for so.
        rounding_nats: see `LocalEngine.rounding_nats`.
        longest_step_s: see `LocalEngine.longest_step_s`.
        slots: what a request waits for before the engine works on it.
        adapters: see `LocalEngine.adapters`; none of them changes an answer.
        adapted: the adapter of each request so far.
    """

    name: str
    pooling: bool = False
    supports_handoffs: bool = False
    moves_unsupported: str | None = None
    translates: bool = False
    rosetta_pairs: frozenset[tuple[str, str]] = frozenset()
    special_tokens: frozenset[int] = frozenset()
    placeholder: int | None = None
    weights: str = "fake"
    images: ImageInput = field(default_factory=ImageInput)
    behaviour: FakeBehaviour = field(default_factory=FakeBehaviour)
    aliases: tuple[str, ...] = ()
    default: bool = False
    state: EngineState = EngineState.STARTING
    plugin: Plugin | None = None
    throughput: Throughput = field(default_factory=Throughput)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    bodies: list[Json] = field(default_factory=list)
    transfers: list[TransferRequest] = field(default_factory=list)
    active: int = 0
    memory_bytes: int | None = None
    saving: bool = False
    aborted: int = 0
    starts: int = 0
    deaths: int = 0
    kills: int = 0
    forgets: int = 0
    memory: dict[str, Warmed] = field(default_factory=dict)
    warmed: list[str] = field(default_factory=list)
    rounding_nats: float = 0.5
    longest_step_s: float = 0.0
    slots: contextlib.AbstractAsyncContextManager[None] = field(init=False)
    context_tokens: ClassVar[int] = MAX_MODEL_LEN
    forwarding: ClassVar[None] = None
    adapters: dict[str, Adapter] = field(default_factory=dict)
    adapted: list[Adapter | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokens = Counter(
            "vllm:generation_tokens",
            "Number of generation tokens processed.",
            ("model_name", "engine"),
            registry=self.registry,
        ).labels(self.name, "0")
        slots = self.behaviour.slots
        self.slots = asyncio.Semaphore(slots) if slots else contextlib.nullcontext()

    @property
    def base(self) -> str:
        """See `LocalEngine.base`."""
        return self.name

    @property
    def generates(self) -> bool:
        """See `LocalEngine.generates`."""
        return not self.pooling and self.plugin is None

    def rename(self, aliases: tuple[str, ...], *, default: bool) -> None:
        self.aliases, self.default = aliases, default

    async def start(self, report: Report) -> None:
        self.state = EngineState.STARTING
        self.starts += 1
        report("pretending to load")
        await self.behaviour.wait(self.behaviour.start_seconds)
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
        """Fail, as an engine whose process died: running streams end with `EngineRestarting`."""
        self.state = EngineState.FAILED
        self.deaths += 1
        self.behaviour.stalled_seconds = 0.0

    async def warm(self, key: str) -> Warmed:
        self.warmed.append(key)
        await self.behaviour.wait(self.behaviour.warm_seconds)
        return self.memory.get(key, Warmed(failure=TransferFailure.MISSING))

    def forget_prefixes(self) -> None:
        self.forgets += 1

    def stalled_s(self) -> float:
        return self.behaviour.stalled_seconds

    async def place(
        self, prompt: list[int], images: Sequence[ClientImage], *, begins: bool
    ) -> tuple[list[int], list[PlacedImage]]:
        return with_images(prompt, images)

    async def render(self, body: Json) -> str:
        """Render one line a message, and a system line first, as many models' templates do."""
        messages = body["messages"]
        roles = [message["role"] for message in messages]
        if self.behaviour.alternates and any(one == other for one, other in pairwise(roles)):
            raise InvalidRequest("Conversation roles must alternate.")
        texts = [message_text(message) for message in messages]
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
                "max_model_len": self.context_tokens,
                "capabilities": self._capabilities(),
            }
            | ({"parent": self.name} if name in self.adapters else {})
            for name in (self.name, *self.aliases, *self.adapters)
            if "*" not in name
        ]

    def _capabilities(self) -> list[str]:
        if not self.generates:
            return ["pooling"] if self.plugin is not None else ["embeddings"]
        found = {"generate": True, "vision": self.images.limit > 0, "handoffs": self.supports_handoffs}
        return [word for word, can in found.items() if can]

    async def load_adapter(self, adapter: Adapter) -> None:
        self.adapters[adapter.name] = adapter

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    async def call(
        self,
        operation: Operation,
        body: Json,
        context: RequestContext,
        transfer: TransferRequest | None = None,
        chooser: TransferChooser | None = None,
        adapter: Adapter | None = None,
    ) -> Reply:
        self.adapted.append(adapter)
        if transfer is not None:
            self.transfers.append(transfer)
        transfer = transfer or TransferRequest()
        if transfer.prompt is not None:
            body = body | {"prompt": transfer.prompt}
        self.bodies.append(body)
        if self.behaviour.call_error is not None:
            raise self.behaviour.call_error
        embeds = operation in POOLING
        tokens_only = operation in (Operation.TOKENIZE, Operation.DETOKENIZE)
        if (embeds and self.plugin is not None) or (not tokens_only and embeds is not self.pooling):
            raise unsupported(self.name, operation)
        answer = Answer(self, operation, body, context, transfer, chooser)
        if body.get("stream") and operation in STREAMS:
            return StreamReply(answer.events())
        return await answer.whole()

    async def encode(
        self, prompt: Any, params: Any, context: RequestContext, *, number: int, priority: int
    ) -> FakeOutput:
        """Return the prompt itself as the output."""
        self.active += 1
        try:
            if self.behaviour.encode_error is not None:
                raise self.behaviour.encode_error
            takes = prompt if isinstance(prompt, float) else self.behaviour.encode_seconds
            await self.behaviour.wait(takes)
            return FakeOutput(f"{context.request_id}-{number}", prompt)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.active -= 1

    def count(self) -> None:
        """Count one generated token in the engine's metrics."""
        self._tokens.inc()


@dataclass(frozen=True)
class FakeOutput:
    """The output of a plugin's prompt: the attributes of `vllm.PoolingRequestOutput` that plugins read."""

    request_id: str
    outputs: Any
    finished: bool = True
