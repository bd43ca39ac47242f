"""Keep one runner for each engine that has a plugin."""

from __future__ import annotations

from baton.config.groups import PoolingSettings
from baton.engines.engine import Engine
from baton.pooling.runner import Runner
from baton.pooling.uploads import require_folder
from baton.telemetry.metrics import PoolingMetrics, QueueMetrics


class Pooling:
    """The runners of one gateway.

    Args:
        settings: limits of requests and uploads.
        metrics: of plugin requests.
        queues: of waiting requests.

    Raises:
        SettingsError: no files can be made in `spool_dir`.
    """

    def __init__(self, settings: PoolingSettings, metrics: PoolingMetrics, queues: QueueMetrics) -> None:
        self.settings = settings
        self._metrics = metrics
        self._queues = queues
        require_folder(settings.spool_dir)
        self._runners: dict[str, Runner] = {}

    def runner(self, engine: Engine) -> Runner | None:
        """Return the runner of an engine's plugin, a new one after a restart; None: it has no plugin."""
        if engine.forwarding is not None or (plugin := engine.plugin) is None:
            return None
        known = self._runners.get(engine.name)
        if known is None or known.plugin is not plugin:
            if known is not None:
                known.close()
            known = self._runners[engine.name] = Runner(
                engine, plugin, self.settings, self._metrics, queues=self._queues
            )
        return known

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
