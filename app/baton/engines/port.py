"""What the rest of the gateway knows of an engine: this Protocol and nothing of vLLM.

`engines/vllm/engine.py` implements it on vLLM, `engines/fake/engine.py` without a model.
"""

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
    """What a request can ask of an engine; each is one route."""

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


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class WholeReply:
    """An answer in one piece, with the headers that belong to its content."""

    body: bytes
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamReply:
    """An answer in server-sent events, each item one or more whole events.

    The iterator raises a `BatonError` when the answer fails midway, and frees the engine's request
    when it is closed.
    """

    events: AsyncIterator[str]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlacedImage:
    """An image, and the tokens of a prompt that stand for it.

    Attributes:
        image: the image.
        digest: its SHA-256, by which engines know it.
        offset: index of the first of its tokens.
        length: how many there are.
        target: the tokens that stood there before they did; none where the model asks for none.
    """

    image: ClientImage
    digest: str
    offset: int
    length: int
    target: tuple[int, ...]


@dataclass(eq=False)
class TransferReport:
    """What happened to a request with a handoff. The engine alone writes it.

    Attributes:
        prompt_ids: the prompt's token ids, once known.
        output_ids: the token ids generated so far.
        cached: tokens that the engine says it did not prefill.
        loaded: tokens whose KV came from the entry; None: nothing was loaded.
        lost: tokens whose KV the entry promised, and could not be loaded.
        load_ms: milliseconds the load took.
        saves: False once the engine has said that it saves nothing.
        ended_by_token: whether the answer's last token is one that ends answers.
        miss: why the entry could not be used, where it was looked at in vain.
        save_over: set when the engine has reported how the save ended.
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
    """What an engine is asked beside a request's body: which prompt, what to load, what to save.

    Attributes:
        prompt: the whole prompt in token ids, in place of what the body says; None: as the body says.
        images: the images that these stand for, in order.
        save: key of the entry that the KV is saved as; None: nothing is saved.
        prompt_only: save the prompt's KV without the answer's.
        load: key of the entry to start from; None: nothing is loaded.
        limit: load at most so many tokens; None: all.
        latent_steps: how many placeholders the prompt holds.
        report: what happened.
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
        """Whether KV is loaded or saved; else there is only a prompt that the body cannot say."""
        return self.save is not None or self.load is not None


@dataclass(frozen=True)
class Plugin:
    """The IO processor plugin of one engine.

    Attributes:
        name: as its entry point is called.
        instance: the one instance there is, made by the engine.
        request: a body as vLLM's `IOProcessorRequest`, which plugins of older vLLM are handed whole; raises
            `BatonError` where it is none.
    """

    name: str
    instance: Any
    request: Callable[[Json], Any]


@dataclass(frozen=True)
class ImageInput:
    """What images are to one engine's model.

    Attributes:
        limit: the most that one prompt may hold; 0: the model takes text alone.
        tokens: the token ids that stand for an image, or a part of one, in its prompts.
        texts: what its tokenizer or its chat template turns into these.
        named: the engine calls an image as it is told; else by a name of its own making.
    """

    limit: int = 0
    tokens: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    named: bool = True


Reply = WholeReply | StreamReply
Report = Callable[[str], None]
"""Told the phase a start is in, in words a person understands."""


class Engine(Protocol):
    """One served model."""

    @property
    def name(self) -> str:
        """The word a request's `model` picks this engine by."""
        ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further words that pick it."""
        ...

    @property
    def state(self) -> EngineState: ...

    @property
    def registry(self) -> CollectorRegistry:
        """The engine's own series, `vllm:*`, labelled with its name."""
        ...

    async def start(self, report: Report) -> None:
        """Load the model and answer one request, so that the first client meets a warm engine.

        Raises:
            StartError: why the engine cannot run, and what to do.
        """
        ...

    async def stop(self) -> None:
        """End the engine and everything it started. Safe to call twice; it may be started again."""
        ...

    async def kill(self) -> None:
        """End the processes of an engine that no longer listens, without asking; its requests fail."""
        ...

    def stalled_s(self) -> float:
        """Seconds since it last got on with its work; 0.0 while it has none. Asked again and again."""
        ...

    @property
    def longest_step_s(self) -> float:
        """The longest time it has gone without a sign of progress and then went on, or may now: thinking."""
        ...

    @property
    def supports_handoffs(self) -> bool:
        """Whether requests may leave their KV behind here, and start from it."""
        ...

    @property
    def placeholder(self) -> int | None:
        """The token id that stands for a latent step here; None: this model does not think."""
        ...

    @property
    def weights(self) -> str:
        """What tells its weights from others: engines of the same ones understand each other's handoffs."""
        ...

    @property
    def throughput(self) -> Throughput:
        """How fast it computes and loads."""
        ...

    @property
    def images(self) -> ImageInput:
        """What images are to its model."""
        ...

    @property
    def plugin(self) -> Plugin | None:
        """What makes prompts of `/pooling` requests here and answers of outputs, if a plugin does."""
        ...

    async def encode(
        self, prompt: Any, params: Any, context: RequestContext, *, number: int, priority: int
    ) -> Any:
        """One prompt's pooled output.

        Args:
            prompt: as vLLM takes them: a text, token ids, or a dict with multimodal data.
            params: vLLM's `PoolingParams`; None: those of a plugin's prompt.
            context: our ids for the request it belongs to.
            number: of the prompt within its request.
            priority: lower is sooner.

        Returns:
            vLLM's `PoolingRequestOutput`.

        Raises:
            BatonError: whatever went wrong, already translated. Cancelled, the engine drops the prompt.
        """
        ...

    async def place(
        self, prompt: list[int], images: Sequence[ClientImage], *, begins: bool
    ) -> tuple[list[int], list[PlacedImage]]:
        """Put images into a prompt: the tokens that stand for them, where its text has places for them.

        Args:
            prompt: token ids of a text as the template writes it.
            images: its images, in order; at least one.
            begins: nothing stands before this prompt.

        Raises:
            BatonError: the model takes none, or not so many, or not in such places.
        """
        ...

    async def render(self, body: Json) -> str:
        """A conversation as the model's template writes it. Of images it needs no more than the names.

        Args:
            body: of a chat request: `messages`, and what else decides how they are written.

        Raises:
            BatonError: the template cannot write it, or there is none.
        """
        ...

    def cards(self) -> list[Json]:
        """What `/v1/models` shows of this engine, in OpenAI's shape."""
        ...

    async def call(
        self,
        operation: Operation,
        body: Json,
        context: RequestContext,
        transfer: TransferRequest | None = None,
    ) -> Reply:
        """Do one operation.

        Args:
            operation: what is asked.
            body: the request as the client sent it, already stripped of what would steer the engine.
            context: our ids for this request, and its tenant.
            transfer: what to load and save, for a request with a handoff.

        Raises:
            BatonError: whatever went wrong, already translated.
        """
        ...
