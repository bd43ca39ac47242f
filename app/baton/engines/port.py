"""The port to an engine: the `Engine` protocol and its types. `vllm/` and `fake/` implement it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from baton.engines.throughput import Throughput
from baton.images.client_image import ClientImage
from baton.telemetry.ids import RequestContext
from baton_kv.contract import TransferFailure

Json = dict[str, Any]


class Operation(StrEnum):
    """An operation of an engine; each has one route."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    EMBEDDINGS = "embeddings"
    POOLING = "pooling"
    CLASSIFY = "classify"
    SCORE = "score"
    RERANK = "rerank"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"

    @property
    def generates(self) -> bool:
        """Whether the engine generates tokens, so that schemas and grammars in a body are compiled."""
        return self not in {
            Operation.COUNT_TOKENS,
            Operation.EMBEDDINGS,
            Operation.POOLING,
            Operation.CLASSIFY,
            Operation.SCORE,
            Operation.RERANK,
            Operation.TOKENIZE,
            Operation.DETOKENIZE,
        }


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class WholeReply:
    """An answer in one piece, with the headers that describe its content."""

    body: bytes
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamReply:
    """An answer as server-sent events.

    Attributes:
        events: yields one or more whole events at a time; raises a `BatonError` when the answer fails midway;
            aborts the engine's request when it is closed.
        headers: headers that describe the content.
    """

    events: AsyncIterator[str]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlacedImage:
    """An image, and the placeholder tokens that stand for it in a prompt.

    Attributes:
        image: the image.
        digest: its SHA-256 in hex, by which engines identify it.
        offset: index of its first placeholder token in the prompt.
        length: number of its placeholder tokens.
        target: the tokens that the placeholders replaced; empty where the model inserts images by itself.
    """

    image: ClientImage
    digest: str
    offset: int
    length: int
    target: tuple[int, ...]


@dataclass(eq=False)
class TransferReport:
    """What happened to a request with a handoff. Only the engine writes it.

    Attributes:
        prompt_ids: the prompt's token ids, once known.
        output_ids: the token ids generated so far.
        cached: number of prompt tokens that the engine did not prefill.
        loaded: number of tokens whose KV came from the entry; None: nothing was loaded.
        lost: number of tokens whose KV is in the entry but could not be loaded.
        load_ms: milliseconds that the load took.
        saves: False once the engine has reported that it saves nothing.
        ended_by_token: whether the answer's last token is an end-of-sequence token.
        miss: why the entry could not be used; None: it could, or there was none.
        save_over: set when the engine has reported the save's outcome, good or bad.
    """

    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    cached: int = 0
    loaded: int | None = None
    lost: int = 0
    load_ms: float = 0.0
    saves: bool = True
    ended_by_token: bool = False
    miss: TransferFailure | None = None
    save_over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, eq=False)
class TransferRequest:
    """A transfer that an engine is asked for beside a request's body: its prompt, KV to load and to save.

    Attributes:
        prompt: token ids of the whole prompt, in place of the body's; None: the body's prompt is used.
        images: the images that the prompt holds, in order.
        save: key of the entry to save the KV as; None: nothing is saved.
        prompt_only: whether to save the prompt's KV without the answer's.
        load: key of the entry to load KV from; None: nothing is loaded.
        limit: most tokens to load; None: all.
        latent_steps: number of latent-step placeholders in the prompt.
        report: filled in by the engine with what happened.
    """

    prompt: list[int] | None = None
    images: Sequence[PlacedImage] = ()
    save: str | None = None
    prompt_only: bool = False
    load: str | None = None
    limit: int | None = None
    latent_steps: int = 0
    report: TransferReport = field(default_factory=TransferReport)

    @property
    def moves_kv(self) -> bool:
        """Whether KV is loaded or saved; otherwise the request only replaces the body's prompt."""
        return self.save is not None or self.load is not None


@dataclass(frozen=True)
class Plugin:
    """The IO processor plugin of one engine.

    Attributes:
        name: name of its entry point.
        instance: the engine's one instance of it.
        request: parses a body as vLLM's `IOProcessorRequest`, for older plugins; raises `BatonError`.
    """

    name: str
    instance: Any
    request: Callable[[Json], Any]


