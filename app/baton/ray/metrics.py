"""Show the metrics of all replicas on one page, each series with the label `replica`.

The replicas send their series to one small deployment, which serves the page at `metrics.host:metrics.port`
of the head node, as a gateway does on its machine. No replica opens a port for it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.metrics_core import Metric

from baton.config.settings import load_settings
from baton.engines.fleet import Fleet
from baton.http.routes.metrics import app_of_page
from baton.http.uvicorn_server import MetricsServer
from baton.serve import listen
from baton.telemetry.logs import configure_logs
from baton.telemetry.metrics import GatewayMetrics
from baton.telemetry.page import labelled, page_of

SEND_EVERY_S = 5.0
FORGET_AFTER_S = 3.5 * SEND_EVERY_S
"""Seconds after which a replica that sent nothing is no longer shown: it has ended."""
log = structlog.get_logger("baton.ray")


class MetricsPage:
    """The deployment that serves the page.

    Args:
        config: the settings file; None: as `load_settings`.
    """

    def __init__(self, config: Path | None) -> None:
        settings = load_settings(config)
        configure_logs(settings.log_level, settings.log_format, sys.stderr, {"replica": "metrics"})
        self._sent: dict[str, tuple[float, list[Metric]]] = {}
        listener = listen(settings.metrics.host, settings.metrics.port, "`metrics.port`")
        server = MetricsServer(app_of_page(settings, self.page), settings.edge, GatewayMetrics())
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))

    async def send(self, replica: str, families: list[Metric]) -> None:
        """Take a replica's series."""
        self._sent[replica] = (time.monotonic(), families)

    def page(self) -> bytes:
        """Return the page of the replicas that sent their series lately."""
        since = time.monotonic() - FORGET_AFTER_S
        self._sent = {name: sent for name, sent in self._sent.items() if sent[0] >= since}
        return page_of(family for _, families in self._sent.values() for family in families)

    async def check_health(self) -> None:
        """Report to Ray Serve that the page is served.

        Raises:
            RuntimeError: it is not.
        """
        if self._serving.done():
            raise RuntimeError("the server of the metrics page has ended")


async def send_metrics(fleet: Fleet, replica: str, page: Any) -> None:
    """Send a replica's series to the page, again and again until cancelled.

    Args:
        fleet: the replica's engines.
        replica: its name.
        page: Ray Serve's handle of `MetricsPage`.
    """
    failed = False
    while True:
        try:
            await page.send.remote(replica, labelled(fleet.merged_metrics().collect(), replica=replica))
            failed = False
        except Exception as error:  # noqa: BLE001  # the page is elsewhere: whatever it has, requests go on
            if not failed:
                log.warning("metrics_not_sent", error=type(error).__name__)
            failed = True
        await asyncio.sleep(SEND_EVERY_S)
