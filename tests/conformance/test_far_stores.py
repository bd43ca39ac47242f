"""What handoffs of several machines promise, on every store that they may meet in.

The same tests run over Valkey, over Redis, over an S3 bucket alone, and over Valkey with a bucket behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.archives import WEED, Archive, archive_server, archived_machine
from support.leases import told, without_savers, writing
from support.random_images import picture
from support.shared_stores import BINARIES, ENGINE, Machine, machine, must_run, store_server

from baton.engines.transfers import TransferReport, TransferRequest
from baton.errors import HandoffNotFound, HandoffPinsFull
from baton.images.image import PlacedImage
from baton.library.archive import tier as archive_tier
from baton.library.handoff import Handoff, HandoffState
from baton.library.valkey.records import ValkeyRecords

PRESENT = {"seaweedfs": WEED, **BINARIES}
KINDS = {"valkey": ["valkey"], "redis": ["redis"], "s3": ["seaweedfs"], "valkey+s3": ["valkey", "seaweedfs"]}
Make = Callable[..., Machine]


def _param(kind: str, needs: list[str]) -> Any:
    missing = [each for each in needs if PRESENT[each] is None and each not in must_run]
    skipped = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
    return pytest.param(kind, marks=skipped)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archive]:
    with archive_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(params=[_param(kind, needs) for kind, needs in KINDS.items()])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a machine by its name, over a far store that is empty at first."""
    needs = KINDS[request.param]
    monkeypatch.setattr(archive_tier, "LOOK_AGAIN_S", 0.0)
    with ExitStack() as stack:
        shared, archive = None, None
        if needs[0] != "seaweedfs":
            (tmp_path / "server").mkdir()
            shared = stack.enter_context(store_server(needs[0], tmp_path / "server")).url
        if "seaweedfs" in needs:
            archive = request.getfixturevalue("archive")
            for each in archive.names():
                archive.delete(each)

        def made(name: str, **settings: Any) -> Machine:
            if archive is None:
                return machine(tmp_path / name, str(shared), **settings)
            found = archived_machine(tmp_path / name, archive, shared=shared, **settings)
            stack.callback(found.close)
            return found

        yield made


async def gone(machine: Machine, record: Handoff) -> bool:
    try:
        await machine.handoffs.get(record.id, record.tenant)
    except HandoffNotFound:
        return True
    return False


async def test_every_field_of_a_lease_reaches_other_machines(make: Make) -> None:
    """An archive alone knows nothing of the KV of the machine that changed it."""
    one, two = make("one"), make("two")
    left = await one.leave(pin=True)
    found = await two.handoffs.get(left.id, "local")
    assert (found.pin, found.bytes) == (True, left.bytes)
    shared = isinstance(one.storage.here.records, ValkeyRecords)
    values = told() if shared else without_savers(told())
    record = await one.handoffs.get(left.id, "local")
    await asyncio.to_thread(one.storage.change, record, writing(values))
    await one.quiet()
    again = await two.handoffs.get(left.id, "local")
    ends = values.pop("expires_at")
    assert again.expires_at == pytest.approx(ends, abs=0.01)
    assert {name: getattr(again, name) for name in values} == values


async def test_kv_goes_to_another_machine_bit_for_bit(make: Make) -> None:
    one, two = make("one"), make("two")
    first = await one.leave(blocks=600, pin=True)
    found = await two.handoffs.get(first.id, "local")
    assert (found.state, list(found.tokens)) == (HandoffState.READY, list(first.tokens))
    await two.handoffs.fetch_here(found, ENGINE)
    assert two.read(found.key) == one.read(first.key)
    with pytest.raises(HandoffNotFound):
        await two.handoffs.get(first.id, "another")


async def test_what_continues_another_brings_its_file_along_and_keeps_it(make: Make) -> None:
    one, two = make("one"), make("two")
    first = await one.leave(blocks=8, pin=True)
    second = await one.leave(blocks=16, after=first, pin=True)
    await one.handoffs.delete(await one.handoffs.get(first.id, "local"))
    await one.quiet()
    found = await two.handoffs.get(second.id, "local")
    await two.handoffs.fetch_here(found, ENGINE)
    assert two.read(second.key) == one.read(second.key)
    assert two.read(second.key, 0) == one.read(second.key, 0)


