"""A gateway with fake engines in a process of its own: `fake_serve.py SETTINGS BEHAVIOUR FOLDER`, the first two JSON.

It runs in the folder, writes its URL there into `url` once it is ready, and ends as `baton serve` does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from baton.config.groups import EngineSettings
from baton.config.settings import load_settings
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.engines.fleet import Fleet
from baton.http.uvicorn_server import GatewayServer
from baton.serve import listen
from baton.server import create_app
from baton.telemetry.logs import configure_logs


def main() -> int:
    _, *given, folder = sys.argv
    overrides, behaviour = map(json.loads, given)
    os.chdir(folder)
    engines = [FakeEngine(name, behaviour=FakeBehaviour(**behaviour)) for name in ("alpha", "beta")]
    served = tuple(EngineSettings(name=engine.name, model="fake") for engine in engines)
    settings = load_settings(**({"port": 0, "engines": served} | overrides))
    configure_logs("info", "json", sys.stderr)
    with listen(settings.host, settings.port, "--port") as listener:
        app = create_app(settings, Fleet(engines, supervision=settings.supervision))
        server = GatewayServer(app, settings, Path("url").write_text)
        asyncio.run(server.serve(sockets=[listener]))
    return server.failure.exit_code if server.failure is not None else 0
