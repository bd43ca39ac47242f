"""Of several wrong ids the first is named, whichever look ends first: it tells nothing of whose they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.config.groups import HandoffSettings
from baton.engines.fake.engine import FakeEngine
from baton.errors import HandoffNotFound
from baton.library.handoff import Handoff, new_id
from baton.library.library import Library
from baton.library.tiers import nowhere
from baton.relay.sources import Sources
from baton.telemetry.metrics import GatewayMetrics

pytestmark = pytest.mark.fault("E20")


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("foreign", [0, 1, 2])
async def test_the_first_wrong_id_is_named(slow: int, foreign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = nowhere()
    handoffs = Library(HandoffSettings(), storage, GatewayMetrics().handoffs)
    engine = FakeEngine("a", supports_handoffs=True)
    ids = [new_id() for _ in range(3)]
    ids[foreign] = handoffs.begin(engine, "another").id
    get = Library.get

    async def late(self: Library, handoff_id: str, tenant: str) -> Handoff:
        for _ in range(50 if handoff_id == ids[slow] else 0):
            await asyncio.sleep(0.001)
        return await get(self, handoff_id, tenant)

    monkeypatch.setattr(Library, "get", late)
    with pytest.raises(HandoffNotFound) as refused:
        await Sources(handoffs, 1).all(ids, engine, "acme")
    assert refused.value.param == "handoff.from[0]"


@pytest.mark.parametrize("wrong", [0, 1])
async def test_a_pending_one_is_not_waited_for_where_another_is_wrong(wrong: int) -> None:
    storage = nowhere()
    handoffs = Library(HandoffSettings(), storage, GatewayMetrics().handoffs)
    engine = FakeEngine("a", supports_handoffs=True)
    ids: list[Any] = [handoffs.begin(engine, "acme").id for _ in range(2)]
    ids[wrong] = new_id()
    async with asyncio.timeout(20):
        with pytest.raises(HandoffNotFound) as refused:
            await Sources(handoffs, 600).all(ids, engine, "acme")
    assert refused.value.param == f"handoff.from[{wrong}]"
