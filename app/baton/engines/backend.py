"""The port to whatever answers requests, here or elsewhere: the `Backend` protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from baton.engines.adapters import Adapter
from baton.errors import OperationUnsupported
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
        """True if the engine generates tokens, so that schemas and grammars in a body are compiled."""
        return not self.pools and self not in {
            Operation.COUNT_TOKENS,
            Operation.TOKENIZE,
            Operation.DETOKENIZE,
        }

    @property
    def pools(self) -> bool:
        """True if an engine answers with what its model pools, not with tokens."""
        return self in {
            Operation.EMBEDDINGS,
            Operation.POOLING,
            Operation.CLASSIFY,
            Operation.SCORE,
            Operation.RERANK,
        }


CAPABILITIES = (
    *("generate", "tools", "reasoning", "vision", "handoffs"),
    *("embeddings", "classify", "score", "rerank", "pooling"),
)
"""Words for what a model can do, in its card's `capabilities`: tools are called, thoughts told apart, images
read, contexts handed over; the others pool."""


def unsupported(engine: str, operation: Operation) -> OperationUnsupported:
    """Refuse an operation that an engine's model is not made for."""
    return OperationUnsupported(f"The model '{engine}' does not support {operation.value}.")


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    UNREACHABLE = "unreachable"
    """A server elsewhere that does not answer; it is asked until it does."""
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPING = "stopping"
    """Stopped by an operator, it finishes its requests and takes no more."""
    STOPPED = "stopped"
    UNLOADED = "unloaded"
    """Not running: a request loads it."""
    UNLOADING = "unloading"
    """Unloaded to make room or because it is idle, it finishes its requests and takes no more."""


@dataclass(frozen=True)
class WholeReply:
    """An answer in one piece, with the headers that describe its content.

    Attributes:
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
class ImageInput:
    """The way in which one engine's model takes images.

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
    """Another gateway, by what it says of itself to one that sends it requests.

    Attributes:
        tenant: the tenant whose key the gateway was asked with.
        proof: proof that it uses a certain store of handoffs; None: it uses none.
        hands_over: whether its engine supports handoffs.
    """

    tenant: str
    proof: str | None
    hands_over: bool


Report = Callable[[str], None]
"""Called with the phase that a start is in, as a text for people."""


class Backend(Protocol):
    """One served model, here or elsewhere."""

    @property
    def name(self) -> str:
        """The name by which a request's `model` picks it."""
        ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names that pick it, and patterns of names, in which `*` stands for any characters."""
        ...

    @property
    def default(self) -> bool:
        """Whether requests that name no model get it, where several engines of its kind could answer."""
        ...

    @property
    def base(self) -> str:
        """The name of the engine of the settings that it is; or of the one that an adapter's runs on."""
        ...

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """Its LoRA adapters by name, also while it restarts; each is a further model."""
        ...

    @property
    def generates(self) -> bool:
        """True if it generates text; others pool."""
        ...

    @property
    def state(self) -> EngineState: ...

    @property
    def active(self) -> int:
        """Number of requests that it works on or that wait in it."""
        ...

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of this machine's memory that its processes take; None: not known."""
        ...

    @property
    def supports_handoffs(self) -> bool:
        """True if it was configured with `handoff`, so that requests may save and load KV."""
        ...

    @property
    def images(self) -> ImageInput:
        """The way in which its model takes images."""
        ...

    @property
    def registry(self) -> CollectorRegistry:
        """Its own metrics, labelled with its name."""
        ...

    def cards(self) -> list[Json]:
        """List its models as `/v1/models` does, in OpenAI's shape, each with its `capabilities`."""
        ...

    def rename(self, aliases: tuple[str, ...], *, default: bool) -> None:
        """Take other aliases, and whether it answers requests that name no model; requests go on."""
        ...

    async def start(self, report: Report) -> None:
        """Make it ready, so that the first client does not wait for that.

        Raises:
            StartError: it cannot run; the message says why and what to do.
        """
        ...

    async def stop(self) -> None:
        """Stop it and everything it started. Safe to call twice; it may be started again."""
        ...


class Forwarding(Protocol):
    """The server elsewhere that answers all requests of an engine."""

    @property
    def is_gateway(self) -> bool:
        """True if it is another Baton."""
        ...

    def key_id(self, tenant: str) -> str:
        """Name the key that a tenant's requests are sent with, each by another name, without showing it."""
        ...

    async def send(
        self, operation: Operation, body: Json, context: RequestContext, *, automatic: bool
    ) -> Reply:
        """Send a request on, with its `handoff` field, and return the answer.

        Args:
            body: the client's, without the fields that only the gateway may set.
            automatic: whether the other gateway may load and save handoffs by itself.

        Raises:
            BatonError: the server refused the request, failed, or cannot be reached.
        """
        ...

    async def create_handoff(self, body: Json, context: RequestContext) -> WholeReply:
        """Send the body of `POST /v1/handoffs` on; raises as `send` does."""
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


class Elsewhere(Backend, Protocol):
    """A model that a server elsewhere answers for: requests go there whole, with their handoffs."""

    @property
    def forwarding(self) -> Forwarding: ...
