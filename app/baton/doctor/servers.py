"""Check for `baton doctor` that the servers elsewhere answer, take the key, and have the models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from baton.config.groups import EngineSettings
from baton.config.settings import Settings
from baton.doctor.findings import Finding
from baton.engines.remote.client import RemoteClient
from baton.engines.remote.keys import RemoteKeys
from baton.engines.remote.probe import Look, look
from baton.errors import BatonError, OperatorError

ON = "start it, or correct `url`; the gateway starts without it, and asks it until it answers"


def examine_servers(settings: Settings) -> Iterator[Finding]:
    """Look at each server that answers for an engine."""
    for engine in settings.engines:
        if not engine.own:
            yield _server(engine)


def _server(engine: EngineSettings) -> Finding:
    subject = f"engine {engine.name}"
    try:
        found = asyncio.run(_look(engine))
        found.require_usable(engine.name, str(engine.url), engine.model)
    except OperatorError as error:
        what, _, mend = error.message.removeprefix(f"engines '{engine.name}': ").rpartition(": ")
        return Finding(subject, what, True, mend)
    except BatonError:
        return Finding(subject, f"{engine.url} does not answer", True, ON)
    return Finding(subject, f"{engine.url} answers")


async def _look(engine: EngineSettings) -> Look:
    client = RemoteClient(engine)
    try:
        return await look(client, engine.remote, RemoteKeys(engine).of_looks, engine.model)
    finally:
        await client.close()
