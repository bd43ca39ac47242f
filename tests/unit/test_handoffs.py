"""The coordinator by itself: time, restarts, pins, orphans."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.library_machines import ENGINE, Clocks, House, becomes, there

from baton.engines.transfers import TransferRequest
from baton.errors import HandoffNotFound, HandoffPinsFull
from baton.library.handoff import Handoff, HandoffState
from baton.library.here.records import RecordFolder
from baton.library.library import Library
from baton.library.tiers import ORPHANED_AFTER_S, nowhere
from baton.relay.sources import Sources
from baton_kv.contract import new_key
from baton_kv.stores.file import FileStore


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path, Clocks())


async def change(handoffs: Library, record: Handoff, changes: dict[str, Any]) -> bool:
    """Whether there still was anything to change."""
    try:
        await handoffs.change(record, changes)
    except HandoffNotFound:
        return False
    return True


async def test_a_handoff_lives_its_seconds_and_then_its_files_go(house: House) -> None:
    handoffs = house.handoffs()
    record = await house.left(handoffs, ttl_s=60)
    house.clocks.pass_(59)
    assert await there(handoffs, record)
    house.clocks.pass_(2)
    assert not await there(handoffs, record)
    async with handoffs.running():
        await becomes(lambda: not [path for path in house.folder.rglob("*") if record.id in path.name])


def test_where_no_engine_hands_over_nothing_is_stored_listed_or_swept() -> None:
    record = Handoff(tenant="t", model="m", weights="w", created_at=1.0, ttl_s=9e9, expires_at=9e9)
    tier = nowhere()
    tier.sweep_orphans()
    assert (tier.store.size(), tier.kv_bytes(record), tier.proof("challenge")) == (0, 0, None)
    assert (tier.find(record.id, "t"), tier.sizes([record])) == (None, [0])


RECORD = {"tenant": "t", "model": "m", "weights": "w", "created_at": 1.0, "ttl_s": 9e9, "expires_at": 9e9}


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"a_later_field": {"deep": [1]}}, True),
        ({"state": "a later state"}, False),
        ({"tokens": "in another encoding"}, False),
        ({"tokens": [2**40]}, False),
        ({"tenant": None}, False),
    ],
)
@pytest.mark.fault("H6")
def test_a_record_of_another_version_is_read_or_left_alone(
    tmp_path: Path, fields: dict[str, object], read: bool
) -> None:
    files = RecordFolder(tmp_path)
    path = tmp_path / f"{'i' * 32}.json"
    path.write_text(json.dumps(RECORD | {"id": "i" * 32} | fields))
    found = files.read("i" * 32)
    assert (found is not None) is read
    assert len(list(files.read_all())) == read
    assert path.exists(), "whoever wrote it may still want it"


def test_a_conversation_has_the_names_on_disk_that_every_version_reads(tmp_path: Path) -> None:
    """A gateway of another version over the store must neither miss nor drop what a chat may not do."""
    files = RecordFolder(tmp_path)
    old = {"messages": [], "told": {"0": "ab"}, "torn": True}
    path = tmp_path / f"{'i' * 32}.json"
    path.write_text(json.dumps(RECORD | {"id": "i" * 32, "conversation": old}))
    found = files.update("i" * 32, lambda record, _others: setattr(record, "label", "another"))
    written = json.loads(path.read_text())
    assert (written["label"], {name: written["conversation"][name] for name in old}) == ("another", old)
    again = files.read("i" * 32)
    for record in (found, again):
        assert record is not None
        assert record.conversation is not None
        assert (record.conversation.answer_fingerprints, record.conversation.text_only) == ({0: "ab"}, True)


JUMPS: list[Callable[[Clocks], None]] = [
    lambda clocks: setattr(clocks, "wall", clocks.wall + 86_400),
    lambda clocks: setattr(clocks, "wall", clocks.wall - 86_400),
    lambda clocks: setattr(clocks, "wall", clocks.wall - 3_600),
]


@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.fault("H2")
async def test_a_clock_jump_changes_no_expiry(house: House, jump: Callable[[Clocks], None]) -> None:
    handoffs = house.handoffs()
    record = await house.left(handoffs, ttl_s=60)
    jump(house.clocks)
    assert await there(handoffs, record)
    house.clocks.pass_(61)
    assert not await there(handoffs, record)


@pytest.mark.parametrize(("jumped", "alive"), [(0, True), (86_400, False), (-86_400, True)])
@pytest.mark.fault("H2")
async def test_over_a_restart_a_handoff_keeps_its_remaining_time_at_most(
    house: House, jumped: float, alive: bool
) -> None:
    record = await house.left(house.handoffs(), ttl_s=60)
    house.clocks.pass_(10)
    house.clocks.wall += jumped
    again = house.handoffs()
    assert await there(again, record) is alive
    house.clocks.pass_(61)
    assert not await there(again, record)


async def test_a_label_and_a_pin_outlive_the_process(house: House) -> None:
    first = house.handoffs()
    record = await house.left(first, label="old")
    await first.change(record, {"label": "new", "pin": True})
    found = await house.handoffs().get(record.id, "local")
    assert (found.label, found.pin, list(found.tokens)) == ("new", True, [1, 2, 3])


async def test_two_gateways_over_one_store_find_each_other_s_handoffs(house: House) -> None:
    first, second = house.handoffs(), house.handoffs()
    record = await house.left(first)
    assert (await Sources(second, 10).one(record.id, ENGINE, "local")).state is HandoffState.READY


async def test_only_half_of_the_store_can_be_pinned(house: House) -> None:
    handoffs = house.handoffs(budget=1024 * 1024)
    first = await house.left(handoffs, 400_000, pin=True)
    assert first.pin
    second = await house.left(handoffs, 400_000)
    with pytest.raises(HandoffPinsFull):
        await handoffs.change(second, {"pin": True})
    third = await house.left(handoffs, 400_000, pin=True)
    assert not third.pin, "its request is over; its handoff says that it is not pinned"
    await handoffs.change(first, {"pin": False})
    await handoffs.change(second, {"pin": True})


async def test_entries_that_belong_to_nobody_are_swept_and_a_plain_engine_s_are_not(house: House) -> None:
    handoffs = house.handoffs()
    kept = await house.left(handoffs)
    store = FileStore(house.folder / "store")
    orphan, young, plain = "f" * 32 + "/" + "o" * 32, "f" * 32 + "/" + "y" * 32, new_key("local")
    for key in (orphan, young, plain):
        store.put(key, [b"x"])
    past = time.time() - ORPHANED_AFTER_S - 5
    for key in (orphan, plain, kept.key):
        os.utime(house.folder / "store" / "entries" / f"{key}.kv", (past, past))
    async with handoffs.running():
        await becomes(lambda: orphan not in store.keys())  # noqa: SIM118  # no dict
        await asyncio.sleep(0.1)
    assert set(store.keys()) == {kept.key, young, plain}


async def test_a_pending_handoff_that_is_deleted_and_then_fails_troubles_nobody(house: House) -> None:
    handoffs = house.handoffs()
    record = handoffs.begin(ENGINE, "local")
    await handoffs.delete(record)
    handoffs.end(record, None)
    house.clocks.pass_(10_000)
    assert await handoffs.page("other", limit=5, after=None) == ([], False)
    assert not await there(handoffs, record)


@pytest.mark.fault("D4")
async def test_a_handoff_that_is_deleted_while_a_request_waits_for_it_is_not_given_out(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    handoffs, waits = house.handoffs(), asyncio.Event()
    settled = handoffs.settled

    async def noted(record: Handoff, within_s: float) -> bool:
        waits.set()
        return await settled(record, within_s)

    monkeypatch.setattr(handoffs, "settled", noted)
    record = handoffs.begin(ENGINE, "local")
    consumer = asyncio.create_task(Sources(handoffs, 60).one(record.id, ENGINE, "local"))
    await asyncio.wait_for(waits.wait(), 20)
    await handoffs.delete(record)
    assert not consumer.done(), "its producer is not over yet"
    relay = TransferRequest()
    relay.report.save_over.set()
    handoffs.end(record, relay, [1, 2, 3])
    with pytest.raises(HandoffNotFound):
        await asyncio.wait_for(consumer, 20)


async def test_a_deleted_handoff_never_comes_back(house: House) -> None:
    for _ in range(50):
        handoffs = house.handoffs()
        record = await house.left(handoffs)
        await asyncio.gather(
            handoffs.delete(record),
            change(handoffs, record, {"label": "x"}),
            *(there(handoffs, record) for _ in range(3)),
        )
        assert not await there(handoffs, record)
        assert not (house.folder / "records" / f"{record.id}.json").exists()


async def test_what_one_gateway_deletes_or_prolongs_holds_for_the_other(house: House) -> None:
    first, second = house.handoffs(), house.handoffs()
    deleted, prolonged = await house.left(first), await house.left(first, ttl_s=60)
    assert await there(second, deleted)
    assert await there(second, prolonged)
    await first.delete(deleted)
    assert not await there(second, deleted)
    await first.change(prolonged, {"ttl_s": 600})
    house.clocks.pass_(61)
    async with second.running():
        await asyncio.sleep(0.05)
    assert await there(second, prolonged)
    assert await there(first, prolonged)


async def test_a_tenant_s_oldest_go_when_it_leaves_too_much(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.library.upkeep.MAX_PER_TENANT", 3)
    handoffs = house.handoffs()
    records = [await house.left(handoffs) for _ in range(5)]
    assert [await there(handoffs, record) for record in records] == [False, False, True, True, True]
    monkeypatch.setattr("baton.library.upkeep.MAX_WEIGHT_PER_TENANT", 2500)
    async with handoffs.running():
        await becomes(lambda: not (house.folder / "records" / f"{records[2].id}.json").exists())
        await asyncio.sleep(0.05)
    assert [await there(handoffs, record) for record in records[2:]] == [False, True, True]


async def test_a_record_that_cannot_be_read_is_as_if_there_were_none(house: House) -> None:
    record = await house.left(house.handoffs())
    path = house.folder / "records" / f"{record.id}.json"
    path.write_text(path.read_text()[:-20])
    assert not await there(house.handoffs(), record)
    assert not path.exists()
