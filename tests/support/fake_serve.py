"""A gateway with fake engines in a process of its own: `fake_serve.py SETTINGS BEHAVIOUR`, both JSON.

Prints its URL once it is ready, and ends as `baton serve` does.
"""

from __future__ import annotations

import asyncio
import json
import sys

from baton.config.groups import EngineSettings
from baton.config.settings import load_settings
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.engines.fleet import Fleet
from baton.http.uvicorn_server import GatewayServer
from baton.serve import listen
from baton.server import create_app
from baton.telemetry.logs import configure_logs


def main() -> int:
    overrides, behaviour = map(json.loads, sys.argv[1:])
    engines = [FakeEngine(name, behaviour=FakeBehaviour(**behaviour)) for name in ("alpha", "beta")]
    served = tuple(EngineSettings(name=engine.name, model="fake") for engine in engines)
    settings = load_settings(**({"port": 0, "engines": served} | overrides))
    configure_logs("info", "json", sys.stderr)
    with listen(settings.host, settings.port, "--port") as listener:
        app = create_app(settings, Fleet(engines, supervision=settings.supervision))
        server = GatewayServer(app, settings, lambda url: print(url, flush=True))
        asyncio.run(server.serve(sockets=[listener]))
    return server.failure.exit_code if server.failure is not None else 0


if __name__ == "__main__":
    sys.exit(main())
