"""Prepare a gateway's engines: unpack models, set vLLM's environment, build the fleet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog
from prometheus_client import REGISTRY

from baton.config.groups import EngineSettings
from baton.config.settings import Settings
from baton.config.vllm_environment import apply_environment, environment_conflicts, runs_eager
from baton.engines.fleet import Fleet
from baton.engines.process.orphan_reaper import MARK, OrphanReaper
from baton.engines.remote.build import build_remote_engines
from baton.engines.vllm_version import check_vllm, is_cpu_build
from baton.errors import StartError
from baton.models.catalog import EMBEDDED
from baton.models.store import ModelStore
from baton.telemetry.progress import PhaseProgress

HUB_ARGS = ("tokenizer", "hf_config_path", "speculative_config")
"""Engine arguments that may name a repository of a model hub."""


def refuse_conflicts() -> None:
    """Refuse to start where an environment variable would overrule the settings.

    Raises:
        StartError: one does; the message names it.
    """
    if conflicts := environment_conflicts():
        raise StartError("\n".join(conflicts))


def with_allowed_handoffs(settings: Settings) -> Settings:
    """Return the settings, with handoffs off where they may not be used; logs that."""
    allowed = settings.with_allowed_handoffs(on_cpu=is_cpu_build())
    if allowed is not settings:
        structlog.get_logger("baton").warning(
            "handoffs_off",
            reason="on GPUs they were never run; handoffs.unproven_devices = true allows them",
        )
    return allowed


def prepare_fleet(
    settings: Settings,
    progress: PhaseProgress,
    reaper: OrphanReaper,
    *,
    tenants: bool,
    last_words: Callable[[], str | None],
) -> Fleet:
    """Build the engines of the settings, without starting them; imports vLLM, if one runs here: seconds.

    Args:
        settings: the settings.
        progress: shows what is done.
        reaper: kills the engines' processes when this process ends.
        tenants: whether several tenants share the engines.
        last_words: returns the cause that a dead engine process printed, if one can be found.

    Raises:
        SettingsError: the arguments or options of an engine are invalid.
        StartError: a model or vLLM cannot be used.
    """
    remote = build_remote_engines(settings, tenants=tenants)
    if not settings.own_engines:  # then nothing here needs vLLM
        return Fleet(remote, supervision=settings.supervision, shared_registries=(REGISTRY,))
    store = ModelStore(settings.models_folder)
    models = {}
    for engine in settings.own_engines:
        row = f"model {engine.model}"
        models[engine.name] = store.resolve(engine.model, partial(progress.phase, row))
        if engine.model in EMBEDDED:
            progress.done(row, "files verified")
    offline = not any(_may_need_hub(engine) for engine in settings.own_engines)
    compiles = not (is_cpu_build() and runs_eager(settings))
    apply_environment(
        settings, offline=offline, compiles=compiles, marks={MARK: reaper.mark}, scratch=reaper.scratch
    )
    check_vllm()
    progress.phase("vllm", "importing")
    from baton.engines.vllm.build_fleet import (
        build_fleet,
    )  # imports vLLM for seconds, and needs the environment set above

    progress.done("vllm", "imported")
    return build_fleet(settings, models, tenants=tenants, last_words=last_words, remote=remote)


def _may_need_hub(engine: EngineSettings) -> bool:
    local = engine.model in EMBEDDED or engine.model.startswith(("/", "./", "../", "~"))
    return not local or any(engine.args.get(name) for name in HUB_ARGS)
