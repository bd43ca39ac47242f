"""The agents of `examples/`, on unmodified frameworks, at a real gateway: what they sent, and what was not prefilled."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median

from baton.admission.api_keys import create_key
from support.gateways import RealGateway, free_port
from support.saved_contexts import SavedContexts

CONFIG = Path(__file__).parents[1] / "engine" / "agent_engines.toml"
AGENTS = ("langgraph", "anthropic", "openai_agents", "openai", "pydantic_ai")
"""Names of `examples/agent_NAME.py`; each name is a tenant, and NAME-other is another."""
FEWEST = 0.9
"""Share of the unchanged prefix that must not be prefilled."""
MOST_ANSWER = 200
"""Most tokens of an answer of theirs."""
Used = list[tuple[int, int]]
"""Of each of a turn's requests, the number of prompt tokens and of those that were cached."""


@contextmanager
def agent_gateway(folder: Path) -> Iterator[RealGateway]:
    """On a port that it has again after a restart: agents keep their base URL."""
    (folder / "baton.toml").write_text(CONFIG.read_text().format(folder=folder))
    tenants = [tenant for name in AGENTS for tenant in (name, f"{name}-other")]
    keys = {tenant: create_key(folder / "keys.json", tenant) for tenant in tenants}
    arguments = ["--config", str(folder / "baton.toml"), "--port", str(free_port())]
    with RealGateway(arguments, folder, forked=True) as running:
        running.keys = keys
        running.wait_until_ready()
        yield running


async def conversation(name: str, gateway: RealGateway, turns: int, killed_after: int = 0) -> list[Used]:
    """Hold a conversation as the example does, with the gateway killed after one of its turns."""
    done: list[Used] = []
    contexts = SavedContexts(gateway.output.parent / "store", name)
    before = contexts.names()
    agent = import_module(f"examples.agent_{name}")
    async for used in agent.converse(f"{gateway.url}/v1", "smollm2", gateway.keys[name], turns):
        done.append(used)
        contexts.wait_for(before, used[-1][0], used[-1][0] + MOST_ANSWER)
        before = contexts.names()
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
    """Share of what was saved of the unchanged prefix that was prefilled again, the most of any request.

    Within a turn the framework asks again as soon as it is answered, and on a busy machine the answer's KV may
    not be saved by then: surely saved is what the turn began with. That it mostly is counts as well, by the
    median of the share of all the unchanged prefix.
    """
    assert all(len(used) >= 2 for used in turns), "a call of the tool, and an answer to its result"
    unchanged, again, within = turns[0][-1][0], list[float](), list[float]()
    for used in turns[1:]:
        saved = unchanged
        for prompt, cached in used:
            assert prompt > unchanged, "every prompt begins with all of the one before it"
            again.append(1 - cached / saved)
            within.append(1 - cached / unchanged)
            unchanged = prompt
    print("of each turn's requests the tokens of the prompt and those cached:", turns)
    return max(*again, median(within))
