"""The `LocalEngine` port on vLLM: start, stop and call an `AsyncLLM` and vLLM's handlers around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import structlog
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from baton.admission.fair_threads import in_own_thread
from baton.config.groups import EngineSettings
from baton.engines.adapters import Adapter, AdapterInvalid, read_adapter
from baton.engines.backend import EngineState, ImageInput, Json, Operation, Reply, Report, unsupported
from baton.engines.engine import LOOK_EVERY_S, Plugin
from baton.engines.scrub import scrub
from baton.engines.transfers import Throughput, TransferChooser, TransferRequest, TransferWatch
from baton.engines.vllm import arguments, handlers
from baton.engines.vllm.arguments import MOVES_EXTENSION
from baton.engines.vllm.client import (
    CURRENT_CALL,
    Call,
    WatchedClient,
    audited_tokens,
    note_space_marker,
    rounding_nats,
    special_tokens,
)
from baton.engines.vllm.engine_thread import EngineThread, Starts
from baton.engines.vllm.handlers import (
    ReplyTranslator,
    asked_tokens,
    for_responses,
    with_whole_prompt,
    within_context,
)
from baton.engines.vllm.images import ImagePrompts, confirm_before_reuse, image_input
from baton.engines.vllm.lora import LoadedAdapters, most_adapters
from baton.engines.vllm.plugins import chosen_plugin, close_plugin, encode_prompt, make_plugin, plugin_params
from baton.engines.vllm.resume import Streams
from baton.engines.vllm.series import EngineSeries, StepListeners
from baton.errors import (
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    PluginFailed,
    StartError,
)
from baton.images.image import ClientImage, PlacedImage
from baton.models.parsers import parsers_of
from baton.models.store import identity
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import TransferMetrics
from baton_kv.contract import TransferFailure, Warmed

WARMED_WITHIN_S = 60.0
"""Seconds after which nobody waits any more for KV to be in memory; the work itself goes on."""

PACE_ARGS = frozenset({"max_num_seqs", "max_num_batched_tokens", "enforce_eager", "gpu_memory_utilization"})
"""Arguments of an engine that change how fast it answers, and not what."""
NO_HANDOFFS = "it is configured without `handoff`, or with a `worker_extension_cls` of its own"


async def enable_moves(client: AsyncLLM) -> str | None:
    """Enable moves in a running engine; return why it cannot move KV, or None if it can."""
    try:
        answers: list[str | None] = await client.collective_rpc("baton_enable_moves")
    except Exception as error:  # noqa: BLE001  # the border to the worker: without moves it still serves
        structlog.get_logger("baton.engine").error("moves_not_enabled", exc_info=error)
        return "its worker failed when it was asked; the log says more"
    return next((answer for answer in answers if answer is not None), None)


class Progress:
    """The progress of one engine.

    Args:
        clock: seconds on a monotonic clock.

    Attributes:
        longest_s: longest time in seconds between two steps while there was work.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self.longest_s = 0.0

    def begin(self) -> None:
        """Start measuring: the engine is ready, and the time that its start took does not count."""
        self.longest_s = 0.0
        self._last = self._clock()

    def made(self) -> None:
        """Note that the engine took a step."""
        self.longest_s = max(self.longest_s, self.since())
        self._last = self._clock()

    def rest(self) -> None:
        """Note that the engine has no work, so that idle time does not count."""
        self._last = self._clock()

    def since(self) -> float:
        """Return the seconds since the last step, or since the engine last had no work."""
        return self._clock() - self._last


