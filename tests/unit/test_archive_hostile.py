"""An S3 service that refuses, lies, truncates or is slow: nothing wrong is used, and nothing waits for long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.archives import Archive, ArchivedMachine, archived_machine, with_s3
from support.s3_proxy import Refusal, S3Proxy, s3_proxy
from support.shared_stores import BINARIES, ENGINE, store_server

from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferRequest
from baton.errors import HandoffNotFound, HandoffStoreUnavailable
from baton.library.archive import bucket as archive_bucket
from baton.library.archive import copies as archive_files
from baton.library.archive.archiver import Archiver, remove_expired
from baton.library.archive.copies import Pace
from baton.library.handoff import Handoff, HandoffAudit
from baton.library.here.entries import LocalFile
from baton_kv.stores.base import StoreError, StoreFull

pytestmark = with_s3


class Site:
    """Machines over an archive of the test's own, which they reach by a proxy."""

    def __init__(self, folder: Path, archive: Archive, proxy: S3Proxy, stack: ExitStack) -> None:
        self.archive, self.proxy = archive, proxy
        self._folder, self._stack = folder, stack

    def machine(self, name: str, **settings: Any) -> ArchivedMachine:
        given = {"archive_endpoint": self.proxy.endpoint} | settings
        made = archived_machine(self._folder / name, self.archive, **given)
        self._stack.callback(made.close)
        return made


