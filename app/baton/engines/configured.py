"""Answer what the settings say of an engine, wherever it runs."""

from __future__ import annotations

from baton.config.groups import EngineSettings
from baton.engines.speeds import Throughput


class ConfiguredEngine:
    """The part of the `Engine` port that is the same for all engines of the settings.

    Args:
        settings: the engine's table.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._throughput = Throughput()

    @property
    def name(self) -> str:
        return self._settings.name

    @property
    def aliases(self) -> tuple[str, ...]:
        return self._settings.aliases

    @property
    def generates(self) -> bool:
        return self._settings.runner == "generate"

    @property
    def supports_handoffs(self) -> bool:
        return self._settings.handoff

    @property
    def throughput(self) -> Throughput:
        return self._throughput