@dataclass(frozen=True)
class ImageInput:
    """How one engine's model takes images.

    Attributes:
        limit: most images that one prompt may hold; 0: the model takes only text.
        tokens: token ids that stand for an image, or a part of one, in its prompts.
        texts: texts that its tokenizer or its chat template turns into these tokens, e.g. `<image>`.
        named: whether the engine's caches know an image by its digest, else by a hash that vLLM computes.
    """

    limit: int = 0
    tokens: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    named: bool = True


Reply = WholeReply | StreamReply
Report = Callable[[str], None]
"""Called with the phase that a start is in, as a text for people."""


class Engine(Protocol):
    """One served model."""

    @property
    def name(self) -> str:
        """The name by which a request's `model` picks this engine."""
        ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names that pick it."""
        ...

    @property
    def state(self) -> EngineState: ...

    @property
    def registry(self) -> CollectorRegistry:
        """The engine's own metrics, `vllm:*`, labelled with its name."""
        ...

    async def start(self, report: Report) -> None:
        """Load the model and warm the engine up, so that the first client does not wait for that.

        Raises:
            StartError: the engine cannot run; the message says why and what to do.
        """
        ...

    async def stop(self) -> None:
        """Stop the engine and everything it started. Safe to call twice; it may be started again."""
        ...

    async def kill(self) -> None:
        """Kill the processes of an engine that hangs; its requests fail."""
        ...

    def stalled_s(self) -> float:
        """Return the seconds since the last step, 0.0 without work. Call it often: it notices idle times."""
        ...

    @property
    def longest_step_s(self) -> float:
        """Seconds of the longest step so far, or of one that may run now because of latent steps."""
        ...

    @property
    def supports_handoffs(self) -> bool:
        """Whether the engine was configured with `handoff`, so that requests may save and load KV."""
        ...

    @property
    def placeholder(self) -> int | None:
        """The token id that stands for a latent step; None: the engine was configured without `latent`."""
        ...

    @property
    def weights(self) -> str:
        """Identity of the weights: engines with the same identity can continue each other's handoffs."""
        ...

    @property
    def throughput(self) -> Throughput:
        """Estimates of how fast the engine prefills and loads KV."""
        ...

    @property
    def images(self) -> ImageInput:
        """How the engine's model takes images."""
        ...

    @property
    def plugin(self) -> Plugin | None:
        """The IO processor plugin that answers `/pooling` on this engine; None: vLLM does."""
        ...

    async def encode(
        self, prompt: Any, params: Any, context: RequestContext, *, number: int, priority: int
    ) -> Any:
        """Run one prompt of a plugin through the model. When this is cancelled, the engine drops the prompt.

        Args:
            prompt: a prompt as vLLM takes it: a text, token ids, or a dict with multimodal data.
            params: vLLM's `PoolingParams`; None: the defaults for a plugin's prompt.
            context: ids of the request that the prompt belongs to.
            number: index of the prompt within its request.
            priority: lower is sooner.

        Returns:
            vLLM's `PoolingRequestOutput`.

        Raises:
            BatonError: the engine is not running, the prompt is invalid, or the engine failed.
        """
        ...

    async def place(
        self, prompt: list[int], images: Sequence[ClientImage], *, begins: bool
    ) -> tuple[list[int], list[PlacedImage]]:
        """Put the placeholder tokens of images into a prompt; return it, and where each image stands in it.

        Args:
            prompt: token ids of a text as the chat template renders it.
            images: its images, in order; at least one.
            begins: whether this prompt begins a context, rather than continuing a handoff.

        Raises:
            BatonError: the model takes no images, not so many, or not at these places.
        """
        ...

    async def render(self, body: Json) -> str:
        """Render a conversation with the model's chat template. Images are not read.

        Args:
            body: body of a chat request: `messages`, and other fields that the template uses.

        Raises:
            BatonError: the template refuses the messages, or the model has no template.
        """
        ...

    def cards(self) -> list[Json]:
        """Return the models of this engine as `/v1/models` lists them, in OpenAI's shape."""
        ...

    async def call(
        self,
        operation: Operation,
        body: Json,
        context: RequestContext,
        transfer: TransferRequest | None = None,
    ) -> Reply:
        """Run one operation.

        Args:
            operation: the operation.
            body: the client's body, without the fields that only the gateway may set.
            context: ids and tenant of the request.
            transfer: what to load and save, for a request with a handoff.

        Raises:
            BatonError: the engine is not running, cannot do the operation, refused the body, or failed.
        """
        ...
