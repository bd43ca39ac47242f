"""Load LoRA adapters into a running engine, and unload them when nobody uses them any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import structlog
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from baton.admission.fair_threads import in_own_thread
from baton.engines.adapters import Adapter, AdapterInvalid, read_adapter
from baton.engines.scrub import scrub
from baton.errors import EngineUnavailable, InvalidRequest, ModelNotFound, OperationUnsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger("baton.engine")


def spare_slots() -> int:
    """Count the slots for adapters that must stay empty.

    On CPUs vLLM 0.32 computes a request without an adapter, in a step that has requests with one, with what
    is in the last slot (`vllm/lora/ops/torch_ops/lora_ops.py` takes index -1, no adapter, for the last).
    Slots are filled from the first, so that the last of one more than there are adapters holds zeros.
    """
    return 1 if current_platform.is_cpu() else 0


def most_adapters(config: VllmConfig) -> int:
    """Count the adapters that an engine may hold at a time.

    Never more than have a slot: vLLM would read the files of the others again at every change, when they may
    be others.
    """
    return config.lora_config.max_loras - spare_slots() if config.lora_config is not None else 0


@dataclass(eq=False)
class Loaded:
    """An adapter that an engine holds.

    Attributes:
        request: what vLLM is told to compute with it.
        unused: called when the last request has ended that used it.
        running: number of requests that use it.
        leaves: no further request may begin with it.
    """

    adapter: Adapter
    request: LoRARequest
    unused: Callable[[Loaded], None]
    running: int = 0
    leaves: bool = False

    def begin(self) -> None:
        """Hold it for one more request.

        Raises:
            ModelNotFound: no further request may begin with it: the engine would read its files again.
        """
        if self.leaves:
            raise _gone(self.adapter)
        self.running += 1

    def end(self) -> None:
        """Hold it for one request less."""
        self.running -= 1
        if not self.running:
            self.unused(self)


def held(loaded: Loaded | None, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Hold an adapter while the engine works on a request with it; None: it has none.

    Args:
        outputs: of the engine, which gets the request when the first of them is asked for.
    """
    return outputs if loaded is None else _holding(loaded, outputs)


async def _holding(loaded: Loaded, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    loaded.begin()
    try:
        async with aclosing(outputs):
            async for output in outputs:
                yield output
    finally:
        loaded.end()


class LoadedAdapters:
    """The adapters that one running engine holds.

    Args:
        known: vLLM's requests by the names by which its handlers find them.
        most: how many it may hold.
    """

    def __init__(self, client: AsyncLLM, known: dict[str, LoRARequest], most: int) -> None:
        self._client = client
        self._known = known
        self._most = most
        self._held: list[Loaded] = []
        self._ids = count(1)  # an id means one adapter for the engine's life
        self._turn = asyncio.Lock()
        self._leaving: set[asyncio.Task[Any]] = set()

    def of(self, adapter: Adapter) -> Loaded:
        """Return an adapter as it is held.

        Raises:
            ModelNotFound: it was unloaded since the request picked it.
            EngineUnavailable: it was replaced since then.
        """
        for each in self._held:
            if each.adapter == adapter and not each.leaves:
                return each
        if any(each.adapter.name == adapter.name and not each.leaves for each in self._held):
            raise EngineUnavailable(
                f"The adapter '{adapter.name}' was replaced as the request began; try again.", retry_after_s=1
            )
        raise _gone(adapter)

    async def load(self, adapter: Adapter) -> Adapter:
        """Load an adapter, in the place of one of the same name; return it as it was read.

        Raises:
            InvalidRequest: there is no room, or vLLM cannot use it.
            EngineUnavailable: the engine ended meanwhile.
        """
        loading = asyncio.ensure_future(self._load(adapter))
        self._leaving.add(loading)  # it goes on where its client leaves: the engine may have it by then
        loading.add_done_callback(self._leaving.discard)
        return await asyncio.shield(loading)

    async def _load(self, adapter: Adapter) -> Adapter:
        async with self._turn:
            if not self._most:
                raise OperationUnsupported(
                    "The engine was started without LoRA: set `engines.adapters`, or `enable_lora` in its "
                    "`args`."
                )
            if len(self._held) >= self._most:
                raise InvalidRequest(
                    f"The engine holds {len(self._held)} LoRA adapters, with those that requests still use, "
                    f"and may hold {self._most} (setting engines.args.max_loras): unload one.",
                    param="lora_name",
                )
            new = Loaded(adapter, LoRARequest(adapter.name, next(self._ids), str(adapter.path)), self._free)
            self._held.append(new)
            try:
                await self._add(new)
            except BaseException:
                new.leaves = True
                await self._remove(new)  # it may have a slot all the same
                raise
        self.unload(adapter.name, but=new)
        self._known[adapter.name] = new.request
        log.info("adapter_loaded", adapter=adapter.name, digest=adapter.digest)
        return adapter

    async def _add(self, new: Loaded) -> None:
        adapter = new.adapter
        try:
            await self._client.add_lora(new.request)
        except EngineDeadError:
            raise EngineUnavailable() from None
        except Exception as error:  # the border to vLLM, which raises anything at all
            reason = scrub(str(error).partition("\n")[0])[:300]
            log.warning("adapter_refused", adapter=adapter.name, exc_info=error)
            raise InvalidRequest(
                f"vLLM cannot use the adapter '{adapter.name}': {reason}", param="lora_path"
            ) from None
        if await digest_now(adapter) != adapter.digest:  # what the engine has read may be either
            raise InvalidRequest(
                f"The files of the adapter '{adapter.name}' were changed while it was loaded: try again.",
                param="lora_path",
            )

    def unload(self, name: str, *, but: Loaded | None = None) -> None:
        """Close the adapters of a name to further requests, and free those that nobody uses."""
        self._known.pop(name, None)
        for each in self._held:
            if each.adapter.name == name and each is not but:
                each.leaves = True
                self._free(each)

    def _free(self, loaded: Loaded) -> None:
        if not loaded.leaves or loaded.running or loaded not in self._held:
            return
        task = asyncio.ensure_future(self._remove(loaded))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _remove(self, loaded: Loaded) -> None:
        try:
            await self._client.remove_lora(loaded.request.lora_int_id)
        except Exception as error:  # the border to vLLM: the engine has ended, or keeps its slot
            log.warning("adapter_not_removed", adapter=loaded.adapter.name, exc_info=error)
            return
        if loaded in self._held:
            self._held.remove(loaded)
        log.info("adapter_unloaded", adapter=loaded.adapter.name)


def _gone(adapter: Adapter) -> ModelNotFound:
    return ModelNotFound(f"The model '{adapter.name}' is no longer served here.", param="model")


async def digest_now(adapter: Adapter) -> str | None:
    """Read an adapter's digest again; None: its files cannot be read any more."""
    try:
        return (await in_own_thread(read_adapter, adapter.name, adapter.path)).digest
    except AdapterInvalid:
        return None
