"""Handoffs in a real S3 bucket: they outlive machines, stay deleted, and are refused when they were changed."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.archives import Archive, ArchivedMachine, archived_machine, with_s3
from support.random_images import picture
from support.shared_stores import BINARIES, ENGINE, store_server

from baton.engines.transfers import TransferReport, TransferRequest
from baton.errors import HandoffImagesLost, HandoffNotFound, SettingsError
from baton.images.image import PlacedImage
from baton.library.archive.archiver import remove_expired
from baton.library.archive.tier import LOOK_AGAIN_S
from baton.library.handoff import Handoff, HandoffState
from baton.library.library import Library

pytestmark = with_s3


class Machines:
    """Makes machines over an archive of the test's own."""

    def __init__(self, folder: Path, archive: Archive, stack: ExitStack) -> None:
        self.folder, self.archive, self._stack = folder, archive, stack

    def __call__(self, name: str, **settings: Any) -> ArchivedMachine:
        made = archived_machine(self.folder / name, self.archive, **settings)
        self._stack.callback(made.close)
        return made

    def wiped(self, machine: ArchivedMachine, name: str, **settings: Any) -> ArchivedMachine:
        """The machine starts again with an empty disk."""
        machine.close()
        shutil.rmtree(self.folder / name)
        return self(name, **settings)


