"""Serve an engine that computes nothing, to measure what stands before it: `fake_gateway.py PORT [URL]`.

With a URL the engine is the server there, and this gateway what stands before it.
"""

from __future__ import annotations

import asyncio
import sys

from baton.config.groups import EngineSettings
from baton.config.settings import load_settings
from baton.engines.elsewhere.engine import RemoteEngine
from baton.engines.fake.engine import FakeEngine
from baton.engines.fleet import Fleet
from baton.http.uvicorn_server import GatewayServer
from baton.serve import listen
from baton.server import create_app
from baton.telemetry.logs import configure_logs


def main() -> None:
    """Serve until SIGTERM."""
    url = sys.argv[2] if len(sys.argv) > 2 else None
    named = (
        EngineSettings(name="bench", model="fake") if url is None else EngineSettings(name="bench", url=url)
    )
    engine = FakeEngine(named.name) if url is None else RemoteEngine(named, tenants=False)
    given = {"port": int(sys.argv[1]), "metrics": {"port": 0}, "log_level": "error"}
    settings = load_settings(**given, engines=(named,))  # type: ignore[arg-type]  # values are validated
    configure_logs("error", "json", sys.stderr)
    with listen(settings.host, settings.port, "--port") as listener:
        app = create_app(settings, Fleet([engine], supervision=settings.supervision))
        server = GatewayServer(app, settings, print)
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # as `baton serve` does
            runner.run(server.serve(sockets=[listener]))


if __name__ == "__main__":
    main()