async def test_a_deleted_handoff_is_deleted_everywhere(make: Make) -> None:
    one, two = make("one"), make("two")
    record = await one.leave(pin=True)
    await two.handoffs.delete(await two.handoffs.get(record.id, "local"))
    await two.quiet()
    for each in (one, two, make("three")):
        assert await gone(each, record)


async def test_a_change_never_brings_a_deleted_handoff_back(make: Make) -> None:
    one, two = make("one"), make("two")
    for number in range(8):
        record = await one.leave(pin=True)
        mine, other = [await each.handoffs.get(record.id, "local") for each in (one, two)]
        await asyncio.gather(
            one.handoffs.change(mine, {"label": f"label {number}"}),
            two.handoffs.delete(other),
            return_exceptions=True,
        )
        await one.quiet()
        await two.quiet()
        for each in (one, two, make(f"later {number}")):
            assert await gone(each, record)


async def test_changes_of_two_machines_at_once_are_both_kept(make: Make) -> None:
    one, two = make("one"), make("two")
    record = await one.leave(pin=True)
    other = await two.handoffs.get(record.id, "local")
    mine = await one.handoffs.get(record.id, "local")
    await asyncio.gather(
        one.handoffs.change(mine, {"label": "mine"}), two.handoffs.change(other, {"ttl_s": 100})
    )
    for each in (one, two, make("three")):
        found = await each.handoffs.get(record.id, "local")
        assert (found.label, found.ttl_s) == ("mine", pytest.approx(100, abs=5))
        assert each.handoffs.seconds_left(found) == pytest.approx(100, abs=5)


async def test_a_pin_that_does_not_fit_changes_nothing(make: Make) -> None:
    small = {"budget": 4 * 1024 * 1024, "shared_budget": 4 * 1024 * 1024}
    one = make("one", archive_after_s=100, ttl_s=1000, **small)
    kept, other = await one.leave(blocks=300, pin=True), await one.leave(blocks=300)
    with pytest.raises(HandoffPinsFull):
        await one.handoffs.change(await one.handoffs.get(other.id, "local"), {"pin": True, "label": "no"})
    await one.quiet()
    two = make("two", archive_after_s=100, ttl_s=1000, **small)
    found = await two.handoffs.get(other.id, "local")
    assert (found.pin, found.label) == (False, None)
    assert (await two.handoffs.get(kept.id, "local")).pin


async def test_images_go_along(make: Make) -> None:
    one, two = make("one"), make("two")
    pictures = [picture(1), picture(2), picture(1)]
    placed = [PlacedImage(each, 10 * index, 4, (7,)) for index, each in enumerate(pictures)]
    record = one.handoffs.begin(ENGINE, "local", pin=True)
    one.handoffs.end(record, TransferRequest(images=placed, report=TransferReport(saves=False)), range(50))
    await one.quiet()
    assert await two.handoffs.images(await two.handoffs.get(record.id, "local")) == placed


async def test_what_was_evicted_here_is_fetched_once_more(make: Make) -> None:
    one, two = make("one"), make("two")
    record = await one.leave(blocks=40, pin=True)
    found = await two.handoffs.get(record.id, "local")
    await two.handoffs.fetch_here(found, ENGINE)
    one.store.delete(record.key)
    two.store.delete(record.key)
    assert not two.handoffs.is_here(found)
    await two.handoffs.fetch_here(found, ENGINE)
    assert two.handoffs.is_here(found)


async def test_a_machine_that_starts_again_with_an_empty_disk_finds_what_it_left(make: Make) -> None:
    one = make("one")
    record = await one.leave(blocks=40, pin=True, label="mine")
    kv, tokens = one.read(record.key), list(record.tokens)
    again = make("another disk")
    found = await again.handoffs.get(record.id, "local")
    assert (found.label, found.pin, list(found.tokens)) == ("mine", True, tokens)
    await again.handoffs.fetch_here(found, ENGINE)
    assert again.read(record.key) == kv
