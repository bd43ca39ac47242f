"""A page of a tenant's handoffs looks at no more of them than it shows, however many there are."""

from __future__ import annotations

from typing import Any

import pytest

from baton.config.groups import HandoffSettings
from baton.errors import HandoffNotFound
from baton.library.handoff import Handoff, HandoffState, new_id
from baton.library.library import Library
from baton.library.tiers import nowhere
from baton.telemetry.metrics import GatewayMetrics

pytestmark = pytest.mark.fault("E19")
MANY = 10_000


def record(created_at: float, tenant: str = "acme", **more: Any) -> Handoff:
    life = {"created_at": created_at, "ttl_s": 600, "expires_at": 1e12, "state": HandoffState.READY}
    return Handoff(tenant=tenant, model="a", weights="w", **life, **more)


@pytest.fixture
def handoffs() -> Library:
    storage = nowhere()
    return Library(HandoffSettings(), storage, GatewayMetrics().handoffs)


async def test_a_page_of_ten_thousand_looks_at_a_page(
    handoffs: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [record(float(number)) for number in range(MANY)]
    for each in [
        *made[::2],
        *made[1::2],
        *[record(0.5, automatic=True, id=new_id(automatic=True)) for _ in range(9)],
    ]:
        handoffs.index.add(each, 600)
    looked: list[str] = []
    shown = Library._is_listed

    def looks(self: Library, one: Handoff) -> bool:
        looked.append(one.id)
        return shown(self, one)

    monkeypatch.setattr(Library, "_is_listed", looks)
    for after in (None, made[5000].id, made[1].id):
        looked.clear()
        page, more = await handoffs.page("acme", limit=20, after=after)
        at = MANY if after is None else [each.id for each in made].index(after)
        assert [each.id for each in page] == [each.id for each in made[max(0, at - 20) : at][::-1]]
        assert (more, len(looked) <= 22) == (at > 20, True)


async def test_what_was_dropped_or_is_anothers_is_in_no_page(handoffs: Library) -> None:
    mine, gone, theirs, over = record(1.0), record(2.0), record(3.0, "other"), record(4.0)
    for each in (mine, gone, theirs):
        handoffs.index.add(each, 600)
    handoffs.index.add(over, 0)
    handoffs.index.forget(gone.model_copy())
    assert await handoffs.page("acme", limit=9, after=None) == ([mine], False)
    for after in (gone.id, theirs.id, over.id, new_id()):
        with pytest.raises(HandoffNotFound):
            await handoffs.page("acme", limit=9, after=after)
    handoffs.index.forget(mine)
    assert await handoffs.page("acme", limit=9, after=None) == ([], False)
