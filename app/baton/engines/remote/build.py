"""Build the engines of the settings that are servers elsewhere."""

from __future__ import annotations

from urllib.parse import urlsplit

import structlog

from baton.config.groups import EngineSettings
from baton.config.settings import Settings, is_loopback
from baton.engines.remote.engine import RemoteEngine


def build_remote_engines(settings: Settings, *, tenants: bool) -> list[RemoteEngine]:
    """Build the engines that are servers elsewhere, without asking them.

    Args:
        settings: the settings.
        tenants: whether several tenants' requests are sent on.

    Raises:
        SettingsError: a key or certificates cannot be read.
    """
    remote = [engine for engine in settings.engines if not engine.own]
    for engine in remote:
        _warn_of_open_key(engine)
    return [RemoteEngine(engine, tenants=tenants) for engine in remote]


def _warn_of_open_key(engine: EngineSettings) -> None:
    """Log that a key crosses the network in clear."""
    parts = urlsplit(engine.url or "")
    keyed = engine.remote.key_file is not None or engine.remote.keys_dir is not None
    if keyed and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        structlog.get_logger("baton.engine").warning(
            "remote_key_in_clear", engine=engine.name, url=engine.url, reason="use https://"
        )
