"""What the shared store holds lives as long as it should: no shorter, no longer, and whole."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.raw_requests import wait_for
from support.shared_index import index_errors
from support.shared_stores import ENGINE, Machine, StoreServer, machine, servers, store_server

from baton.engines.transfers import TransferRequest
from baton.errors import HandoffNotFound, HandoffStoreUnavailable
from baton.library.handoff import HandoffState
from baton.library.here.entries import Deadline, LocalFile
from baton.library.valkey import files as pool_files
from baton.library.valkey import records as shared_records
from baton.library.valkey.files import CHUNK_BYTES, CHUNKS_AT_ONCE
from baton_kv.stores.base import StoreError


@pytest.fixture(params=servers)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreServer]:
    with store_server(request.param, tmp_path) as running:
        yield running


def rows(server: StoreServer) -> dict[str, int]:
    """The keys of files and the milliseconds that they live; -1: for ever."""
    return {key.decode(): server.client.pttl(key) for key in server.client.scan_iter("baton:f:*")}


def read_back(one: Machine, name: str) -> bytes:
    _, chunks = one.pool.files.chunks(name, Deadline.within("the test's", 10), 1 << 30)
    return b"".join(chunks)


async def test_a_late_report_that_it_is_pending_does_not_end_a_saved_handoff(
    server: StoreServer, tmp_path: Path
) -> None:
    one = machine(tmp_path / "one", server.url)
    record = await one.leave(ttl_s=600)
    assert one.pool.records.keep_pending([record.id]) == []  # it was on its way while the record was written
    assert server.client.ttl(f"baton:{{i}}:r:{record.id}") > 500
    assert server.client.zscore("baton:{i}:ends", record.id) / 1000 > time.time() + 500


def test_a_file_that_takes_long_to_write_is_whole_and_never_without_an_end(
    server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_files, "WRITING_MS", 2500)
    one, data = machine(tmp_path / "one", server.url), bytes(range(256)) * 4096 * 4 * CHUNKS_AT_ONCE
    lives: list[int] = []

    def slowly(start: int, view: memoryview) -> int:
        lives.extend(rows(server).values())
        time.sleep(0.7)
        view[:] = data[start : start + len(view)]
        return len(view)

    one.pool.files.write(LocalFile("scope/slow", len(data), slowly), 60_000, time.monotonic() + 60)
    assert -1 not in lives
    assert read_back(one, "scope/slow") == data


def test_a_file_of_which_a_part_has_expired_is_not_put_in_place(
    server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_files, "WRITING_MS", 100)
    one, size = machine(tmp_path / "one", server.url), 4 * CHUNKS_AT_ONCE * CHUNK_BYTES

    def stalls(start: int, view: memoryview) -> int:
        time.sleep(0.4 if start == 3 * CHUNKS_AT_ONCE * CHUNK_BYTES else 0)
        return len(view)

    with pytest.raises(StoreError):
        one.pool.files.write(LocalFile("scope/stalled", size, stalls), 60_000, time.monotonic() + 60)
    wait_for(lambda: rows(server) == {}, "something stays")


async def test_a_push_ends_by_its_deadline(
    server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_files, "PUSH_WITHIN_S", 0.3)
    one = machine(tmp_path / "one", server.url)
    slow: Any = pool_files._add_chunks

    def slowed(*arguments: Any) -> None:
        time.sleep(0.4)
        slow(*arguments)

    monkeypatch.setattr(pool_files, "_add_chunks", slowed)
    began = time.monotonic()
    record = await one.leave(blocks=16 * CHUNKS_AT_ONCE * CHUNK_BYTES // 4096)
    assert time.monotonic() - began < 20  # not for as long as all of it would take
    assert record.on_disk  # others compute its KV
    assert rows(server) == {}
    assert index_errors(server.client) == []


async def test_a_gateway_that_was_cut_off_while_it_generated_saves_its_handoff_all_the_same(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record = one.handoffs.begin(ENGINE, "local")
    await one.quiet()
    server.client.delete(f"baton:{{i}}:r:{record.id}")  # nobody reported it for 15 s
    server.client.zadd("baton:{i}:ends", {record.id: 1})
    await two.leave()  # which removes what has expired
    assert server.client.zscore("baton:{i}:gone", record.id)
    assert one.pool.records.keep_pending([record.id]) == []
    listed, _ = await one.handoffs.page("local", limit=9, after=None)
    assert record.id in {each.id for each in listed}
    assert await one.handoffs.get(record.id, "local") is record
    one.entry(record.key)
    one.handoffs.end(record, TransferRequest(), range(64))
    await one.quiet()
    assert (await two.handoffs.get(record.id, "local")).state is HandoffState.READY
    assert index_errors(server.client) == []


async def test_what_was_deleted_while_it_was_pending_stays_deleted(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record = one.handoffs.begin(ENGINE, "local")
    await one.quiet()
    await two.handoffs.delete(await two.handoffs.get(record.id, "local"))
    assert one.pool.records.keep_pending([record.id]) == [record.id]
    one.entry(record.key)
    one.handoffs.end(record, TransferRequest(), range(64))
    await one.quiet()
    for handoffs in (one.handoffs, two.handoffs):
        with pytest.raises(HandoffNotFound):
            await handoffs.get(record.id, "local")
    assert rows(server) == {}


async def test_a_gateway_that_was_cut_off_for_too_long_brings_nothing_back(
    server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine(tmp_path / "one", server.url)
    record = one.handoffs.begin(ENGINE, "local")
    await one.quiet()
    server.client.delete(f"baton:{{i}}:r:{record.id}")
    server.client.set("baton:{i}:lost", "7")  # that it was deleted is remembered no longer, perhaps
    one.entry(record.key)
    one.handoffs.end(record, TransferRequest(), range(64))
    await one.quiet()
    with pytest.raises(HandoffNotFound):
        await one.handoffs.get(record.id, "local")


async def test_a_failed_request_is_shown_as_failed_where_it_failed(
    server: StoreServer, tmp_path: Path
) -> None:
    one = machine(tmp_path / "one", server.url)
    record = one.handoffs.begin(ENGINE, "local")
    await one.quiet()
    one.handoffs.end(record, None, reason="the engine was lost")
    await one.quiet()
    assert [each.id for each in (await one.handoffs.page("local", limit=9, after=None))[0]] == [record.id]
    found = await one.handoffs.get(record.id, "local")
    assert (found.state, found.error) == (HandoffState.FAILED, "the engine was lost")


async def ids(one: Machine) -> set[str]:
    return {each.id for each in (await one.handoffs.page("local", limit=99, after=None))[0]}


async def test_a_store_that_was_emptied_is_listed_as_it_is_now(server: StoreServer, tmp_path: Path) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    before = {(await one.leave()).id for _ in range(3)}
    assert await ids(two) == before
    server.client.flushall()  # or it was started again
    after = {(await one.leave()).id for _ in range(2)}
    assert await ids(two) == after
    later = await one.leave()
    assert await ids(two) == after | {later.id}
    server.client.flushall()
    after = {(await one.leave()).id for _ in range(5)}  # more changes than there were before
    assert await ids(two) == after


async def test_what_was_read_before_the_store_failed_is_listed(
    server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_records, "READ_AT_ONCE", 2)
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    left = {(await one.leave()).id for _ in range(6)}
    batch, asked = two.pool.connection.batch, itertools.count()

    def fails_midway(operation: str, fill: Any) -> Any:
        if next(asked) == 4:
            raise HandoffStoreUnavailable()
        return batch(operation, fill)

    with monkeypatch.context() as failing:
        failing.setattr(two.pool.connection, "batch", fails_midway)
        await ids(two)
    assert await ids(two) == left
