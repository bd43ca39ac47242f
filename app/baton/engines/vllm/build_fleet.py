"""Build the fleet of vLLM engines from the settings. Importing this imports vLLM, which takes seconds."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import REGISTRY

from baton.config.environment import cores
from baton.config.gpu_memory import gpu_shares
from baton.config.groups import CPU_KV_CACHE_BYTES, MIB, EngineSettings
from baton.config.settings import Settings
from baton.engines.adapters import Adapter, AdapterInvalid, KeptAdapters, read_adapter
from baton.engines.engine import Engine
from baton.engines.fleet import Fleet, Supervisor
from baton.engines.hardware import read_processor
from baton.engines.on_demand import OnDemand, on_demand_of
from baton.engines.process.fork_server import ForkServer
from baton.engines.vllm.arguments import processor_dtype
from baton.engines.vllm.engine import VllmEngine
from baton.engines.vllm.engine_thread import Starts, end_contexts_apart, fork_cores, inspect_models_here
from baton.engines.vllm_version import is_cpu_build
from baton.errors import SettingsError
from baton.models.parsers import fetch_descriptions
from baton.telemetry.memory import MemoryReader


def build_fleet(
    settings: Settings,
    models: Mapping[str, str],
    *,
    tenants: bool,
    last_words: Callable[[], str | None],
    remote: Sequence[Engine] = (),
    server: ForkServer | None = None,
    rebuild: Callable[[EngineBuilder, Settings, Collection[str]], list[Engine]] | None = None,
) -> Fleet:
    """Build the engines of the settings, without starting them.

    Args:
        models: path of each engine's weights, by the engine's name.
        tenants: whether several tenants share the engines, so that each gets a prefix cache of its own.
        last_words: returns the cause that a dead engine process printed, if one can be found.
        remote: the engines that are servers elsewhere; they come last.
        server: forks the engines' cores; None: they are spawned.
        rebuild: builds engines of other settings, when they are read again.

    Raises:
        SettingsError: the arguments or options of an engine are invalid.
    """
    if latent := [engine.name for engine in settings.own_engines if engine.latent]:
        most = settings.handoffs.latent_steps_max
        structlog.get_logger("baton.engine").info("latent_steps_allowed", engines=latent, most=most)
    end_contexts_apart()
    if server is not None:
        fork_cores()
    if is_cpu_build():
        inspect_models_here()
    builder = EngineBuilder(Starts(server), tenants=tenants, last_words=last_words)
    engines = builder.build(settings, settings.own_engines, models)
    return Fleet(
        [*engines, *remote],
        supervision=settings.supervision,
        shared_registries=(REGISTRY,),
        at_once=_starts_at_once(settings, models) if server is not None else 1,
        build=None if rebuild is None else partial(rebuild, builder),
        settle=_settle,
        on_demand=builder.on_demand(settings),
        budget=builder.on_demand,
        settings=settings.engines,
    )


class EngineBuilder:
    """Builds a gateway's engines, at its start and when its settings are read again.

    Args:
        tenants: whether several tenants share the engines, so that each gets a prefix cache of its own.
        last_words: returns the cause that a dead engine process printed, if one can be found.
    """

    def __init__(self, starts: Starts, *, tenants: bool, last_words: Callable[[], str | None]) -> None:
        self._starts = starts
        self._salt = _tenant_salt() if tenants else lambda _tenant: None
        self._last_words = last_words
        self._shares: dict[str, float] = {}
        self._models: dict[str, str] = {}
        self._available = MemoryReader().available()  # before engines run: what they take is of the budget

    def build(
        self, settings: Settings, chosen: Sequence[EngineSettings], models: Mapping[str, str]
    ) -> list[VllmEngine]:
        """Build engines, without starting them.

        Args:
            chosen: those that are built; the others of the settings stay as they are.
            models: path of the weights, by the engine's name.

        Raises:
            SettingsError: arguments or options are invalid, or another engine's share of a GPU would change.
        """
        shares = {} if is_cpu_build() else gpu_shares(settings.own_engines)
        staying = {each.name for each in settings.own_engines} - {each.name for each in chosen}
        if moved := sorted(name for name in staying if shares.get(name) != self._shares.get(name)):
            raise SettingsError(
                f"engines '{moved[0]}': it would have to give up memory of its GPU while it runs: give every "
                "engine of this GPU a `gpu_share`, or restart the gateway"
            )
        for each in chosen:
            fetch_descriptions(each, models[each.name])
        built = [
            VllmEngine(
                each,
                models[each.name],
                salt=self._salt,
                starts=self._starts,
                transfer=transfer_config(settings) if each.handoff else None,
                gpu_share=shares.get(each.name),
                last_words=self._last_words,
                resume_s=settings.supervision.resume_s,
                adapters=adapters_of(settings, each),
            )
            for each in chosen
        ]
        _log_dtypes(chosen, models)
        self._shares = shares
        self._models |= models
        return built

    def on_demand(self, settings: Settings) -> OnDemand | None:
        """Make the budget of engines all of which were built; None: none is loaded on demand.

        Raises:
            SettingsError: one could never be loaded beside those that always run.
        """
        shares = {} if is_cpu_build() else gpu_shares(settings.own_engines)
        return on_demand_of(
            settings, shares, lambda each: _bytes_of(each, self._models[each.name]), self._available
        )


def _settle(supervisors: Sequence[Supervisor]) -> None:
    """Connect engines here: where their requests may go on, and whether they come back themselves."""
    here = []
    for each in supervisors:
        if isinstance(each.latest, VllmEngine):
            each.latest.returns = each.returns
            here.append(each.latest)
        if isinstance(each.engine, VllmEngine) and each.engine is not each.latest:
            each.engine.returns = lambda: False
    for engine in here:
        engine.peers = [other for other in here if other is not engine and other.says_the_same(engine)]


def adapters_of(settings: Settings, engine: EngineSettings) -> list[Adapter]:
    """Read the LoRA adapters that an engine begins with: of its settings, and those that operators loaded.

    Raises:
        SettingsError: one of the settings cannot be used, or the list of the others cannot be read.
    """
    found = []
    for name, folder in engine.adapters.items():
        try:
            found.append(read_adapter(name, folder))
        except AdapterInvalid as error:
            raise SettingsError(f"engines '{engine.name}': adapters.{name}: {folder}: {error}") from None
    if not engine.adapters and not engine.args.get("enable_lora"):
        return []
    try:
        kept = KeptAdapters(settings.kept_adapters).read()
    except AdapterInvalid as error:
        raise SettingsError(f"adapters_file: {error}") from None
    taken = {name for each in settings.engines for name in (each.name, *each.aliases, *each.adapters)}
    for entry in (each for each in kept if each.engine == engine.name):
        try:
            if entry.name in taken:
                raise AdapterInvalid("the settings give its name to another model")
            found.append(read_adapter(entry.name, entry.path))
        except AdapterInvalid as error:
            structlog.get_logger("baton.engine").error("adapter_lost", adapter=entry.name, cause=str(error))
    return found


def _starts_at_once(settings: Settings, models: Mapping[str, str]) -> int:
    """Count the engines that may start at once: as many as memory holds twice, at most one a core."""
    available = MemoryReader().available()
    if available is None:
        return 1
    largest = max(_bytes_of(engine, models[engine.name]) for engine in settings.own_engines)
    return max(1, min(len(cores()), available // (2 * largest)))


def _bytes_of(engine: EngineSettings, model: str) -> int:
    """Estimate the memory that an engine needs: its weights, its KV cache, and what every process takes."""
    files = Path(model).glob("*") if Path(model).is_dir() else ()
    weights = sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".bin", ".gguf"))
    return weights + int(engine.kv_cache_memory or CPU_KV_CACHE_BYTES) + 1024 * MIB


def _log_dtypes(engines: Sequence[EngineSettings], models: Mapping[str, str]) -> None:
    """Log which engines compute in float32 because the processor has no bfloat16 instructions."""
    for engine in engines:
        if dtype := processor_dtype(engine, models[engine.name]):
            structlog.get_logger("baton.engine").info(
                "dtype_chosen",
                engine=engine.name,
                dtype=dtype,
                processor=str(read_processor()),
                reason="the processor has no bfloat16 instructions",
            )


def transfer_config(settings: Settings) -> dict[str, Any]:
    """Return vLLM's KV transfer config with Baton's connector and its store."""
    return {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton_kv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "store": settings.handoff_store,
            "budget": int(settings.handoffs.budget),
            "fsync": settings.handoffs.fsync,
            "unproven_devices": settings.handoffs.unproven_devices,
            "verify": settings.handoffs.verify,
            "resident": int(settings.handoffs.resident),
            "spare_adapter": True,  # `spare_slots` keeps a slot empty
        },
    }


def _tenant_salt() -> Callable[[str], str | None]:
    """Return a function that makes a tenant's prefix-cache salt: HMAC-SHA256 under a key of this process."""
    secret = secrets.token_bytes(32)

    def salt(tenant: str) -> str:
        return hmac.new(secret, tenant.encode(), hashlib.sha256).hexdigest()

    return salt
