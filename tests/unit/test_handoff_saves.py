"""Saves of KV that come late, fail, or are under way when the engines end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.library_machines import ENGINE, Clocks, House, there

from baton.engines.transfers import TransferRequest
from baton.library.handoff import Handoff, HandoffState
from baton_kv.stores.file import FileStore


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path, Clocks())


async def test_a_save_that_comes_late_is_known_when_it_is_there(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.library.saving.COMMIT_WITHIN_S", 0.01)
    handoffs, relay = house.handoffs(), TransferRequest()
    record = handoffs.begin(ENGINE, "local")
    handoffs.end(record, relay, [1, 2])
    await handoffs.settled(record, 20)
    assert (record.state, record.bytes) == (HandoffState.READY, 0)
    FileStore(house.folder / "store").put(record.key, [b"late"])
    relay.report.save_over.set()
    await asyncio.gather(*handoffs.background.running)
    assert record.bytes == 4


async def test_a_pin_asked_for_before_there_is_anything_counts_when_it_comes(house: House) -> None:
    handoffs = house.handoffs(budget=1024 * 1024)
    for size, pinned in ((400_000, True), (400_000, False)):
        record = handoffs.begin(ENGINE, "local")
        await handoffs.change(record, {"pin": True})
        FileStore(house.folder / "store").put(record.key, [b"k" * size])
        handoffs.end(record, TransferRequest(), [1])
        await asyncio.gather(*handoffs.background.running)
        mark = house.folder / "store" / "entries" / f"{record.key}.pin"
        assert (record.pin, mark.exists()) == (pinned, pinned)
    await handoffs.change(record, {"pin": False})


async def test_a_save_that_is_over_and_left_nothing_is_not_looked_for(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.library.saving.COMMIT_WITHIN_S", 60)
    handoffs, relay = house.handoffs(), TransferRequest()
    record = handoffs.begin(ENGINE, "local")
    relay.report.save_over.set()
    handoffs.end(record, relay, [1, 2])
    await asyncio.wait_for(asyncio.gather(*handoffs.background.running), 20)
    assert (record.state, record.bytes) == (HandoffState.READY, 0)


async def test_the_end_waits_only_a_moment_for_a_save_that_never_comes(house: House) -> None:
    handoffs = house.handoffs()
    async with handoffs.running():
        record = handoffs.begin(ENGINE, "local")
        handoffs.end(record, TransferRequest(), [1, 2])
        await asyncio.sleep(0)
    assert handoffs.background.running == set()
    assert await there(house.handoffs(), record), "its token ids are kept"


async def test_a_save_under_way_is_waited_for_while_the_engines_still_run(house: House) -> None:
    """A request that went away waits for nothing: no handoff is to come of it."""

    async def save(record: Handoff, relay: TransferRequest) -> None:
        await asyncio.sleep(0.3)
        FileStore(house.folder / "store").put(record.key, [b"k" * 10])
        relay.report.save_over.set()

    handoffs = house.handoffs()
    record, relay = handoffs.begin(ENGINE, "local"), TransferRequest()
    cut_off = handoffs.begin(ENGINE, "local")
    async with handoffs.running():
        async with handoffs.settling():
            handoffs.end(record, relay, [1, 2, 3])
            handoffs.end(cut_off, None)
            saving = asyncio.create_task(save(record, relay))
        assert saving.done(), "the engine would have been stopped before its save was over"
    assert (record.state, record.bytes) == (HandoffState.READY, 10)
    assert cut_off.state is HandoffState.FAILED
    assert (await house.handoffs().get(record.id, "local")).bytes == 10


async def test_only_saves_hold_up_the_engines_end(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work in the background ends with them."""
    monkeypatch.setattr("baton.library.library.CLOSE_WITHIN_S", 60)
    handoffs = house.handoffs()
    endless = handoffs.in_background(asyncio.sleep(600))
    async with asyncio.timeout(20), handoffs.settling():
        pass
    endless.cancel()