POOLS = {
    "embeddings": Operation.EMBEDDINGS,
    "classify": Operation.CLASSIFY,
    "score": Operation.SCORE,
    "rerank": Operation.RERANK,
    "pooling": Operation.POOLING,
}
"""The operation by which a model that pools is told to be capable of something."""
WARM_UPS: tuple[tuple[Operation, Json], ...] = (
    (Operation.COMPLETIONS, {"prompt": [0], "max_tokens": 2, "logprobs": 1}),
    (Operation.EMBEDDINGS, {"input": [0]}),
    (Operation.CLASSIFY, {"input": [0]}),
)
"""The requests that warm an engine up before its first client: one for each kind of operation."""
PREFILL = 128
"""Tokens of one more request where handoffs are on, which measures how fast the engine prefills."""


def prefill(most: int, vocabulary: int, reserved: Container[int | None]) -> list[int]:
    """Return a prompt of `PREFILL` ordinary token ids.

    Args:
        most: maximum length of the prompt in tokens.
        vocabulary: number of token ids the model has; ids repeat where there are few.
        reserved: token ids that a prompt must not hold.
    """
    ids = (1 + index % (vocabulary - 1) for index in range(min(PREFILL, most)))
    return [token for token in ids if token not in reserved]


LAST_WORDS_WAIT_S = 0.2
"""Seconds to wait for what a dying engine process printed: it arrives through a pipe."""


@dataclass(frozen=True)
class Running:
    """The parts of a running engine that requests need: there from the warm-up until the stop, or not at all.

    Attributes:
        client: the engine's client.
        streams: generates with it; None: with the client alone.
        serving: vLLM's serving handlers around it.
        image_prompts: puts placeholder tokens of images into prompts.
        plugin: the IO processor plugin that answers `/pooling`; None: vLLM does.
        special_tokens: see `LocalEngine.special_tokens`.
        adapters: the LoRA adapters that it holds.
    """

    client: AsyncLLM
    streams: Streams | None
    serving: handlers.Handlers
    image_prompts: ImagePrompts
    plugin: Plugin | None
    special_tokens: frozenset[int]
    adapters: LoadedAdapters


