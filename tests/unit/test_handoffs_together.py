"""Two gateways over one store: what one does holds for the other, whoever of both was quicker."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.library_machines import becomes

from baton.config.groups import HandoffSettings
from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferRequest
from baton.errors import HandoffNotFound, HandoffPinsFull
from baton.library.handoff import Handoff
from baton.library.here.images import ImageStore
from baton.library.here.records import RecordFolder
from baton.library.library import Library
from baton.library.tiers import Here
from baton.relay.sources import Sources
from baton.telemetry.metrics import HandoffMetrics
from baton_kv.folders import open_file
from baton_kv.stores.file import FileStore

ENGINE = FakeEngine("a", supports_handoffs=True)
KB = 1024
ROUNDS = 1000


@dataclass
class Clock:
    """One gateway's host.

    Attributes:
        ahead: seconds that its wall clock is ahead of the true time.
    """

    now: list[float]
    ahead: float = 0.0

    def monotonic(self) -> float:
        return self.now[0]

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now[0] + self.ahead


@dataclass
class House:
    """A store, and gateways over it whose time passes together."""

    folder: Path
    now: list[float] = field(default_factory=lambda: [1000.0])

    def gateway(self, *, ahead: float = 0.0, **settings: Any) -> Library:
        chosen, clock = HandoffSettings(**settings), Clock(self.now, ahead)
        root = self.folder / "store"
        storage = Here(
            FileStore(root, budget=int(chosen.budget)),
            RecordFolder(root / "records"),
            ImageStore(root / "images"),
        )
        metrics = HandoffMetrics(CollectorRegistry())
        return Library(chosen, storage, metrics, clock=clock.monotonic, wall=clock.wall)

    async def left(self, handoffs: Library, size: int = 10, tenant: str = "local", **more: Any) -> Handoff:
        record = handoffs.begin(ENGINE, tenant, **more)
        FileStore(self.folder / "store").put(record.key, [b"k" * size])
        handoffs.end(record, TransferRequest(), [1, 2, 3])
        await asyncio.gather(*handoffs.background.running)
        return record

    def pinned(self) -> int:
        """Bytes of KV whose entries are marked as pinned."""
        marks = (self.folder / "store" / "entries").glob("*/*.pin")
        return sum(mark.with_suffix(".kv").stat().st_size for mark in marks)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


async def tried(work: Coroutine[Any, Any, Any]) -> Any:
    """What it returns, or the error that a client would see."""
    try:
        return await work
    except (HandoffNotFound, HandoffPinsFull) as error:
        return error


async def changed(gateway: Library, handoff_id: str, **changes: Any) -> Any:
    """What PATCH answers."""

    async def patch() -> Handoff:
        record = await gateway.get(handoff_id, "local")
        await gateway.change(record, changes)
        return record

    return await tried(patch())


async def deleted(gateway: Library, handoff_id: str) -> Any:
    async def delete() -> None:
        await gateway.delete(await gateway.get(handoff_id, "local"))

    return await tried(delete())


async def ids(gateway: Library, tenant: str = "local") -> list[str]:
    page, more = await gateway.page(tenant, limit=100, after=None)
    assert not more
    return [record.id for record in page]


@pytest.mark.fault("D10")
async def test_of_changes_at_once_none_is_lost_and_what_is_deleted_stays_so(house: House) -> None:
    first, second = gateways = house.gateway(budget=1024 * KB), house.gateway(budget=1024 * KB)
    rng, back, lost, over = random.Random(5), 0, 0, 0
    for number in range(ROUNDS // 4):
        record = await house.left(rng.choice(gateways), 200 * KB)
        await ids(first if number % 2 else second)  # knows it, or comes to know it by its file
        one, other = rng.sample(gateways, 2)
        work = [
            changed(one, record.id, label=f"label {number}"),
            changed(other, record.id, pin=True),
            tried(Sources(other, 10).one(record.id, ENGINE, "local")),
        ]
        if ends := rng.random() < 0.5:
            work.append(deleted(one, record.id))
        rng.shuffle(work)
        await asyncio.gather(*work)
        over += house.pinned() > 512 * KB
        for gateway in gateways:
            found = await tried(gateway.get(record.id, "local"))
            if ends:
                back += not isinstance(found, HandoffNotFound) or record.id in await ids(gateway)
            else:
                lost += found.label != f"label {number}"
        if ends:
            back += any((house.folder / "store").rglob(f"*{record.id}*"))
            continue
        kept = await second.get(record.id, "local")
        mark = house.folder / "store" / "entries" / f"{record.key}.pin"
        lost += not kept.pin or not mark.exists()
        await deleted(rng.choice(gateways), record.id)
    print(f"\nD10: {ROUNDS} changes, uses and deletes: {back} came back, {lost} lost, {over} over half")
    assert (back, lost, over) == (0, 0, 0)


@pytest.mark.fault("D10")
async def test_pins_of_two_gateways_are_counted_together(house: House) -> None:
    gateways = [house.gateway(budget=1024 * KB) for _ in range(2)]
    for _ in range(20):
        left = [await house.left(each, 150 * KB) for each in (*gateways, *gateways)]
        answers = await asyncio.gather(
            *(
                changed(each, record.id, pin=True)
                for each, record in zip((*gateways, *gateways), left, strict=True)
            )
        )
        refused = sum(isinstance(answer, HandoffPinsFull) for answer in answers)
        assert (refused, house.pinned()) == (1, 450 * KB)
        for record in left:
            await deleted(gateways[0], record.id)


async def test_a_tenant_s_pins_leave_room_for_another_s(house: House) -> None:
    handoffs = house.gateway(budget=1024 * KB)
    mine = [await house.left(handoffs, 100 * KB, "acme") for _ in range(4)]
    other = [await house.left(handoffs, 100 * KB, "globex") for _ in range(3)]
    for records in (mine, other):
        await handoffs.change(records[0], {"pin": True})
        await handoffs.change(records[1], {"pin": True})
        with pytest.raises(HandoffPinsFull):
            await handoffs.change(records[2], {"pin": True})
    assert house.pinned() == 400 * KB


async def test_tenants_that_come_one_after_the_other_pin_no_more_than_half_together(house: House) -> None:
    handoffs = house.gateway(budget=1024 * KB)
    for tenant in ("acme", "globex", "initech", "umbrella"):
        records = [await house.left(handoffs, 60 * KB, tenant) for _ in range(3)]
        for record in records:
            await tried(handoffs.change(record, {"pin": True}))
    print(f"\n{house.pinned() / (1024 * KB):.0%} of the budget is pinned")
    assert 0 < house.pinned() <= 512 * KB


async def test_each_gateway_lists_the_other_s_handoffs_as_they_are(house: House) -> None:
    first, second = house.gateway(), house.gateway()
    records = []
    for gateway in (first, second, first):
        records.append(await house.left(gateway))
        house.now[0] += 1
    newest_first = [record.id for record in records[::-1]]
    assert await ids(first) == await ids(second) == newest_first
    await changed(first, records[1].id, label="new", ttl_s=60)
    page, _ = await second.page("local", limit=10, after=None)
    assert (page[1].label, page[1].expires_at) == ("new", 1_700_000_000.0 + house.now[0] + 60)
    await deleted(first, records[1].id)
    assert await ids(second) == [newest_first[0], newest_first[2]]


async def test_a_handoff_that_another_gateway_gave_more_time_is_not_removed_when_its_time_is_over_here(
    house: House,
) -> None:
    first, second = house.gateway(), house.gateway()
    record = await house.left(first, ttl_s=60)
    await ids(second)
    house.now[0] += 50
    await changed(first, record.id, ttl_s=600)
    house.now[0] += 20
    second.upkeep.drop_expired()  # before it has looked at what the other did
    await asyncio.gather(*second.background.running)
    assert (await second.get(record.id, "local")).expires_at == record.expires_at
    assert await ids(first) == await ids(second) == [record.id]


@pytest.mark.fault("D4")
async def test_a_load_goes_on_when_another_gateway_deletes_its_handoff(house: House) -> None:
    first, second = house.gateway(), house.gateway()
    record = await house.left(first, 1000)
    source = await Sources(second, 10).one(record.id, ENGINE, "local")
    with FileStore(house.folder / "store").open(source.key) as loaded:
        beginning = loaded.read(0, 500)
        await deleted(first, record.id)
        assert isinstance(await tried(Sources(second, 10).one(record.id, ENGINE, "local")), HandoffNotFound)
        assert beginning + loaded.read(500, 1000) == b"k" * 1000
    assert list(FileStore(house.folder / "store").keys()) == []


@pytest.mark.fault("H3")
@pytest.mark.parametrize("ahead", [600.0, -600.0])
async def test_a_host_whose_clock_is_wrong_leaves_nothing_that_lives_for_ever_or_dies_at_once(
    house: House, ahead: float
) -> None:
    skewed, true = house.gateway(ahead=ahead, ttl_s=3600), house.gateway(ttl_s=3600)
    record = await house.left(skewed)
    assert (await true.get(record.id, "local")).id == record.id
    await changed(true, record.id, ttl_s=100)
    lived = 0
    while not isinstance(await tried(true.get(record.id, "local")), HandoffNotFound):
        house.now[0] += 10
        lived += 10
        assert lived <= 200, "it lives on"
    assert lived >= 90
    async with skewed.running(), true.running():
        await becomes(lambda: not list((house.folder / "store" / "records").glob("*.json")))
    again = await house.left(skewed)
    found = await true.get(again.id, "local")
    assert 0 < true.index._deadlines[found.id] - house.now[0] <= 3600


async def renewed(house: House, asked: int, limit: int) -> float:
    """How long a handoff lives whose client asks for so many seconds, where so many are allowed."""
    handoffs = house.gateway(ttl_s=limit, max_life_s=100 * limit)
    record = await house.left(handoffs)
    await handoffs.change(record, {"ttl_s": asked})
    return record.expires_at - record.created_at


async def test_a_new_life_is_no_longer_than_one_may_be(house: House) -> None:
    assert await renewed(house, 600, 60) == 60
    assert await renewed(house, 30, 60) == 30


async def test_a_life_given_again_and_again_has_an_end(house: House) -> None:
    handoffs, other = (house.gateway(ttl_s=60, max_life_s=200) for _ in range(2))
    record = await house.left(handoffs)
    lived = 0
    while True:
        answer = await changed((handoffs, other)[lived % 4 // 2], record.id, ttl_s=60)
        if isinstance(answer, HandoffNotFound):
            break
        assert answer.expires_at <= record.created_at + 200
        house.now[0] += 10
        lived += 10
        assert lived <= 210, "it lives on"
    assert lived >= 190


async def test_a_limit_on_all_of_a_life_below_that_of_one_does_not_shorten_it(house: House) -> None:
    handoffs = house.gateway(ttl_s=3600, max_life_s=10)
    record = await house.left(handoffs)
    assert record.expires_at - record.created_at == 3600
    await handoffs.change(record, {"ttl_s": 3600})
    assert record.expires_at - record.created_at == 3600


@pytest.mark.fault("H2")
async def test_a_new_life_asked_for_after_the_clock_jumped_ends_none(house: House) -> None:
    handoffs = house.gateway(ttl_s=3600, max_life_s=3600)
    record = await house.left(handoffs)
    handoffs.holdings.wall = lambda: 1_700_000_000.0 + house.now[0] + 86_400
    await handoffs.change(record, {"ttl_s": 600})
    assert (await handoffs.get(record.id, "local")).id == record.id


async def test_a_record_that_cannot_be_read_just_now_is_not_taken_for_a_deleted_one(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without descriptors left reads nothing, and removes nothing either."""

    def out_of_descriptors(name: str, **more: Any) -> int:
        if name.endswith(".json"):
            raise OSError(errno.EMFILE, "Too many open files")
        return open_file(name, **more)

    gateway = house.gateway()
    record = await house.left(gateway)
    with monkeypatch.context() as patched:
        patched.setattr("baton.library.here.records.open_file", out_of_descriptors)
        await gateway.change(record, {"label": "a"})
        assert gateway._tier.remove_expired(record) is None
    again = house.gateway()
    assert (await again.get(record.id, "local")).id == record.id
