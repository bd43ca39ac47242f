"""What becomes of handoffs is told, each change once; and where their KV lies is looked at for a page alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.archives import Archive, archived_machine, with_s3
from support.library_machines import ENGINE, Clocks, House, becomes
from support.shared_stores import machine, servers, store_server

from baton.config.groups import HandoffSettings
from baton.engines.transfers import TransferReport, TransferRequest
from baton.library import upkeep
from baton.library.handoff import Handoff, HandoffState, new_id
from baton.library.here.images import ImageStore
from baton.library.here.records import RecordFolder
from baton.library.library import Library
from baton.library.tiers import Here
from baton.telemetry.events import Events
from baton.telemetry.metrics import EventMetrics, GatewayMetrics
from baton_kv.stores.file import FileStore


class Told:
    """What one tenant was told, as `kind` and the id of a handoff."""

    def __init__(self, events: Events, tenant: str = "local") -> None:
        self._stream: AsyncGenerator[str, None] = events.follow(tenant, "", None, most=9)
        self._task: asyncio.Task[None] | None = None
        self.events: list[dict[str, Any]] = []

    async def begin(self) -> Told:
        await anext(self._stream)
        self._task = asyncio.create_task(self._listen())
        return self

    async def _listen(self) -> None:
        async for text in self._stream:
            self.events += [
                json.loads(line.removeprefix("data: "))
                for line in text.splitlines()
                if line.startswith("data")
            ]

    @property
    def kinds(self) -> list[tuple[str, str]]:
        return [(each["type"].removeprefix("handoff."), each["handoff"]["id"]) for each in self.events]

    async def are(self, *expected: tuple[str, str]) -> None:
        await becomes(lambda: len(self.kinds) >= len(expected))
        assert self.kinds == list(expected)
        self.events.clear()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path, Clocks(), Events(EventMetrics(CollectorRegistry())))


async def told_of(house: House) -> Told:
    assert house.events is not None
    return await Told(house.events).begin()


async def quiet(handoffs: Library) -> None:
    while handoffs.background.running:
        await asyncio.gather(*handoffs.background.running)


async def test_a_life_is_told_in_order_and_each_change_once(house: House) -> None:
    told, handoffs = await told_of(house), house.handoffs()
    first = await house.left(handoffs, label="x")
    await told.are(("created", first.id))
    handoffs.note_use(first, "loaded", None, loaded=3, resident=0)
    await handoffs.change(first, {"label": "y"})
    await told.are(("used", first.id), ("changed", first.id))
    house.clocks.pass_(4000)
    await handoffs.upkeep.sweep()
    await quiet(handoffs)
    await told.are(("expired", first.id))
    second = await house.left(handoffs)
    await handoffs.delete(second)
    await handoffs.upkeep.sweep()
    await told.are(("created", second.id), ("deleted", second.id))


async def test_what_fails_is_never_told_to_be_there_or_gone(house: House) -> None:
    told, handoffs = await told_of(house), house.handoffs()
    failed = handoffs.begin(ENGINE, "local")
    handoffs.end(failed, None)
    assert failed.state is HandoffState.FAILED
    house.clocks.pass_(4000)
    await handoffs.upkeep.sweep()
    await quiet(handoffs)
    last = await house.left(handoffs)
    await told.are(("created", last.id))


async def test_named_handoffs_and_automatic_contexts_are_told_apart(house: House) -> None:
    told, handoffs = await told_of(house), house.handoffs()
    named = await house.left(handoffs)
    own = await house.left(handoffs, tokens=range(64), automatic=new_id(automatic=True))
    await becomes(lambda: len(told.events) == 2)
    assert {each["handoff"]["id"]: each["handoff"]["automatic"] for each in told.events} == {
        named.id: False,
        own.id: True,
    }
    told.events.clear()
    handoffs.kv_gone(own)
    handoffs.kv_gone(named)
    handoffs.kv_gone(named)
    await becomes(lambda: len(told.events) == 2)
    assert [each.get("kv_only") for each in told.events] == [None, True], "the named one is recomputed"
    await told.are(("evicted", own.id), ("evicted", named.id))


async def test_an_automatic_context_without_kv_was_never_there(house: House) -> None:
    told, handoffs = await told_of(house), house.handoffs()
    record = handoffs.begin(ENGINE, "local", automatic=new_id(automatic=True))
    handoffs.end(record, TransferRequest(report=TransferReport(saves=False)), [1, 2, 3])
    await quiet(handoffs)
    named = await house.left(handoffs)
    await told.are(("created", named.id))


async def test_what_gives_way_is_told_to_be_evicted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "MAX_PER_TENANT", 2)
    told, handoffs = await told_of(house), house.handoffs()
    made = []
    for _ in range(3):
        house.clocks.pass_(1)
        made.append((await house.left(handoffs)).id)
    await becomes(lambda: len(told.events) == 4)
    assert sorted(told.kinds) == sorted([("evicted", made[0]), *(("created", each) for each in made)])
    evicted = next(each for each in told.events if each["type"] == "handoff.evicted")
    assert "kv_only" not in evicted


async def test_what_another_gateway_over_the_store_does_is_told_too(house: House) -> None:
    told, ours = await told_of(house), house.handoffs()
    theirs = House(house.folder, house.clocks).handoffs()
    left = await house.left(theirs)
    await ours.upkeep.sweep()
    await told.are(("created", left.id))
    await theirs.delete(left)
    await ours.upkeep.sweep()
    await told.are(("deleted", left.id))


async def test_uses_are_counted_whatever_is_changed_meanwhile(house: House) -> None:
    handoffs = house.handoffs()
    record = await house.left(handoffs)
    handoffs.note_use(record, "recomputed", "slower_to_load", loaded=0, resident=0)
    await handoffs.change(record, {"label": "y", "pin": True})
    found = await handoffs.get(record.id, "local")
    (row,) = await handoffs.describe([found])
    assert (row["uses"], row["last_outcome"], row["last_reason"]) == (1, "recomputed", "slower_to_load")
    assert (row["last_used_at"], row["label"], row["tier"]) == (int(house.clocks.wall), "y", "here")
    again = house.handoffs()
    (fresh,) = await again.describe([await again.get(record.id, "local")])
    assert (fresh["uses"], fresh["last_used_at"]) == (0, None), "of this gateway since its start"


async def test_kv_that_the_store_evicted_lies_nowhere(house: House) -> None:
    handoffs = house.handoffs()
    here, gone = await house.left(handoffs), await house.left(handoffs)
    FileStore(house.folder / "store").delete(gone.key)
    rows = await handoffs.describe([here, gone])
    assert [row["tier"] for row in rows] == ["here", None]


@pytest.mark.fault("E19")
async def test_a_page_of_ten_thousand_looks_at_the_kv_of_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, looked = FileStore(tmp_path / "store"), []
    here = Here(store, RecordFolder(tmp_path / "records"), ImageStore(tmp_path / "images"))
    handoffs = Library(HandoffSettings(), here, GatewayMetrics().handoffs)
    for number in range(10_000):
        life = {"created_at": float(number), "ttl_s": 600, "expires_at": 1e12, "state": HandoffState.READY}
        record = Handoff(tenant="acme", model="a", weights="w", bytes=9, **life)  # type: ignore[arg-type]
        handoffs.index.add(record, 600)
    exists = FileStore.exists

    def looks(self: FileStore, key: str, part: int | None = None) -> bool:
        if self is store:  # others' engines sweep theirs meanwhile
            looked.append(key)
        return exists(self, key, part)

    monkeypatch.setattr(FileStore, "exists", looks)
    after, seen, pages = None, 0, 0
    while True:
        page, more = await handoffs.page("acme", limit=100, after=after)
        rows = await handoffs.describe(page)
        after, seen, pages = str(rows[-1]["id"]), seen + len(rows), pages + 1
        if not more:
            break
    assert (seen, pages, len(looked)) == (10_000, 100, 10_000)
    print(f"E19: {pages} pages of 10,000 rows, {len(looked) / pages:g} looks a page")


@pytest.mark.parametrize("kind", servers)
async def test_the_nearest_of_several_places_is_told(kind: Any, tmp_path: Path) -> None:
    with store_server(kind, tmp_path) as server:
        one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
        left = await one.leave(blocks=4)
        found = await two.handoffs.get(left.id, "local")
        assert [
            (await each.handoffs.describe([record]))[0]["tier"]
            for each, record in ((one, left), (two, found))
        ] == [
            "here",
            "shared",
        ]
        await two.handoffs.fetch_here(found, ENGINE)
        assert (await two.handoffs.describe([found]))[0]["tier"] == "here"
        two.store.delete(found.key)
        server.process.kill()
        server.process.wait()
        assert (await two.handoffs.describe([found]))[0]["tier"] == "shared", "it may be there again"


@with_s3
async def test_what_only_the_archive_has_is_told_to_be_there(archive: Archive, tmp_path: Path) -> None:
    made = archived_machine(tmp_path / "one", archive)
    try:
        left = await made.leave(blocks=4, pin=True)
        (row,) = await made.handoffs.describe([left])
        assert (row["tier"], row["archived"]) == ("here", True)
        made.store.delete(left.key)
        assert (await made.handoffs.describe([left]))[0]["tier"] == "archive"
    finally:
        made.close()