class VllmEngine:
    """An engine that vLLM runs.

    Args:
        salt: returns a tenant's prefix-cache salt; None where there is only one tenant.
        transfer: vLLM's KV transfer config; None: the engine is configured without `handoff`.
        gpu_share: share of its GPUs' memory; None: vLLM's default.
        last_words: returns the cause that a dead engine process printed, if one can be found.
        resume_s: seconds that a request waits for an engine to go on at once this one is lost; 0: it fails.
        adapters: the LoRA adapters that it begins with.

    Attributes:
        peers: engines of the same weights and arguments, at which requests may go on.
        returns: returns whether it runs or will by itself; not once it is given up or an operator stopped it.
    """

    def __init__(
        self,
        settings: EngineSettings,
        model: str,
        *,
        salt: Callable[[str], str | None],
        starts: Starts,
        transfer: Json | None = None,
        gpu_share: float | None = None,
        last_words: Callable[[], str | None] = lambda: None,
        resume_s: float = 0,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._resume_s = resume_s
        self.peers: Sequence[VllmEngine] = ()
        self.returns: Callable[[], bool] = lambda: True
        self._settings = settings
        self.name, self.aliases, self.default = settings.name, settings.aliases, settings.default
        self.base = settings.name
        self.adapters = {each.name: each for each in adapters}
        self.generates, self.supports_handoffs = settings.runner == "generate", settings.handoff
        self.translates = settings.translate
        self.forwarding = None
        self.throughput = Throughput()
        self._starts = starts
        self._forked = starts.server is not None and settings.forkable
        self._args = arguments.engine_args(
            settings,
            model,
            transfer,
            gpu_share=gpu_share,
            own_process=not self._forked,
            adapters=adapters,
        )
        self.placeholder = arguments.placeholder_of(self._args) if settings.latent else None
        self.rosetta_pairs = arguments.rosetta_pairs(self._args, settings.name)
        self._namespace = arguments.serving_namespace(settings, model)
        self._parsers = parsers_of(settings, model)
        self._salt = salt
        self._forgotten = 0
        self._last_words = last_words
        self._series = EngineSeries()
        self._progress = Progress()
        self._state = EngineState.STARTING
        self._thread: EngineThread | None = None
        self._running: Running | None = None
        self._opened = AsyncExitStack()  # what the stop closes, also after half a start
        self.registry = self._series.registry
        self.weights = identity(model)
        self._transfers = TransferMetrics(self.registry, settings.name)
        self._watch = TransferWatch(self.throughput, self._transfers)
        # These stay as they were while the engine restarts.
        self.images = ImageInput()
        self.context_tokens = 0
        self.moves_unsupported: str | None = NO_HANDOFFS
        self._cards: list[Json] = []
        self._made_at = int(time.time())
        self._log = structlog.get_logger("baton.engine").bind(engine=settings.name)
        self._translator = ReplyTranslator(self._log)
        self._log.info("parsers_chosen", **self._parsers.cards())
        if doubt := self._parsers.calls.doubt:
            self._log.warning("tools_not_written", setting="serving.tool_call_parser", reason=doubt)

    @property
    def state(self) -> EngineState:
        if self._state is EngineState.READY and self._running is not None and self._running.client.errored:
            return EngineState.FAILED
        return self._state

    @property
    def special_tokens(self) -> frozenset[int]:
        return self._require_running().special_tokens

    @property
    def plugin(self) -> Plugin | None:
        return self._running.plugin if self._running is not None else None

    async def encode(
        self, prompt: Any, params: Any, context: RequestContext, *, number: int, priority: int
    ) -> Any:
        client = self._require_running().client
        try:
            parsed = parse_model_prompt(client.model_config, prompt)
            pooling_params = plugin_params(params)
        except Exception as error:  # the plugin made these, no client
            self._log.error("plugin_prompt_invalid", exc_info=error)
            raise PluginFailed() from error
        salt = self._salt_of(context.tenant)
        try:
            return await encode_prompt(
                client, parsed, pooling_params, context, salt=salt, number=number, priority=priority
            )
        except Exception as error:  # the border to vLLM, which raises anything at all
            raise self._translator.error(error) from error

    async def place(
        self, prompt: list[int], images: Sequence[ClientImage], *, begins: bool
    ) -> tuple[list[int], list[PlacedImage]]:
        image_prompts = self._require_running().image_prompts
        try:
            return await image_prompts.place(prompt, images, begins=begins)
        except Exception as error:  # the border to vLLM's processor, which raises anything at all
            raise self._translator.error(error) from error

    async def render(self, body: Json) -> str:
        serving = self._require_running().serving
        try:
            return await serving.render(body)
        except Exception as error:  # the border to vLLM's renderer, which raises anything at all
            raise self._translator.error(error, body=body) from error

    def _require_running(self) -> Running:
        if self._running is None:
            raise EngineUnavailable()
        return self._running

    def rename(self, aliases: tuple[str, ...], *, default: bool) -> None:
        self.aliases, self.default = aliases, default

    def cards(self) -> list[Json]:
        cards = self._cards or (self._expected_cards() if self._settings.start == "on_demand" else [])
        base = next((card for card in cards if card["id"] == self.name), None)
        if base is None:
            return []
        aliases = ({"id": name} for name in self.aliases if "*" not in name)
        adapted = ({"id": name, "root": name, "parent": self.name} for name in self.adapters)
        return [base, *(base | card for card in (*aliases, *adapted))]

    def _expected_cards(self) -> list[Json]:
        """List the model of an engine on demand that was never loaded, as far as the settings tell."""
        able = {"generate": self.generates, "pooling": not self.generates, "handoffs": self.supports_handoffs}
        card = {
            "id": self.name,
            "object": "model",
            "created": self._made_at,
            "owned_by": "vllm",
            "root": self._args.model,
            "parent": None,
            "max_model_len": self._settings.args.get("max_model_len"),
            "capabilities": [word for word, can in able.items() if can],
        }
        return [card | self._parsers.cards()]

    async def load_adapter(self, adapter: Adapter) -> None:
        held = self._require_running().adapters
        if self._state is EngineState.STARTING:  # it loads those that it knows
            raise EngineUnavailable()
        self.adapters[adapter.name] = await held.load(adapter)

    async def unload_adapter(self, name: str) -> None:
        if self._state is EngineState.STARTING:
            raise EngineUnavailable()
        if self.adapters.pop(name, None) is None:
            raise ModelNotFound(f"There is no adapter '{name}' here.", param="lora_name")
        if self._running is not None:
            self._running.adapters.unload(name)

    async def _load_adapters(self, running: Running) -> None:
        """Load the adapters into an engine that starts, as their files are now.

        One that cannot be loaded any more is left out, but of the first start, which it ends.
        """
        for name, known in list(self.adapters.items()):
            try:
                read = await in_own_thread(read_adapter, name, known.path)
                self.adapters[name] = await running.adapters.load(read)
            except (AdapterInvalid, InvalidRequest) as error:
                if not self._cards and name in self._settings.adapters:
                    raise StartError(f"engines '{self.name}': adapters.{name}: {error}") from None
                self._log.error("adapter_lost", adapter=name, cause=str(error))
                self.adapters.pop(name, None)

    async def start(self, report: Report) -> None:
        self._state = EngineState.STARTING
        try:
            with self._starts.running():
                await self._start(report)
        except Exception as error:  # noqa: BLE001  # vLLM's start raises anything at all
            self._state = EngineState.FAILED
            self._log.debug("engine_start_failed", exc_info=error)
            await self.stop()
            self._state = EngineState.FAILED
            raise await self._start_error(error) from None

    async def _start(self, report: Report) -> None:
        report("starting the engine process and loading the weights")
        listeners = StepListeners(
            transferred=self._watch.transferred,
            prefilled=self._watch.prefilled,
            progressed=self._progress.made,
            latent_computed=self._watch.latent_computed,
            encoded=self._transfers.encoded,
        )
        logger = self._series.stat_logger(listeners)
        self._thread = EngineThread(self._args, logger, self.name, self._starts, forked=self._forked)
        self._opened.push_async_callback(self._thread.end)
        self._thread.start()
        self._running = await self._build(await asyncio.wrap_future(self._thread.built), report)
        self._opened.callback(_end_requests, self._running.client)
        cards = await self._running.serving.cards()
        told = {"capabilities": self._capabilities(self._running)} | self._parsers.cards()
        await self._load_adapters(self._running)
        self._cards = [card | told for card in cards]
        if self._args.worker_extension_cls == MOVES_EXTENSION:
            self.moves_unsupported = await enable_moves(self._running.client)
        report("warming up")
        await self._warm_up(self._running)
        self._progress.begin()
        self._state = EngineState.READY
        if self.placeholder is not None:
            (architecture,) = self._args.hf_overrides["architectures"]
            self._log.info("latent_steps_ready", architecture=architecture, placeholder=self.placeholder)

    def _capabilities(self, running: Running) -> list[str]:
        """List what the model can do, in the words of `CAPABILITIES`."""
        if not self.generates:
            of_vllm = [word for word, operation in POOLS.items() if running.serving.method(operation)]
            return of_vllm if running.plugin is None else ["pooling"]
        found = {
            "generate": True,
            "tools": running.serving.reads_calls,
            "reasoning": self._parsers.thoughts.name is not None,
            "vision": self.images.limit > 0,
            "handoffs": self.supports_handoffs,
        }
        return [word for word, can in found.items() if can]

    async def _build(self, client: AsyncLLM, report: Report) -> Running:
        """Build what requests need around an engine's client, which has no request yet."""
        self.images, self.context_tokens = image_input(client), client.model_config.max_model_len
        confirm_before_reuse(client)
        note_space_marker(client.renderer.tokenizer)
        report("building the request handlers")
        plugin = None
        if (name := chosen_plugin(client.vllm_config)) is not None:
            classic = self._settings.classic_plugin
            plugin = await in_own_thread(
                make_plugin, name, client.vllm_config, client.renderer, classic=classic
            )
            self._opened.push_async_callback(close_plugin, plugin)
        image_prompts = ImagePrompts(client, self.name)
        streams = self._streams_of(client)
        watched = WatchedClient(client, image_prompts, audited_tokens(client), streams)
        serving = await handlers.Handlers.build(watched, self._namespace, plugin=plugin is not None)
        adapters = LoadedAdapters(client, serving.adapters, most_adapters(client.vllm_config))
        if streams is not None:
            streams.adapter = adapters.of
        special = special_tokens(client.renderer.tokenizer)
        return Running(client, streams, serving, image_prompts, plugin, special, adapters)

    def _streams_of(self, client: AsyncLLM) -> Streams | None:
        return Streams(client, self._find_again, self._watch.add, self._transfers.resumed, name=self.name)

    def says_the_same(self, other: VllmEngine) -> bool:
        """Whether a request of another engine can go on here: same weights, same arguments, same handoffs."""
        mine, theirs = (
            (
                engine.weights,
                engine._settings.runner,
                engine._settings.handoff,
                engine._settings.latent,
                {name: value for name, value in engine._settings.args.items() if name not in PACE_ARGS},
            )
            for engine in (self, other)
        )
        return mine == theirs

    async def _find_again(self, fits: Callable[[Streams], bool]) -> Streams | None:
        """Wait until this engine, or one like it, is ready to go on with a request that it was lost under.

        Args:
            fits: whether the request may go on with an engine's streams.
        """
        deadline = time.monotonic() + self._resume_s
        if self._state is EngineState.STARTING and self._running is not None:
            return None  # it is its own warm-up that it was lost under
        while time.monotonic() < deadline and any(engine.returns() for engine in (*self.peers, self)):
            for engine in (*self.peers, self):
                streams = engine._running.streams if engine._running is not None else None
                if engine.state is EngineState.READY and streams is not None and fits(streams):
                    return streams
            await asyncio.sleep(LOOK_EVERY_S)
        return None

    async def _warm_up(self, running: Running) -> None:
        for operation, body in WARM_UPS:
            if running.serving.method(operation) is not None:
                await self.call(operation, body | {"model": self.name}, RequestContext("warm-up"))
        if self.supports_handoffs:
            model = running.client.model_config
            reserved = self.images.tokens | {self.placeholder}
            prompt = prefill(model.max_model_len - 1, model.get_vocab_size(), reserved)
            body = {"model": self.name, "prompt": prompt, "max_tokens": 1}
            await self.call(Operation.COMPLETIONS, body, RequestContext("warm-up"))

    async def _start_error(self, error: Exception) -> StartError:
        if isinstance(error, StartError):
            return error
        await asyncio.sleep(LAST_WORDS_WAIT_S)
        cause = self._last_words() or _first_words(error)
        return StartError(
            f"The engine '{self.name}' could not start: {cause}\n"
            'The setting log_level = "debug" shows all that it printed.'
        )

    async def stop(self) -> None:
        self._state = EngineState.STOPPED
        self._thread = self._running = None
        opened, self._opened = self._opened, AsyncExitStack()
        await opened.aclose()
        self._series.forget_levels()

    async def kill(self) -> None:
        if self._thread is not None:
            await in_own_thread(self._thread.kill)

    def stalled_s(self) -> float:
        running = self._running if self._state is EngineState.READY else None
        if running is not None and running.client.get_num_unfinished_requests():
            return self._progress.since()
        self._progress.rest()
        return 0.0

    @property
    def active(self) -> int:
        return self._running.client.get_num_unfinished_requests() if self._running is not None else 0

    @property
    def saving(self) -> bool:
        return self._watch.saving

    @property
    def memory_bytes(self) -> int | None:
        return self._thread.memory_bytes if self._thread is not None else None

    @property
    def rounding_nats(self) -> float:
        return rounding_nats(self._require_running().client)

    async def warm(self, key: str) -> Warmed:
        client = self._require_running().client
        if self._args.worker_extension_cls != MOVES_EXTENSION:
            return Warmed(failure=TransferFailure.OTHER)  # one without our methods
        until = time.monotonic() + WARMED_WITHIN_S
        while time.monotonic() < until:
            try:
                told = await client.collective_rpc("baton_warm", args=(key,))
            except EngineDeadError:
                raise EngineUnavailable() from None
            except Exception as error:  # noqa: BLE001  # the border to the worker: all goes on without
                self._log.error("kv_not_warmed", exc_info=error)
                return Warmed(failure=TransferFailure.OTHER)
            if (found := Warmed.of_ranks(told)) is not None:
                return found
            await asyncio.sleep(LOOK_EVERY_S)
        return Warmed(failure=TransferFailure.BUSY)

    def forget_prefixes(self) -> None:
        self._forgotten += 1

    def _salt_of(self, tenant: str, apart: str | None = None, adapter: Adapter | None = None) -> str | None:
        """Return the prefix-cache salt of a tenant's requests; another one since prefixes were forgotten.

        vLLM itself keeps adapters apart by their names and folders, not by what was in them.
        """
        salt = self._salt(tenant)
        salt = f"{salt or ''}.{self._forgotten}" if self._forgotten else salt
        salt = f"{salt or ''}+{adapter.name}:{adapter.digest}" if adapter is not None else salt
        return salt if apart is None else f"{salt or ''}/{apart}"

    @property
    def longest_step_s(self) -> float:
        return max(self._progress.longest_s, self._watch.longest_latent_s)

    async def call(
        self,
        operation: Operation,
        body: Json,
        context: RequestContext,
        transfer: TransferRequest | None = None,
        chooser: TransferChooser | None = None,
        adapter: Adapter | None = None,
    ) -> Reply:
        running = self._require_running()
        serving = running.serving
        method = serving.method(operation)
        if method is None:
            raise unsupported(self.name, operation)
        alone = transfer is not None and transfer.computed  # its KV is for nobody else
        apart = transfer.salt if transfer is not None else None
        call = Call(
            context,
            context.request_id if alone else self._salt_of(context.tenant, apart, adapter),
            transfer=transfer,
            chooser=chooser if self.supports_handoffs else None,
            expect=self._watch.add,
            placeholder=self.placeholder,
            images=self.images,
            asked=asked_tokens(body) if operation.generates else None,
            adapter=running.adapters.of(adapter) if adapter is not None else None,
        )
        if transfer is not None:
            self._watch.add(context.request_id, transfer)
        CURRENT_CALL.set(call)
        try:
            body = with_whole_prompt(operation, for_responses(operation, body, context), transfer)
            if call.asked is not None and context.cuts_max_tokens:
                body = within_context(body, self.context_tokens)
            request = serving.parse(operation, body)
            answer = await method(request, handlers.synthetic_request(context))
            handlers.require_not_cancelled(answer)
        except Exception as error:  # the border to vLLM's handlers, which raise anything at all
            raise self._translator.error(error, call, body) from error
        return await self._translator.reply(operation, answer, call, body)


def _end_requests(client: AsyncLLM) -> None:
    """Fail the requests that still run on an engine that ends."""
    if client.output_handler is not None:
        client.output_handler.cancel()  # else it logs the engine's end as a failure
        # The cancelled handler no longer fails the requests that still run.
        client.output_processor.propagate_error(EngineDeadError())


def _first_words(error: Exception) -> str:
    text = scrub(str(error)).replace("\n", " ") if str(error) else ""
    return text[:600] or type(error).__name__
