"""Builds the real fleet. Importing this imports vLLM, which takes seconds."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping

from prometheus_client import REGISTRY

from baton.engines.arguments import settings_from_command_line
from baton.engines.engine import VllmEngine
from baton.engines.fleet import Fleet
from baton.settings import EngineSettings, Settings


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
    salt = _tenant_salt() if tenants else lambda _tenant: None
    engines = [
        VllmEngine(engine, models[engine.name], salt=salt, last_words=last_words)
        for engine in settings.engines
    ]
    return Fleet(engines, shared_registries=(REGISTRY,))


def _tenant_salt() -> Callable[[str], str | None]:
    """A tenant's prefix-cache salt: HMAC-SHA256 under a key that lives as long as this process."""
    secret = secrets.token_bytes(32)

    def salt(tenant: str) -> str:
        return hmac.new(secret, tenant.encode(), hashlib.sha256).hexdigest()

    return salt


def engine_from_command_line(arguments: list[str]) -> EngineSettings:
    """One engine as `vllm serve` users type it."""
    return settings_from_command_line(arguments)