@pytest.fixture
def site(archive: Archive, tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        proxy = stack.enter_context(s3_proxy(archive.endpoint))
        yield Site(tmp_path, archive, proxy, stack)


def try_again_now(machine: ArchivedMachine) -> None:
    """What could not be written is tried again in some seconds: let them have passed."""
    machine.storage.archive.bucket.breaker.resting_until = 0.0
    for name in machine.storage.archiver.later:
        machine.storage.archiver.later[name] = 0.0


async def written(machine: ArchivedMachine, record: Handoff) -> None:
    deadline = time.monotonic() + 20
    while machine.storage.archiver.is_waiting(record.id):
        assert time.monotonic() < deadline
        try_again_now(machine)
        await asyncio.sleep(0.05)


@pytest.mark.fault("C18")
@pytest.mark.parametrize("refusal", [(403, "AccessDenied"), (404, "NoSuchBucket"), (503, "SlowDown")])
async def test_a_service_that_refuses_says_nothing_of_what_is_there(
    refusal: tuple[int, str], site: Site
) -> None:
    one, two = site.machine("one"), site.machine("two")
    record = await one.leave(pin=True)
    site.proxy.refuse = lambda _method, _path: refusal
    with pytest.raises(HandoffStoreUnavailable):
        await two.handoffs.get(record.id, "local")
    with pytest.raises(HandoffStoreUnavailable):
        await one.handoffs.delete(record)
    assert (await one.handoffs.get(record.id, "local")).id == record.id  # here it is all the same
    assert one.handoffs.is_here(record)
    site.proxy.refuse = lambda _method, _path: None
    try_again_now(two)
    assert (await two.handoffs.get(record.id, "local")).id == record.id


@pytest.mark.fault("C20")
@pytest.mark.parametrize("refusal", [(403, "QuotaExceeded"), (507, "XMinioStorageFull")])
async def test_a_full_bucket_is_written_to_once_it_has_room(refusal: tuple[int, str], site: Site) -> None:
    one = site.machine("one")
    site.proxy.refuse = lambda method, path: refusal if method == "PUT" and "/files/" in path else None
    record = await one.leave(pin=True)
    assert one.handoffs.is_here(record)
    assert not record.archived
    assert site.archive.names("records") == []  # no document without its files
    site.proxy.refuse = lambda _method, _path: None
    await written(one, record)
    assert record.archived
    two = site.machine("two")
    await two.handoffs.fetch_here(await two.handoffs.get(record.id, "local"), ENGINE)
    assert two.read(record.key) == one.read(record.key)


@pytest.mark.fault("C17")
async def test_a_slow_service_costs_its_deadlines_and_no_more(site: Site) -> None:
    one = site.machine("one")
    record = await one.leave(blocks=600, pin=True)
    two = site.machine("two", archive_fetch_s=1.0, archive_timeout_s=0.5)
    found = await two.handoffs.get(record.id, "local")
    site.proxy.delay_s = 0.4  # each look-up is in time, the parts together are not
    began = time.monotonic()
    await two.handoffs.fetch_here(found, ENGINE)
    site.proxy.delay_s = 20.0
    assert time.monotonic() - began < 10
    began = time.monotonic()
    with pytest.raises(HandoffStoreUnavailable):
        await two.handoffs.get("x" * 32, "local")
    assert time.monotonic() - began < 15
    site.proxy.delay_s = 0.0


@pytest.mark.fault("C19")
@pytest.mark.parametrize("cut", [0, 1, 1000])
async def test_an_answer_that_ends_too_early_is_never_used(cut: int, site: Site) -> None:
    one, two = site.machine("one"), site.machine("two")
    record = await one.leave(blocks=600, pin=True)
    (name,) = site.archive.names("files")
    whole = site.archive.read(name)
    found = await two.handoffs.get(record.id, "local")
    site.archive.write(name, whole[:cut] if cut else b"")
    await two.handoffs.fetch_here(found, ENGINE)
    assert not two.handoffs.is_here(found)
    assert not list((two.store.root / "writing").iterdir())
    site.archive.write(name, whole + b"more")
    three = site.machine("three")
    found = await three.handoffs.get(record.id, "local")
    await three.handoffs.fetch_here(found, ENGINE)
    assert not three.handoffs.is_here(found) or three.read(found.key) == one.read(record.key)


@pytest.mark.fault("C19")
async def test_a_document_of_another_size_than_any_is_not_read(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = site.machine("one")
    record = await one.leave(pin=True)
    (name,) = site.archive.names("records")
    monkeypatch.setattr(archive_bucket, "MAX_SMALL_BYTES", 100_000)
    site.archive.write(name, site.archive.read(name) + b" " * 100_001)
    two = site.machine("two")
    asked: list[int] = []
    unseal = two.storage.archive.names.unseal
    monkeypatch.setattr(
        type(two.storage.archive.names),
        "unseal",
        lambda _, name, data: asked.append(len(data)) or unseal(name, data),
    )
    with pytest.raises(HandoffNotFound):
        await two.handoffs.get(record.id, "local")
    assert not [each for each in asked if each > 100_000]


@pytest.mark.fault("C19")
async def test_a_damaged_document_costs_the_machine_that_has_the_handoff_nothing(site: Site) -> None:
    one = site.machine("one")
    record = await one.leave(pin=True)
    (name,) = site.archive.names("records")
    site.archive.damage(name)
    one.storage.seen.versions.clear()
    with pytest.raises(HandoffStoreUnavailable):
        await one.handoffs.change(record, {"label": "changed"})
    assert one.handoffs.is_here(await one.handoffs.get(record.id, "local"))
    await written(one, record)  # which writes the document once more
    assert (await site.machine("two").handoffs.get(record.id, "local")).id == record.id
    await one.handoffs.change(record, {"label": "changed"})
    assert (await site.machine("three").handoffs.get(record.id, "local")).label == "changed"


async def test_kv_that_was_found_wrong_leaves_the_archive_although_the_handoff_is_changed_meanwhile(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = site.machine("one")
    record = await one.leave(pin=True)
    other = await one.leave(pin=True)
    site.proxy.refuse = lambda _method, _path: (503, "SlowDown")
    for each in (record, other):
        await one.handoffs.distrust(each, None)
    await one.quiet()
    site.proxy.refuse = lambda _method, _path: None
    one.storage.archive.bucket.breaker.resting_until = 0.0
    await one.handoffs.note_audit(
        record, HandoffAudit(result="mismatch", difference=9.0, same_token=False, at=1)
    )
    await one.handoffs.change(other, {"label": "changed"})
    for each in (record, other):
        await written(one, each)
    assert site.archive.names("files") == []
    two = site.machine("two")
    assert [(await two.handoffs.get(each.id, "local")).bytes for each in (record, other)] == [0, 0]


@pytest.mark.fault("C17")
async def test_two_uploads_that_share_a_rate_both_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_files, "PATIENCE_S", 0.5)
    monkeypatch.setattr(archive_files, "LEAST_RATE", 1024**3)
    one = site.machine("one")
    files = one.storage.archive.files
    monkeypatch.setattr(files, "_pace", Pace(4 * 1024 * 1024))
    data = bytes(4 * 1024 * 1024)
    await asyncio.gather(
        *(
            asyncio.to_thread(
                files.push,
                f"files/scope/{name}",
                LocalFile.holding(name, data),
            )
            for name in "abc"
        )
    )
    assert len(site.archive.names("files")) == 3


@pytest.mark.fault("C24")
async def test_what_another_version_wrote_is_left_to_it(site: Site) -> None:
    one = site.machine("one")
    record = await one.leave(pin=True, ttl_s=100)
    archive = one.storage.archive
    (name,) = site.archive.names("records")
    site.archive.write(name, archive.names.seal(name, b'{"of": "a later version"}'))
    later = time.time() + 500
    remove_expired(archive, now=lambda: later)
    assert site.archive.names("records") == [name]
    assert len(site.archive.names("files")) == 1
    with pytest.raises(HandoffStoreUnavailable):
        await one.handoffs.change(record, {"label": "mine"})
    with pytest.raises(HandoffStoreUnavailable):
        await site.machine("two").handoffs.get(record.id, "local")
    assert b"later version" in site.archive.read(name)


@pytest.mark.fault("C21")
async def test_what_somebody_deleted_from_the_bucket_is_computed_or_gone(site: Site) -> None:
    one = site.machine("one")
    first, second = await one.leave(pin=True), await one.leave(pin=True)
    two = site.machine("two")
    found = await two.handoffs.get(first.id, "local")
    for name in site.archive.names("files"):
        site.archive.delete(name)
    await two.handoffs.fetch_here(found, ENGINE)
    await two.quiet()
    assert not two.handoffs.is_here(found)
    assert found.bytes == 0  # it is computed
    for name in site.archive.names("records"):
        site.archive.delete(name)
    one.storage.seen.versions.clear()
    for machine in (one, site.machine("three")):
        with pytest.raises(HandoffNotFound):
            await machine.handoffs.get(second.id, "local")


@pytest.mark.fault("C18")
async def test_no_thread_of_the_archive_dies_of_an_answer_that_makes_no_sense(site: Site) -> None:
    one = site.machine("one")
    site.proxy.refuse = lambda method, path: (200, "<Nothing/>") if "/files/" in path else None
    record = await one.leave(pin=True)
    assert isinstance(one.storage.archiver, Archiver)
    assert one.storage.archiver.is_waiting(record.id)
    site.proxy.refuse = lambda _method, _path: None
    await written(one, record)
    assert record.archived


@pytest.mark.fault("C23")
async def test_a_change_while_the_handoff_is_being_written_is_not_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = site.machine("one")
    writing, go_on, write = threading.Event(), threading.Event(), one.storage.archive.records.write

    def slow(*arguments: Any) -> str:
        tag = write(*arguments)
        writing.set()
        go_on.wait(60)
        return tag

    monkeypatch.setattr(one.storage.archive.records, "write", slow)
    record = one.handoffs.begin(ENGINE, "local", pin=True)
    one.entry(record.key)
    one.handoffs.end(record, TransferRequest(), range(64))
    await asyncio.to_thread(writing.wait, 20)
    changing = asyncio.ensure_future(one.handoffs.change(record, {"label": "mine"}))
    await asyncio.sleep(0.3)
    go_on.set()
    await changing
    await one.quiet()
    one.storage.seen.versions.clear()
    for machine in (one, site.machine("two")):
        assert (await machine.handoffs.get(record.id, "local")).label == "mine"


@pytest.mark.fault("C23")
async def test_a_change_that_was_refused_with_503_is_made_nowhere(site: Site) -> None:
    one = site.machine("one", archive_after_s=100, ttl_s=1000)
    record = await one.leave()
    site.proxy.refuse = lambda method, path: (
        (503, "SlowDown") if method == "PUT" and "/records/" in path else None
    )
    with pytest.raises(HandoffStoreUnavailable):
        await one.handoffs.change(record, {"label": "lost", "pin": True})
    site.proxy.refuse = lambda _method, _path: None
    one.storage.archive.bucket.breaker.resting_until = 0.0
    for machine in (one, site.machine("two")):
        found = await machine.handoffs.get(record.id, "local")
        assert (found.label, found.pin) == (None, False)
    assert not any(one.store.pinned().values())


@pytest.mark.fault("C23")
async def test_a_handoff_that_is_evicted_while_it_is_changed_or_looked_at_is_found_again(site: Site) -> None:
    """What the archive has is not gone, whatever becomes of this machine's copy."""
    one, two = site.machine("one"), site.machine("two")
    record = await one.leave(pin=True)
    for label in ("first", "second"):
        one.storage.here.remove(record)
        await one.handoffs.change(record, {"label": label})
        assert record.label == label
        assert (await one.handoffs.get(record.id, "local")).label == label
    assert (await two.handoffs.get(record.id, "local")).label == "second"

    read = one.storage.archive.records.read

    def evicted(handoff: str, unless: str | None = None) -> Any:
        one.storage.archive.records.read = read  # type: ignore[method-assign]  # once
        one.storage.here.remove(record)
        return read(handoff)

    one.storage.seen.versions.clear()
    one.storage.archive.records.read = evicted  # type: ignore[method-assign]
    assert (await one.handoffs.get(record.id, "local")).label == "second"
    await two.handoffs.delete(await two.handoffs.get(record.id, "local"))
    one.storage.seen.versions.clear()
    for _ in range(2):
        with pytest.raises(HandoffNotFound):
            await one.handoffs.get(record.id, "local")


@pytest.mark.fault("C18")
async def test_a_handoff_of_which_nobody_knows_whether_it_was_deleted_is_not_said_to_be_gone(
    site: Site,
) -> None:
    one, two = site.machine("one"), site.machine("two")
    record = await one.leave(pin=True)
    looks = 0

    def refuse(method: str, path: str) -> Refusal | None:
        nonlocal looks
        looks += method == "GET" and "/records/" in path
        return (503, "SlowDown") if looks == 2 else None  # the look after it was written to this machine

    site.proxy.refuse = refuse
    with pytest.raises(HandoffStoreUnavailable):
        await two.handoffs.get(record.id, "local")
    site.proxy.refuse = lambda _method, _path: None
    assert (await two.handoffs.get(record.id, "local")).id == record.id


async def test_what_another_machine_unpins_is_not_pinned_here(site: Site) -> None:
    one, two = site.machine("one"), site.machine("two")
    record = await one.leave(pin=True)
    assert any(one.store.pinned().values())
    await two.handoffs.change(await two.handoffs.get(record.id, "local"), {"pin": False})
    one.storage.seen.versions.clear()
    assert not (await one.handoffs.get(record.id, "local")).pin
    assert not any(one.store.pinned().values())


async def test_a_handoff_can_be_pinned_on_a_machine_that_has_not_fetched_it(site: Site) -> None:
    one, two = (site.machine(name, archive_after_s=100, ttl_s=1000) for name in ("one", "two"))
    record = await one.leave()
    found = await two.handoffs.get(record.id, "local")
    await two.handoffs.change(found, {"pin": True})
    assert found.pin
    await two.handoffs.fetch_here(found, ENGINE)
    assert any(two.store.pinned().values())
    one.storage.seen.versions.clear()
    assert (await one.handoffs.get(record.id, "local")).pin


async def test_a_change_of_a_handoff_that_the_machine_has_no_room_for_is_kept(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = site.machine("one"), site.machine("two")
    record = await one.leave(pin=True)

    def full(_size: int) -> None:
        raise StoreFull("full")

    monkeypatch.setattr(two.store, "make_room", full)
    found = await two.handoffs.get(record.id, "local")
    assert not found.on_disk
    await two.handoffs.change(found, {"label": "theirs"})
    assert (await site.machine("three").handoffs.get(record.id, "local")).label == "theirs"
    await two.handoffs.delete(found)
    one.storage.seen.versions.clear()
    with pytest.raises(HandoffNotFound):
        await one.handoffs.get(record.id, "local")


async def test_machines_that_restore_a_handoff_at_once_all_find_it(site: Site, tmp_path: Path) -> None:
    if BINARIES["valkey"] is None:
        pytest.skip("no valkey-server is installed")
    (tmp_path / "valkey").mkdir()
    with store_server("valkey", tmp_path / "valkey") as valkey:
        one = site.machine("one", shared=valkey.url)
        record = await one.leave(pin=True)
        others = [site.machine(f"other {number}", shared=valkey.url) for number in range(4)]
        for _ in range(5):
            valkey.client.flushall()
            for each in others:
                if (known := each.handoffs.index.known(record.id)) is not None:
                    each.handoffs.index.drop(known)
            found = await asyncio.gather(*(each.handoffs.get(record.id, "local") for each in others))
            assert {each.id for each in found} == {record.id}
        for each in others:
            each.close()


@pytest.mark.fault("C17")
async def test_a_fetch_that_was_cut_off_is_not_waited_for_again_where_computing_is_faster(site: Site) -> None:
    one, two = site.machine("one"), site.machine("two", archive_fetch_s=1.0, archive_timeout_s=0.5)
    engine = FakeEngine("a", supports_handoffs=True)
    engine.throughput.prefilled(1000, 0.1)
    found = []
    for record in [await one.leave(blocks=600, pin=True) for _ in range(2)]:
        found.append(await two.handoffs.get(record.id, "local"))
        vars(found[-1])["tokens"] = found[-1].tokens[:1000]  # as long to compute as the engine was measured
    site.proxy.refuse = lambda _method, path: time.sleep(3.0) if "/files/" in path else None
    waited = []
    for each in found:
        began = time.monotonic()
        await two.handoffs.fetch_here(each, engine)
        waited.append(time.monotonic() - began)
        await asyncio.gather(*two.handoffs.fetches.running.values())
        assert not two.handoffs.is_here(each)
    assert waited[0] > 0.9
    assert waited[1] < 0.9
    assert (two.handoffs.skipped_fetch_s(found[1]) or 0) > 1.0


async def test_a_file_that_cannot_be_read_here_is_no_failure_of_the_archive(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = site.machine("one")
    files = one.storage.archive.files

    def gone(_start: int, _view: memoryview) -> int:
        return 0

    def failing(_start: int, _view: memoryview) -> int:
        raise StoreFull("the device failed")

    for reader in (gone, failing):
        for size in (1000, 20 * 1024 * 1024):
            with pytest.raises(StoreError):
                await asyncio.to_thread(files.push, "files/scope/a", LocalFile("a", size, reader))
    assert site.archive.names("files") == []
    assert not one.storage.archive.bucket.breaker.doubtful


async def test_the_log_holds_no_credentials_and_no_object(site: Site) -> None:
    one = site.machine("one")
    body = "<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>AKIDTESTSONLY</AWSAccessKeyId></Error>"
    site.proxy.refuse = lambda _method, _path: (403, body)
    with capture_logs() as logs:
        with pytest.raises(HandoffStoreUnavailable) as raised:
            await one.handoffs.get("x" * 32, "local")
        await one.leave(pin=True)
    said = str(logs)
    assert "SignatureDoesNotMatch" in said
    for secret in ("AKID", "a-secret-of", "127.0.0.1", "records/", "files/"):
        assert secret not in said + str(raised.value)
    assert "secret" not in repr(one.storage.archive.bucket)


async def test_pinned_handoffs_of_many_machines_leave_room_on_the_one_that_fetches_them(site: Site) -> None:
    small = {"budget": 4 * 1024 * 1024}
    left = [await site.machine(name, **small).leave(blocks=300, pin=True) for name in ("a", "b", "c", "d")]
    last = site.machine("last", **small)
    for record in left:
        found = await last.handoffs.get(record.id, "local")
        await last.handoffs.fetch_here(found, ENGINE)
        assert found.pin
        assert last.store.pinned().total() <= 2 * 1024 * 1024


async def test_kv_that_one_machine_found_wrong_is_used_on_none(site: Site) -> None:
    one, two = site.machine("one"), site.machine("two")
    record = await one.leave(pin=True)
    found = await two.handoffs.get(record.id, "local")
    await two.handoffs.fetch_here(found, ENGINE)
    assert two.handoffs.is_here(found)
    await one.handoffs.distrust(record, None)
    audit = HandoffAudit(result="mismatch", difference=9.0, same_token=False, at=1)
    await one.handoffs.note_audit(record, audit)
    await written(one, record)
    two.storage.seen.versions.clear()
    again = await two.handoffs.get(record.id, "local")
    await two.handoffs.fetch_here(again, ENGINE)
    assert again.bytes == 0
    assert not two.handoffs.is_here(again)
