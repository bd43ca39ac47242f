"""The agents of `examples/`, on unmodified frameworks, prefill only what is new."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.agents import AGENTS, FEWEST, agent_gateway, conversation, prefilled_again
from support.gateways import RealGateway

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    with agent_gateway(tmp_path_factory.mktemp("agents")) as running:
        yield running


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_prefills_what_is_new(gateway: RealGateway, name: str) -> None:
    assert prefilled_again(await conversation(name, gateway, turns=2)) <= 1 - FEWEST