@pytest.fixture
def machines(archive: Archive, tmp_path: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(tmp_path, archive, stack)


async def gone(handoffs: Library, record: Handoff) -> bool:
    try:
        await handoffs.get(record.id, record.tenant)
    except HandoffNotFound:
        return True
    return False


async def test_a_pinned_handoff_outlives_its_machine_bit_for_bit(
    machines: Machines, archive: Archive
) -> None:
    one = machines("one")
    first = await one.leave(blocks=600, pin=True, label="the first")
    kv = one.read(first.key)
    assert len(kv) > 2_000_000
    two = machines.wiped(one, "one")
    found = await two.handoffs.get(first.id, "local")
    assert (found.state, found.label, found.pin) == (HandoffState.READY, "the first", True)
    assert list(found.tokens) == list(first.tokens)
    assert [each.id for each in (await two.handoffs.page("local", limit=9, after=None))[0]] == [first.id]
    assert not two.handoffs.is_here(found)
    await two.handoffs.fetch_here(found, ENGINE)
    assert two.read(found.key) == kv
    assert two.store.pinned() == {found.key.partition("/")[0]: len(kv)}
    assert not await gone(machines.wiped(two, "one").handoffs, found)


async def test_only_pinned_and_long_lived_handoffs_are_archived(machines: Machines, archive: Archive) -> None:
    one = machines("one", ttl_s=1000, archive_after_s=500)
    short = await one.leave(ttl_s=100)
    assert archive.names("records") == []
    assert short.public()["archived"] is False
    await one.leave(ttl_s=500)
    later = await one.leave(ttl_s=100)
    assert len(archive.names("records")) == 1
    await one.handoffs.change(later, {"pin": True})
    await one.quiet()
    assert len(archive.names("records")) == 2
    assert (await one.handoffs.get(later.id, "local")).public()["archived"] is True


async def test_the_bucket_names_no_tenant_and_no_handoff_and_another_tenant_finds_nothing(
    machines: Machines, archive: Archive
) -> None:
    one, two = machines("one"), machines("two")
    record = await one.leave("somebody", pin=True)
    names = archive.names()
    assert {name.partition("/")[0] for name in names} == {"gateways", "records", "files", "needed", "due"}
    assert not any("somebody" in name or record.id in name or record.key[:20] in name for name in names)
    for tenant in ("local", "some", ""):
        with pytest.raises(HandoffNotFound):
            await two.handoffs.get(record.id, tenant)
    assert (await two.handoffs.get(record.id, "somebody")).id == record.id


async def test_what_continues_another_shares_its_file_in_the_archive_too(
    machines: Machines, archive: Archive
) -> None:
    one = machines("one")
    first = await one.leave(blocks=8, pin=True)
    second = await one.leave(blocks=16, after=first, pin=True)
    assert len(archive.names("files")) == 2
    kv = one.read(second.key), one.read(second.key, 0)
    await one.handoffs.delete(first)
    await one.quiet()
    assert len(archive.names("files")) == 2
    two = machines.wiped(one, "one")
    found = await two.handoffs.get(second.id, "local")
    await two.handoffs.fetch_here(found, ENGINE)
    assert (two.read(found.key), two.read(found.key, 0)) == kv
    await two.handoffs.delete(found)
    await two.quiet()
    assert archive.names("files") == archive.names("needed") == []


async def test_a_deleted_handoff_stays_deleted_on_all_machines(machines: Machines, archive: Archive) -> None:
    one, two = machines("one"), machines("two")
    record = await one.leave(pin=True)
    found = await two.handoffs.get(record.id, "local")
    await two.handoffs.delete(found)
    await two.quiet()
    assert await gone(two.handoffs, found)
    one.storage.seen.versions.clear()  # some seconds later
    assert await gone(one.handoffs, record)
    assert not one.store.exists(record.key)
    assert archive.names("files") == []
    (name,) = archive.names("records")
    assert len(archive.read(name)) < 200  # it says no more than that it was deleted
    assert await gone(machines("three").handoffs, record)


@pytest.mark.fault("C23")
async def test_a_change_never_brings_a_deleted_handoff_back(machines: Machines, archive: Archive) -> None:
    one, two = machines("one"), machines("two")
    for number in range(15):
        record = await one.leave(pin=True)
        other = await two.handoffs.get(record.id, "local")
        await asyncio.gather(
            one.handoffs.change(record, {"label": f"label {number}"}),
            two.handoffs.delete(other),
            return_exceptions=True,
        )
        await one.quiet()
        one.storage.seen.versions.clear()
        assert await gone(one.handoffs, record)
        assert await gone(two.handoffs, other)
        assert await gone(machines(f"later {number}").handoffs, record)


@pytest.mark.fault("C23")
async def test_a_handoff_that_is_deleted_while_it_is_being_written_stays_deleted(
    machines: Machines, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machines("one")
    pushed, write = asyncio.Event(), one.storage.archive.records.write
    loop, go_on = asyncio.get_running_loop(), threading.Event()

    def slow(*arguments: Any) -> str:
        loop.call_soon_threadsafe(pushed.set)
        go_on.wait(60)
        return write(*arguments)

    monkeypatch.setattr(one.storage.archive.records, "write", slow)
    record = one.handoffs.begin(ENGINE, "local", pin=True)
    one.entry(record.key)
    one.handoffs.end(record, TransferRequest(), range(64))
    await pushed.wait()
    await one.handoffs.delete(record)
    go_on.set()
    await one.quiet()
    assert await gone(one.handoffs, record)
    assert await gone(machines("two").handoffs, record)
    assert archive.names("files") == []


@pytest.mark.fault("C23")
async def test_changes_of_two_machines_at_once_are_both_kept(machines: Machines, archive: Archive) -> None:
    one, two = machines("one"), machines("two")
    record = await one.leave(pin=True)
    other = await two.handoffs.get(record.id, "local")
    for number in range(10):
        await asyncio.gather(
            one.handoffs.change(record, {"label": f"mine {number}"}),
            two.handoffs.change(other, {"ttl_s": 100 + number}),
        )
        for machine in (one, two, machines(f"later {number}")):
            machine.storage.seen.versions.clear()
            found = await machine.handoffs.get(record.id, "local")
            assert (found.label, found.ttl_s) == (f"mine {number}", pytest.approx(100 + number, abs=5))


async def test_what_another_machine_changes_is_seen_within_seconds(
    machines: Machines, archive: Archive
) -> None:
    one, two = machines("one"), machines("two")
    record = await one.leave(pin=True)
    await two.handoffs.change(await two.handoffs.get(record.id, "local"), {"label": "theirs"})
    deadline = time.monotonic() + LOOK_AGAIN_S + 20
    while (await one.handoffs.get(record.id, "local")).label != "theirs":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


@pytest.mark.fault("C19")
async def test_a_file_that_was_changed_is_never_put_into_a_store(
    machines: Machines, archive: Archive
) -> None:
    one, two = machines("one"), machines("two")
    record = await one.leave(blocks=600, pin=True)
    (name,) = archive.names("files")
    archive.damage(name)
    found = await two.handoffs.get(record.id, "local")
    await two.handoffs.fetch_here(found, ENGINE)
    await two.quiet()
    assert not two.store.exists(record.key)
    assert not list((machines.folder / "two/store/writing").iterdir())
    assert found.bytes == 0  # it is computed from now on, and not fetched again
    assert "tampered" in str(two.metrics.archive._errors.collect())
    archive.delete(name)
    three = machines("three")
    found = await three.handoffs.get(record.id, "local")
    await three.handoffs.fetch_here(found, ENGINE)
    assert (found.state, three.handoffs.is_here(found)) == (HandoffState.READY, False)


@pytest.mark.fault("C19")
async def test_a_record_that_was_changed_or_moved_is_refused(machines: Machines, archive: Archive) -> None:
    one = machines("one")
    mine, theirs = await one.leave("me", pin=True), await one.leave("they", pin=True)
    names = archive.names("records")
    good = [archive.read(name) for name in names]
    for name, data in zip(names, reversed(good), strict=True):
        archive.write(name, data)  # each in the other's place
    assert await gone(machines("two").handoffs, mine)
    assert await gone(machines("two").handoffs, theirs)
    for name, data in zip(names, good, strict=True):
        archive.write(name, data.replace(b'"pin":true', b'"pin":null'))
    assert await gone(machines("three").handoffs, mine)
    for name, data in zip(names, good, strict=True):
        archive.write(name, data)
    assert not await gone(machines("four").handoffs, mine)
    for name in names:
        archive.write(name, b"")
    assert await gone(machines("five").handoffs, mine)
    one.storage.seen.versions.clear()
    assert not await gone(one.handoffs, mine)  # what is on the machine is still good
    await one.handoffs.delete(mine)
    assert await gone(one.handoffs, mine)


@pytest.mark.fault("C19")
async def test_images_go_along_and_are_verified(machines: Machines, archive: Archive) -> None:
    one = machines("one")
    pictures = [picture(1), picture(2), picture(1)]
    placed = [PlacedImage(each, 10 * index, 4, (7,)) for index, each in enumerate(pictures)]
    record = one.handoffs.begin(ENGINE, "local", pin=True)
    one.handoffs.end(record, TransferRequest(images=placed, report=TransferReport(saves=False)), range(50))
    await one.quiet()
    assert len(archive.names("files")) == 2
    two = machines.wiped(one, "one")
    found = await two.handoffs.get(record.id, "local")
    assert await two.handoffs.images(found) == placed
    for name in archive.names("files"):
        archive.damage(name)
    assert await two.handoffs.images(found) == placed  # they are on the machine again
    three = machines.wiped(two, "one")
    found = await three.handoffs.get(record.id, "local")
    with pytest.raises(HandoffImagesLost):
        await three.handoffs.images(found)


async def test_what_expires_is_deleted_with_the_files_that_nothing_else_needs(
    machines: Machines, archive: Archive
) -> None:
    one = machines("one")
    first = await one.leave(blocks=8, pin=True, ttl_s=100)
    second = await one.leave(blocks=16, after=first, pin=True, ttl_s=100)
    await one.handoffs.change(second, {"ttl_s": 1000})
    assert remove_expired(one.storage.archive) == 0
    later = time.time() + 500
    assert remove_expired(one.storage.archive, now=lambda: later) == 1
    assert len(archive.names("files")) == 2
    two = machines("two")
    assert await gone(two.handoffs, first)
    assert not await gone(two.handoffs, second)
    latest = time.time() + 2000
    assert remove_expired(one.storage.archive, now=lambda: latest) == 1
    assert archive.names("files") == archive.names("needed") == []
    day_after = time.time() + 100_000
    assert remove_expired(one.storage.archive, now=lambda: day_after) == 0
    assert archive.names() == ["gateways"]


@pytest.mark.fault("C22")
async def test_what_a_killed_gateway_left_half_written_goes_too(
    machines: Machines, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machines("one")

    def killed(*_: Any) -> str:
        raise RuntimeError("killed")

    monkeypatch.setattr(one.storage.archive.records, "write", killed)
    record = one.handoffs.begin(ENGINE, "local", pin=True)
    one.entry(record.key)
    one.handoffs.end(record, TransferRequest(), range(64))
    await one.quiet()
    assert len(archive.names("files")) == 1
    assert archive.names("records") == []
    later = time.time() + 10_000
    assert remove_expired(machines("two").storage.archive, now=lambda: later) == 0
    assert archive.names() == ["gateways"]


@pytest.mark.fault("C22")
async def test_what_was_not_archived_before_the_gateway_ended_is_when_it_starts_again(
    machines: Machines, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machines("one")
    monkeypatch.setattr(one.storage.archiver, "write_later", lambda _record: None)
    record = await one.leave(pin=True)
    assert archive.names("records") == []
    one.close()
    again = machines("one")
    await again.quiet()
    assert len(archive.names("records")) == 1
    assert not await gone(machines("two").handoffs, record)


async def test_a_handoff_that_the_machine_evicted_is_found_again(
    machines: Machines, archive: Archive
) -> None:
    one = machines("one")
    record = await one.leave(pin=True)
    kv = one.read(record.key)
    found = await one.handoffs.get(record.id, "local")
    one.handoffs.upkeep._evict(found)
    await one.quiet()
    assert not one.store.exists(record.key)
    again = await one.handoffs.get(record.id, "local")
    await one.handoffs.fetch_here(again, ENGINE)
    assert one.read(record.key) == kv


async def test_an_unknown_id_is_asked_for_once_in_a_while(machines: Machines, archive: Archive) -> None:
    one = machines("one")
    before = str(one.metrics.archive._seconds.labels("get").collect())
    with pytest.raises(HandoffNotFound):
        await one.handoffs.get("x" * 32, "local")
    once = str(one.metrics.archive._seconds.labels("get").collect())
    assert before != once
    for _ in range(100):
        with pytest.raises(HandoffNotFound):
            await one.handoffs.get("x" * 32, "local")
    assert str(one.metrics.archive._seconds.labels("get").collect()) == once


async def test_uploads_keep_to_the_rate(machines: Machines, archive: Archive) -> None:
    fast, slow = machines("fast"), machines("slow", archive_rate=3 * 1024 * 1024)
    began = time.monotonic()
    await fast.leave(blocks=1500, pin=True)
    baseline = time.monotonic() - began
    await slow.leave(blocks=1500, pin=True)
    assert time.monotonic() - began - baseline > max(1.5, baseline)


@pytest.mark.fault("C18")
def test_gateways_with_another_secret_or_wrong_credentials_are_refused(
    machines: Machines, archive: Archive
) -> None:
    machines("one")
    with pytest.raises(SettingsError, match="another secret"):
        machines("two", secret="another secret, which is as long as the other")
    wrong = machines.folder / "wrong"
    wrong.write_text("AKIDTESTSONLY\nwrong\n")
    with pytest.raises(SettingsError, match="refuses these credentials"):
        machines("three", archive_key_file=wrong)
    wrong.write_text("one")
    with pytest.raises(SettingsError, match="two lines"):
        machines("four", archive_key_file=wrong)
    with pytest.raises(SettingsError, match="archive_key_file"):
        machines("five", archive_key_file=machines.folder / "missing")


async def test_with_a_shared_store_the_archive_follows_it_and_gives_back_what_it_lost(
    machines: Machines, archive: Archive, tmp_path: Path
) -> None:
    if BINARIES["valkey"] is None:
        pytest.skip("no valkey-server is installed")
    (tmp_path / "valkey").mkdir()
    with store_server("valkey", tmp_path / "valkey") as valkey:
        one, two = machines("one", shared=valkey.url), machines("two", shared=valkey.url)
        record = await one.leave(blocks=40, pin=True)
        kv = one.read(record.key)
        other = await two.handoffs.get(record.id, "local")
        await asyncio.gather(
            one.handoffs.change(record, {"label": "mine"}), two.handoffs.change(other, {"ttl_s": 100})
        )
        await one.quiet()
        await two.quiet()
        valkey.client.flushall()
        three = machines("three", shared=valkey.url)
        found = await three.handoffs.get(record.id, "local")
        assert (found.label, found.ttl_s) == ("mine", pytest.approx(100, abs=5))
        await three.handoffs.fetch_here(found, ENGINE)
        assert three.read(record.key) == kv
        await three.quiet()
        assert list(valkey.client.scan_iter("baton:f:*"))  # it is in the shared store again
        four = machines("four", shared=valkey.url)
        archive_names = archive.names("files")
        for name in archive_names:
            archive.delete(name)
        again = await four.handoffs.get(record.id, "local")
        await four.handoffs.fetch_here(again, ENGINE)
        assert four.read(record.key) == kv  # from the shared store
        await four.handoffs.delete(again)
        await four.quiet()
        assert await gone(three.handoffs, found)
        valkey.client.flushall()
        assert await gone(machines("five", shared=valkey.url).handoffs, record)
