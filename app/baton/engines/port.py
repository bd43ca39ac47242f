"""The port to an engine: the `Engine` protocol and its types. `vllm/`, `remote/` and `fake/` implement it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from baton.engines.kv_transfer import TransferChooser, TransferRequest
from baton.engines.speeds import Throughput
from baton.errors import OperationUnsupported
from baton.images.client_image import ClientImage
from baton.images.placed_image import PlacedImage
from baton.telemetry.ids import RequestContext

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
        return not self.pools and self not in {
            Operation.COUNT_TOKENS,
            Operation.TOKENIZE,
            Operation.DETOKENIZE,
        }

    @property
    def pools(self) -> bool:
        """Whether an engine answers with what its model pools, not with tokens."""
        return self in {
            Operation.EMBEDDINGS,
            Operation.POOLING,
            Operation.CLASSIFY,
            Operation.SCORE,
            Operation.RERANK,
        }


def unsupported(engine: str, operation: Operation) -> OperationUnsupported:
    """Return the refusal of an operation that an engine's model is not made for."""
    return OperationUnsupported(f"The model '{engine}' does not support {operation.value}.")


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    UNREACHABLE = "unreachable"
    """A server elsewhere that does not answer; it is asked until it does."""
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class WholeReply:
    """An answer in one piece, with the headers that describe its content.

    Attributes:
        body: the answer.
        media_type: of the body.
        headers: that describe it.
        status: HTTP status, which is 200 but for another server's 201 and 202.
    """

    body: bytes
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200


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


@dataclass(frozen=True)
class Peer:
    """What another gateway says of itself to one that sends it requests.

    Attributes:
        tenant: the tenant whose key the gateway was asked with.
        proof: proof that it uses a certain store of handoffs; None: it uses none.
        hands_over: whether its engine supports handoffs.
    """

    tenant: str
    proof: str | None
    hands_over: bool


class Forwarding(Protocol):
    """The server elsewhere that answers all requests of an engine."""

    @property
    def is_gateway(self) -> bool:
        """Whether it is another Baton."""
        ...

    def key_id(self, tenant: str) -> str:
        """Return what differs for each key that a tenant's requests may be sent with, without showing it."""
        ...

    async def send(
        self, operation: Operation, body: Json, context: RequestContext, *, automatic: bool
    ) -> Reply:
        """Send a request on, with its `handoff` field, and return the answer.

        Args:
            operation: the operation.
            body: the client's body, without the fields that only the gateway may set.
            context: ids and tenant of the request.
            automatic: whether the other gateway may load and save handoffs by itself.

        Raises:
            BatonError: the server refused the request, failed, or cannot be reached.
        """
        ...

    async def create_handoff(self, body: Json, context: RequestContext) -> WholeReply:
        """Send the body of `POST /v1/handoffs` on.

        Raises:
            BatonError: see `send`.
        """
        ...

    async def peer(self, challenge: str, context: RequestContext) -> Peer | None:
        """Ask the server who it is; None: it is no gateway.

        Args:
            challenge: random hexadecimal digits that its proof is made for.
            context: of the request for which it is asked; its tenant's key is used.

        Raises:
            BatonError: the server failed or cannot be reached.
        """
        ...


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
    def generates(self) -> bool:
        """Whether it generates text; others pool."""
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
    def active(self) -> int:
        """Number of requests that the engine works on or that wait in it."""
        ...

    @property
    def rounding_nats(self) -> float:
        """Most nats by which log probabilities of two computations of one prompt may differ by rounding.

        Raises:
            EngineUnavailable: the engine is not running.
        """
        ...

    def forget_prefixes(self) -> None:
        """Let no later request use what the engine's prefix cache holds now."""
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
    def moves_unsupported(self) -> str | None:
        """Why the engine cannot move KV of several handoffs into one context; None: it can."""
        ...

    @property
    def translates(self) -> bool:
        """Whether requests continue handoffs of other weights by their text, unless they say otherwise."""
        ...

    @property
    def rosetta_pairs(self) -> frozenset[tuple[str, str]]:
        """Names of engines, source and target, between which one vector stands for a handoff by default."""
        ...

    @property
    def special_tokens(self) -> frozenset[int]:
        """Token ids that are no text, such as those that begin and end one."""
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
    def forwarding(self) -> Forwarding | None:
        """The server elsewhere that gets requests whole, with their handoffs; None: the engine runs here."""
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
        chooser: TransferChooser | None = None,
    ) -> Reply:
        """Run one operation.

        Args:
            operation: the operation.
            body: the client's body, without the fields that only the gateway may set.
            context: ids and tenant of the request.
            transfer: what to load and save, for a request with a handoff.
            chooser: chooses that for a request without one, once its prompts' token ids are known.

        Raises:
            BatonError: the engine is not running, cannot do the operation, refused the body, or failed.
        """
        ...
