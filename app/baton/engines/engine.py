"""The port to an engine that runs here: the `LocalEngine` protocol. `vllm/` and `fake/` implement it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

from baton.engines.adapters import Adapter
from baton.engines.backend import Backend, Elsewhere, EngineState, Json, Operation, Reply
from baton.engines.transfers import Throughput, TransferChooser, TransferRequest
from baton.images.image import ClientImage, PlacedImage
from baton.telemetry.ids import RequestContext
from baton_kv.contract import Warmed

LOOK_EVERY_S = 0.05
"""Seconds between two looks: an agent's next request comes at once, so one idle moment is not enough."""


@dataclass(frozen=True)
class Plugin:
    """The IO processor plugin of one engine.

    Attributes:
        name: name of its entry point.
        request: parses a body as vLLM's `IOProcessorRequest`, for older plugins; raises `BatonError`.
    """

    name: str
    instance: Any
    request: Callable[[Json], Any]

    @property
    def can(self) -> list[str]:
        """Words for its abilities, of the plugin's own choice: `can = ("map",)` in its class."""
        said = getattr(self.instance, "can", ())
        return [word for word in said if isinstance(word, str)] if isinstance(said, tuple) else []

    @property
    def lasting(self) -> dict[str, tuple[str, str, str]]:
        """Title, file name and media type of each output that a kept request gets, as the plugin says."""
        said = getattr(self.instance, "lasting", {})
        return {str(name): (str(title), str(file), str(kind)) for name, (title, file, kind) in said.items()}


class LocalEngine(Backend, Protocol):
    """One served model that runs here, so that its KV can be loaded, saved and moved."""

    @property
    def forwarding(self) -> None:
        """Nothing: requests are answered here. What tells an engine from a server elsewhere, also to mypy."""
        ...

    @property
    def saving(self) -> bool:
        """True while it saves KV of requests that have ended."""
        ...

    async def kill(self) -> None:
        """Kill the processes of an engine that hangs; its requests fail."""
        ...

    def stalled_s(self) -> float:
        """Measure the seconds since the last step, 0.0 without work. Call it often: it notices idle times."""
        ...

    @property
    def rounding_nats(self) -> float:
        """Most nats by which log probabilities of two computations of one prompt may differ by rounding.

        Raises:
            EngineUnavailable: the engine is not running.
        """
        ...

    async def warm(self, key: str) -> Warmed:
        """Bring stored KV into the engine's memory for proved KV; return what of it is there then.

        It costs no request's time, and drives out only what a load of it would.

        Args:
            key: key of its entry in the store.

        Raises:
            EngineUnavailable: the engine is not running, or was lost meanwhile.
        """
        ...

    def forget_prefixes(self) -> None:
        """Keep later requests from using what the engine's prefix cache holds now."""
        ...

    @property
    def longest_step_s(self) -> float:
        """Seconds of the longest step so far, or of one that may run now because of latent steps."""
        ...

    @property
    def moves_unsupported(self) -> str | None:
        """The reason why the engine cannot move KV of several handoffs into one context; None: it can."""
        ...

    @property
    def translates(self) -> bool:
        """True if requests continue handoffs of other weights by their text, unless they say otherwise."""
        ...

    @property
    def rosetta_pairs(self) -> frozenset[tuple[str, str]]:
        """Names of engines, source and target, between which one vector stands for a handoff by default."""
        ...

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt with its answer."""
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

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter, in the place of one of the same name, which running requests go on with.

        Raises:
            BatonError: the engine takes no adapters, not so many or not this one, or is not running.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Running requests go on with it; no other begins.

        Raises:
            ModelNotFound: it has no adapter of this name.
        """
        ...

    async def call(
        self,
        operation: Operation,
        body: Json,
        context: RequestContext,
        transfer: TransferRequest | None = None,
        chooser: TransferChooser | None = None,
        adapter: Adapter | None = None,
    ) -> Reply:
        """Run one operation.

        Args:
            body: the client's, without the fields that only the gateway may set.
            transfer: what to load and save, for a request with a handoff.
            chooser: chooses that for a request without one, once its prompts' token ids are known.
            adapter: the LoRA adapter that `model` of the body names.

        Raises:
            BatonError: the engine is not running, cannot do the operation, refused the body, or failed.
        """
        ...


class AdaptedEngine:
    """An engine with one of its LoRA adapters: what answers requests whose `model` names the adapter.

    Its name and its weights are the adapter's, so that its handoffs are apart; all else is the engine's.
    """

    def __init__(self, engine: LocalEngine, adapter: Adapter) -> None:
        self._engine = engine
        self._adapter = adapter
        self.name, self.aliases = adapter.name, ()
        self.weights = adapter.weights(engine.weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def call(
        self,
        operation: Operation,
        body: Json,
        context: RequestContext,
        transfer: TransferRequest | None = None,
        chooser: TransferChooser | None = None,
    ) -> Reply:
        return await self._engine.call(operation, body, context, transfer, chooser, self._adapter)


def adapted(engine: LocalEngine, adapter: Adapter) -> LocalEngine:
    """Return an engine with one of its adapters."""
    return cast(LocalEngine, AdaptedEngine(engine, adapter))  # what it lacks itself is the engine's


Engine: TypeAlias = LocalEngine | Elsewhere
"""What answers for a model of the settings; its `forwarding` tells which of the two it is."""


def is_idle(engine: LocalEngine) -> bool:
    """Check whether an engine runs, and has no request."""
    return engine.state is EngineState.READY and not engine.active


async def until_idle(
    engine: LocalEngine, within_s: float, unless: Callable[[], bool] = lambda: False
) -> None:
    """Wait until an engine was idle at two looks, one after the other.

    Args:
        unless: returns whether the wait is to end at once.
    """
    deadline, before = time.monotonic() + within_s, False
    while time.monotonic() < deadline and not unless():
        idle = is_idle(engine)
        if idle and before:
            return
        before = idle
        await asyncio.sleep(LOOK_EVERY_S)
