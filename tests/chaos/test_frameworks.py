"""Agents of unmodified frameworks keep their context through a kill of the gateway, and keep it to themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.agents import FEWEST, agent_gateway, conversation, first_request, prefilled_again
from support.gateways import RealGateway

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
TURNS = 10
KILLED_AFTER = 5


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    with agent_gateway(tmp_path_factory.mktemp("agents")) as running:
        yield running


@pytest.mark.fault("A8")
@pytest.mark.parametrize("name", ["langgraph", "anthropic", "openai_agents"])
async def test_an_agent_of_ten_turns_prefills_what_is_new_through_a_kill_and_other_tenants_all(
    gateway: RealGateway, name: str
) -> None:
    again = prefilled_again(await conversation(name, gateway, TURNS, KILLED_AFTER))
    print(
        f"{name}: {TURNS} turns, a kill after {KILLED_AFTER}: prefilled again at most {again:.3f} of the prefix"
    )
    assert again <= 1 - FEWEST
    prompt, cached = await first_request(name, gateway, name)
    assert cached >= FEWEST * prompt, "its own beginning is found again"
    _, cached = await first_request(name, gateway, f"{name}-other")
    assert cached == 0, "another tenant's is not"
