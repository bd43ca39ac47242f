"""Builds the real fleet. Importing this imports vLLM, which takes seconds."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from prometheus_client import REGISTRY

from baton.config.groups import EngineSettings
from baton.config.settings import Settings
from baton.engines.cpu import read_processor
from baton.engines.fleet import Fleet
from baton.engines.vllm.arguments import processor_s_dtype
from baton.engines.vllm.command_line import settings_from_command_line
from baton.engines.vllm.engine import VllmEngine


def build_fleet(
    settings: Settings,
    models: Mapping[str, str],
    *,
    tenants: bool,
    last_words: Callable[[], str | None],
) -> Fleet:
    """The engines of the settings, not started.

    Args:
        settings: the settings.
        models: where the weights of each engine are, by the engine's name.
        tenants: several tenants share the engines, so each gets a prefix cache of its own.
        last_words: the cause a dead engine process printed, if one can be found.

    Raises:
        SettingsError: an argument vLLM does not know.
    """
    if thinking := [engine.name for engine in settings.engines if engine.latent]:
        most = settings.handoffs.latent_steps_max
        structlog.get_logger("baton.engine").info("latent_steps_allowed", engines=thinking, most=most)
    salt = _tenant_salt() if tenants else lambda _tenant: None
    engines = [
        VllmEngine(
            engine,
            models[engine.name],
            salt=salt,
            transfer=transfer_config(settings) if engine.handoff else None,
            last_words=last_words,
        )
        for engine in settings.engines
    ]
    _log_dtypes(settings, models)
    return Fleet(engines, supervision=settings.supervision, shared_registries=(REGISTRY,))


def _log_dtypes(settings: Settings, models: Mapping[str, str]) -> None:
    """Log which engines compute in float32 because the processor is faster in it."""
    for engine in settings.engines:
        if dtype := processor_s_dtype(engine, models[engine.name]):
            structlog.get_logger("baton.engine").info(
                "dtype_chosen",
                engine=engine.name,
                dtype=dtype,
                processor=str(read_processor()),
                reason="the processor has no bfloat16 instructions",
            )


def transfer_config(settings: Settings) -> dict[str, Any]:
    """vLLM's KV transfer config for our connector and our store."""
    return {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton_kv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "store": settings.handoff_store,
            "budget": int(settings.handoffs.budget),
            "fsync": settings.handoffs.fsync,
            "verify": settings.handoffs.verify,
        },
    }


def _tenant_salt() -> Callable[[str], str | None]:
    """A tenant's prefix-cache salt: HMAC-SHA256 under a key that lives as long as this process."""
    secret = secrets.token_bytes(32)

    def salt(tenant: str) -> str:
        return hmac.new(secret, tenant.encode(), hashlib.sha256).hexdigest()

    return salt


def engine_from_command_line(
    arguments: list[str], *, handoff: bool = False, latent: bool = False
) -> EngineSettings:
    """Read one engine as `vllm serve` users type it."""
    return settings_from_command_line(arguments, handoff=handoff, latent=latent)
