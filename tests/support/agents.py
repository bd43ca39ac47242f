"""The agents of `examples/`, on unmodified frameworks, at a real gateway: what they sent, and what was not prefilled."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from baton.admission.api_keys import create_key
from support.gateways import RealGateway, free_port

CONFIG = Path(__file__).parents[1] / "engine" / "agent_engines.toml"
AGENTS = ("langgraph", "anthropic", "openai_agents", "openai", "pydantic_ai")
"""Names of `examples/agent_NAME.py`; each name is a tenant, and NAME-other is another."""
FEWEST = 0.9
"""Share of the unchanged prefix that must not be prefilled."""
Used = list[tuple[int, int]]
"""Of each of a turn's requests, the number of prompt tokens and of those that were cached."""


@contextmanager
def agent_gateway(folder: Path) -> Iterator[RealGateway]:
    """On a port that it has again after a restart: agents keep their base URL."""
    (folder / "baton.toml").write_text(CONFIG.read_text().format(folder=folder))
    tenants = [tenant for name in AGENTS for tenant in (name, f"{name}-other")]
    keys = {tenant: create_key(folder / "keys.json", tenant) for tenant in tenants}
    arguments = ["--config", str(folder / "baton.toml"), "--port", str(free_port())]
    with RealGateway(arguments, folder) as running:
        running.keys = keys
        running.wait_until_ready()
        yield running


def last_record(gateway: RealGateway) -> int:
    """When the newest record was written: a superseded one goes when its successor has been there for a while."""
    records = (gateway.output.parent / "store" / "records").glob("*.json")
    return max((path.stat().st_mtime_ns for path in records), default=0)


def wait_for_saves(gateway: RealGateway, before: int) -> int:
    """Wait until something was saved, and nothing more has been for a moment."""
    deadline, found, since = time.monotonic() + 60, before, time.monotonic()
    while found == before or time.monotonic() < since + 0.5:
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.05)
        if (newest := last_record(gateway)) != found:
            found, since = newest, time.monotonic()
    return found


async def conversation(name: str, gateway: RealGateway, turns: int, killed_after: int = 0) -> list[Used]:
    """Hold a conversation as the example does, with the gateway killed after one of its turns."""
    done: list[Used] = []
    saved = last_record(gateway)
    agent = import_module(f"examples.agent_{name}")
    async for used in agent.converse(f"{gateway.url}/v1", "smollm2", gateway.keys[name], turns):
        done.append(used)
        saved = wait_for_saves(gateway, saved)
        if len(done) == killed_after:
            gateway.restart(signal.SIGKILL)
    return done


async def first_request(name: str, gateway: RealGateway, tenant: str) -> tuple[int, int]:
    """Begin the same conversation again."""
    agent = import_module(f"examples.agent_{name}")
    talk = agent.converse(f"{gateway.url}/v1", "smollm2", gateway.keys[tenant], 1)
    (used,) = [used async for used in talk]
    first: tuple[int, int] = used[0]
    return first


def prefilled_again(turns: list[Used]) -> float:
    """Share of the unchanged prefix that was prefilled again, the most of any request."""
    assert all(len(used) >= 2 for used in turns), "a call of the tool, and an answer to its result"
    unchanged, most = turns[0][-1][0], 0.0
    for prompt, cached in (request for used in turns[1:] for request in used):
        assert prompt > unchanged, "every prompt begins with all of the one before it"
        most = max(most, 1 - cached / unchanged)
        unchanged = prompt
    return most
