"""Prepare a gateway's engines: unpack models, set vLLM's environment, build the fleet."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from prometheus_client import REGISTRY

from baton.config.groups import EngineSettings
from baton.config.settings import Settings
from baton.config.vllm_environment import (
    apply_environment,
    cpu_threads,
    environment_conflicts,
    openmp_environment,
    runs_eager,
)
from baton.engines.elsewhere.engine import build_remote_engines
from baton.engines.engine import Engine
from baton.engines.fleet import Fleet
from baton.engines.process.fork_server import ForkServer, importing
from baton.engines.process.orphan_reaper import MARK, OrphanReaper
from baton.engines.vllm_version import check_vllm, is_cpu_build
from baton.errors import SettingsError, StartError
from baton.models.catalog import EMBEDDED
from baton.models.store import ModelStore
from baton.telemetry.progress import PhaseProgress

if TYPE_CHECKING:
    from baton.engines.vllm.build_fleet import EngineBuilder

FORKED_MODULES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.v1.pool.flash_maxsim",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "setproctitle",
    "baton_kv.connector",
    "baton_kv.extension",
    "baton_kv.joins.supported",
    "baton_latent.registration",
    "baton_vision.registration",
)
"""What an engine's core imports while it starts; those that a platform lacks are left out."""
log = structlog.get_logger("baton.engine")
HUB_ARGS = ("tokenizer", "hf_config_path", "speculative_config")
"""Engine arguments that may name a repository of a model hub."""


def refuse_conflicts() -> None:
    """Refuse to start where an environment variable would overrule the settings.

    Raises:
        StartError: one does; the message names it.
    """
    if conflicts := environment_conflicts():
        raise StartError("\n".join(conflicts))


def prepare_fleet(
    settings: Settings,
    progress: PhaseProgress,
    reaper: OrphanReaper,
    *,
    tenants: bool,
    last_words: Callable[[], str | None],
    opened: ExitStack | None,
) -> Fleet:
    """Build the engines of the settings, without starting them; imports vLLM, if one runs here: seconds.

    Args:
        reaper: kills the engines' processes when this process ends.
        tenants: whether several tenants share the engines.
        last_words: returns the cause that a dead engine process printed, if one can be found.
        opened: owns the fork server; None: engines are spawned.

    Raises:
        SettingsError: the arguments or options of an engine are invalid.
        StartError: a model or vLLM cannot be used.
    """
    remote = build_remote_engines(settings, tenants=tenants)
    if not settings.own_engines:  # then nothing here needs vLLM
        return Fleet(
            remote,
            supervision=settings.supervision,
            shared_registries=(REGISTRY,),
            build=partial(_rebuilt_elsewhere, tenants=tenants),
            settings=settings.engines,
        )
    offline = not any(_may_need_hub(engine) for engine in settings.own_engines)
    compiles = not (is_cpu_build() and runs_eager(settings))
    apply_environment(
        settings, offline=offline, compiles=compiles, marks={MARK: reaper.mark}, scratch=reaper.scratch
    )
    server = _fork_server(settings, opened)
    store = ModelStore(settings.models_folder)
    models = {}
    for engine in settings.own_engines:
        row = f"model {engine.model}"
        models[engine.name] = store.resolve(engine.model, partial(progress.phase, row))
        if engine.model in EMBEDDED:
            progress.done(row, "files verified")
    for engine in settings.own_engines:
        _check_chat_template(engine)
    check_vllm()
    progress.phase("vllm", "importing")
    with importing():  # for seconds, and with the environment set above
        from baton.engines.vllm.build_fleet import build_fleet
    progress.done("vllm", "imported")
    if server is not None and not server.usable():
        log.warning("engines_are_spawned", reason=server.unusable)
        server = None
    return build_fleet(
        settings,
        models,
        tenants=tenants,
        last_words=last_words,
        remote=remote,
        server=server,
        rebuild=partial(
            _rebuilt, tenants=tenants, offline=offline, compiles=compiles, threads=cpu_threads(settings)
        ),
    )


def _rebuilt_elsewhere(settings: Settings, names: Collection[str], *, tenants: bool) -> list[Engine]:
    """Build further engines of a gateway all of whose engines are servers elsewhere.

    Raises:
        SettingsError: one runs here, or is invalid.
    """
    if own := [engine.name for engine in settings.own_engines]:
        raise SettingsError(
            f"engines '{own[0]}': it runs here, which no engine of this gateway did at its start: restart "
            "the gateway"
        )
    return [*build_remote_engines(settings, tenants=tenants, names=names)]


def _rebuilt(
    builder: EngineBuilder,
    settings: Settings,
    names: Collection[str],
    *,
    tenants: bool,
    offline: bool,
    compiles: bool,
    threads: str,
) -> list[Engine]:
    """Build engines of settings that were read again, without starting them.

    Args:
        names: of the engines that are built.
        offline: whether no hub is asked by this process; this and what follows stays until it ends.
        compiles: whether engines may compile.
        threads: the cores that engines are bound to.

    Raises:
        OperatorError: one is invalid, or needs what this process was started without.
    """
    chosen = [engine for engine in settings.own_engines if engine.name in names]
    for engine in chosen:
        for wrong, why in (
            (offline and _may_need_hub(engine), "a hub may have to be asked for its model"),
            (not compiles and not engine.args.get("enforce_eager", True), "it compiles its model"),
            (is_cpu_build() and cpu_threads(settings) != threads, "it needs other cores"),
        ):
            if wrong:
                raise SettingsError(
                    f"engines '{engine.name}': {why}, which this gateway was started without: restart the "
                    "gateway"
                )
        _check_chat_template(engine)
    store = ModelStore(settings.models_folder)
    models = {engine.name: store.resolve(engine.model, lambda _phase: None) for engine in chosen}
    remote = build_remote_engines(settings, tenants=tenants, names=names)
    return [*builder.build(settings, chosen, models), *remote]


def _fork_server(settings: Settings, opened: ExitStack | None) -> ForkServer | None:
    """Start the process that engine cores are forked from; it imports vLLM while this process does.

    Returns:
        The fork server; None where none can be used, which is logged with the reason.
    """
    reason = None
    if not settings.supervision.fork_server:
        reason = "supervision.fork_server is false"
    elif opened is None:
        reason = "the gateway is an actor of Ray's"
    elif not any(engine.forkable for engine in settings.own_engines):
        reason = "no engine has one rank"
    elif (private := openmp_environment() if is_cpu_build() else {}) is None:
        reason = "VLLM_CPU_OMP_THREADS_BIND names no cores of one rank"
    else:
        return opened.enter_context(ForkServer(FORKED_MODULES, private))
    log.info("engines_are_spawned", reason=reason)
    return None


def _check_chat_template(engine: EngineSettings) -> None:
    """Refuse a chat template that is neither a template nor a file, before vLLM is imported."""
    template = engine.serving.get("chat_template")
    if (
        isinstance(template, str)
        and not any(sign in template for sign in "{}\n")
        and not Path(template).exists()
    ):
        raise StartError(
            f"engines '{engine.name}': serving.chat_template: there is no file {template}; "
            "give the path of one, or the template itself"
        )


def _may_need_hub(engine: EngineSettings) -> bool:
    local = engine.model in EMBEDDED or engine.model.startswith(("/", "./", "../", "~"))
    return not local or any(engine.args.get(name) for name in HUB_ARGS)
