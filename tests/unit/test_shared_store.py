"""Handoffs of several machines over one real server: whole, final, within the budget, and never waited for long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.library_machines import becomes
from support.random_images import picture
from support.shared_index import index_errors
from support.shared_stores import BINARIES, ENGINE, Machine, StoreServer, machine, servers, store_server
from support.tcp_proxy import tcp_proxy

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.config.groups import HandoffSettings
from baton.engines.backend import EngineState
from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferReport, TransferRequest
from baton.errors import (
    HandoffImagesLost,
    HandoffNotFound,
    HandoffPending,
    HandoffPinsFull,
    HandoffStoreUnavailable,
    SettingsError,
)
from baton.images.image import PlacedImage
from baton.library import holdings as background
from baton.library import library as service
from baton.library.fetches import MEASURE_EVERY, RATES_KEPT
from baton.library.handoff import Handoff, HandoffState, new_id
from baton.library.library import Library
from baton.library.tiers import Here
from baton.relay.audit import Audits
from baton.relay.automatic import AutomaticHandoffs, SaveRule
from baton.relay.cost import LoadCost
from baton.relay.sources import Sources
from baton.relay.warm import Warming, warms_busy
from baton_kv.contract import Warmed
from baton_kv.stores.base import StoreError


@pytest.fixture(params=servers)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreServer]:
    with store_server(request.param, tmp_path) as running:
        yield running


def audits_of(machine: Machine) -> Audits:
    return Audits(HandoffSettings(), machine.handoffs, machine.metrics.audits)


async def gone(handoffs: Library, record: Handoff) -> bool:
    try:
        await handoffs.get(record.id, record.tenant)
    except HandoffNotFound:
        return True
    return False


async def test_kv_goes_to_another_machine_bit_for_bit(server: StoreServer, tmp_path: Path) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    first = await one.leave(blocks=600)
    found = await two.handoffs.get(first.id, "local")
    assert (found.state, list(found.tokens)) == (HandoffState.READY, list(first.tokens))
    assert not two.handoffs.is_here(found)
    await two.handoffs.fetch_here(found, ENGINE)
    assert two.read(found.key) == one.read(first.key)
    assert len(one.read(first.key)) > 2_000_000  # of several chunks
    assert await gone(two.handoffs, found.model_copy(update={"tenant": "another"}))


async def test_what_continues_another_needs_its_file_too_and_keeps_it(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    first = await one.leave(blocks=8)
    second = await one.leave(blocks=16, after=first)
    alone = one.pool.files.total()
    await one.handoffs.delete(first)
    found = await two.handoffs.get(second.id, "local")
    await two.handoffs.fetch_here(found, ENGINE)
    assert two.read(second.key) == one.read(second.key)
    assert two.read(second.key, 0) == one.read(second.key, 0)
    assert 0 < alone - one.pool.files.total() < 8 * 4096  # the record went, the file did not
    await two.handoffs.delete(found)
    assert one.pool.files.total() == 0
    assert not list(server.client.scan_iter("baton:f:*"))


async def test_a_deleted_handoff_is_deleted_everywhere(server: StoreServer, tmp_path: Path) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record = await one.leave()
    assert [each.id for each in (await two.handoffs.page("local", limit=9, after=None))[0]] == [record.id]
    await two.handoffs.delete(await two.handoffs.get(record.id, "local"))
    assert await gone(one.handoffs, record)
    assert await gone(two.handoffs, record)
    assert (await one.handoffs.page("local", limit=9, after=None))[0] == []


@pytest.mark.fault("C3")
async def test_a_server_at_the_limit_of_its_memory_is_read_and_freed(
    server: StoreServer, tmp_path: Path
) -> None:
    one = machine(tmp_path / "one", server.url)
    records = [await one.leave(), await one.leave(pin=True)]
    server.client.config_set("maxmemory", 1)
    two = machine(tmp_path / "two", server.url)  # its first exchange compares the secrets
    for record in records:
        found = await two.handoffs.get(record.id, "local")
        await two.handoffs.fetch_here(found, ENGINE)
        assert two.read(found.key) == one.read(record.key)
    assert not (await two.leave()).on_disk
    for record in records:
        await two.handoffs.delete(await two.handoffs.get(record.id, "local"))
        assert await gone(one.handoffs, record)
    assert not list(server.client.scan_iter("baton:f:*"))
    server.client.config_set("maxmemory", 0)
    assert index_errors(server.client) == []


async def test_a_change_never_brings_a_deleted_handoff_back(server: StoreServer, tmp_path: Path) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    for number in range(40):
        record = await one.leave()
        other = await two.handoffs.get(record.id, "local")
        await asyncio.gather(
            one.handoffs.change(record, {"label": f"label {number}"}),
            two.handoffs.delete(other),
            return_exceptions=True,
        )
        assert await gone(one.handoffs, record)
        assert await gone(two.handoffs, other)
    assert not list(server.client.scan_iter("baton:{i}:r:*"))


async def test_changes_of_two_machines_at_once_are_both_kept(server: StoreServer, tmp_path: Path) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record = await one.leave()
    other = await two.handoffs.get(record.id, "local")
    await asyncio.gather(
        one.handoffs.change(record, {"label": "mine"}), two.handoffs.change(other, {"ttl_s": 100})
    )
    for handoffs in (one.handoffs, two.handoffs):
        found = await handoffs.get(record.id, "local")
        assert (found.label, found.ttl_s) == ("mine", pytest.approx(100, abs=5))


async def test_a_request_waits_for_a_handoff_that_is_pending_on_another_machine(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record = one.handoffs.begin(ENGINE, "local")
    await one.quiet()
    with pytest.raises(HandoffPending):
        await Sources(two.handoffs, 0.2).one(record.id, ENGINE, "local")
    waiting = asyncio.create_task(Sources(two.handoffs, 10).one(record.id, ENGINE, "local"))
    one.entry(record.key)
    one.handoffs.end(record, TransferRequest(), range(64))
    found = await waiting
    assert (found.state, len(found.tokens), two.handoffs.is_here(found)) == (HandoffState.READY, 64, True)


async def test_a_pending_handoff_that_another_machine_deletes_is_not_saved(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record = one.handoffs.begin(ENGINE, "local")
    await one.quiet()
    await two.handoffs.delete(await two.handoffs.get(record.id, "local"))
    one.entry(record.key)
    one.handoffs.end(record, TransferRequest(), range(64))
    await one.quiet()
    assert await gone(one.handoffs, record)
    assert await gone(two.handoffs, record)


async def test_what_another_machine_changes_while_it_is_pending_stays(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record = one.handoffs.begin(ENGINE, "local")
    await one.quiet()
    pending = await two.handoffs.get(record.id, "local")
    await two.handoffs.change(pending, {"label": "theirs", "ttl_s": 100})
    seen = await one.handoffs.get(record.id, "local")  # before it is written whole
    assert (seen.label, one.handoffs.seconds_left(seen)) == ("theirs", pytest.approx(100, abs=5))
    one.entry(record.key)
    one.handoffs.end(record, TransferRequest(), range(64))
    await one.quiet()
    for handoffs in (one.handoffs, two.handoffs):
        found = await handoffs.get(record.id, "local")
        assert (found.state, found.label, len(found.tokens)) == (HandoffState.READY, "theirs", 64)
        assert handoffs.seconds_left(found) == pytest.approx(100, abs=5)


async def test_a_long_push_is_reported_as_pending(
    server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine(tmp_path / "one", server.url)
    record, pushed = one.handoffs.begin(ENGINE, "local"), threading.Event()
    await one.quiet()
    monkeypatch.setattr(Here, "share", lambda *_: pushed.wait(60))
    one.entry(record.key)
    one.handoffs.end(record, TransferRequest(), range(64))
    await one.handoffs.settled(record, 20)
    assert record.state is HandoffState.READY  # for requests of this machine
    assert one.handoffs.saving.announced() == [record.id]
    pushed.set()
    await one.quiet()
    assert one.handoffs.saving.announced() == []


async def test_a_gateway_that_missed_more_removals_than_are_remembered_keeps_what_is_there(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    kept, removed = await one.leave(), await one.leave()
    assert len((await two.handoffs.page("local", limit=9, after=None))[0]) == 2
    await one.handoffs.delete(removed)
    server.client.delete("baton:{i}:gone")
    server.client.set("baton:{i}:floor", server.client.get("baton:{i}:seq"))
    listed, _ = await two.handoffs.page("local", limit=9, after=None)
    assert [each.id for each in listed] == [kept.id]


async def test_a_failed_request_leaves_nothing_pending(server: StoreServer, tmp_path: Path) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record = one.handoffs.begin(ENGINE, "local")
    await one.quiet()
    one.handoffs.end(record, None)
    await one.quiet()
    assert await gone(two.handoffs, record)


async def test_the_budget_holds_over_machines_and_who_has_most_gives_way(
    server: StoreServer, tmp_path: Path
) -> None:
    budget = {"shared_budget": 4 * 1024 * 1024}
    one = machine(tmp_path / "one", server.url, **budget)
    two = machine(tmp_path / "two", server.url, **budget)
    small = await two.leave("small", blocks=50)
    left = []
    for number in range(20):
        left.append(await (one, two)[number % 2].leave("large", blocks=100))
        assert one.pool.files.total() <= 4 * 1024 * 1024
        used = sum(server.client.memory_usage(key) for key in server.client.scan_iter("baton:f:*"))
        assert used <= 1.2 * 4 * 1024 * 1024
    assert one.pool.files.sizes([small.key]) != [0]
    assert one.pool.files.sizes([left[0].key]) == [0]
    assert one.pool.files.sizes([left[-1].key]) != [0]


async def test_pins_hold_and_are_limited_over_machines(server: StoreServer, tmp_path: Path) -> None:
    budget = {"shared_budget": 4 * 1024 * 1024}
    one = machine(tmp_path / "one", server.url, **budget)
    two = machine(tmp_path / "two", server.url, **budget)
    pinned = await one.leave(blocks=300, pin=True)
    other = await two.leave(blocks=300)
    with pytest.raises(HandoffPinsFull):
        await two.handoffs.change(other, {"pin": True})
    for _ in range(20):
        await two.leave(blocks=100)
    assert one.pool.files.sizes([pinned.key, other.key]) == [pytest.approx(300 * 4096, rel=0.1), 0]


async def test_pins_of_the_shared_store_do_not_fill_a_smaller_machine(
    server: StoreServer, tmp_path: Path
) -> None:
    one = machine(tmp_path / "one", server.url, budget=2 * 1024 * 1024, shared_budget=64 * 1024 * 1024)
    pinned = [await one.leave(blocks=60, pin=True) for _ in range(10)]
    assert all(each.pin for each in pinned)
    assert sum(one.store.pinned().values()) <= 1024 * 1024
    for each in pinned:
        assert one.pool.files.pin(each.key, True, 0) == 1  # there it is


async def test_kv_that_is_on_its_machine_alone_is_pinned_within_its_budget(
    server: StoreServer, tmp_path: Path
) -> None:
    one = machine(tmp_path / "one", server.url, budget=2 * 1024 * 1024, shared_budget=1024 * 1024)
    left = [await one.leave(blocks=290) for _ in range(3)]  # too large for the shared store
    assert one.pool.files.sizes([each.key for each in left]) == [0, 0, 0]
    with pytest.raises(HandoffPinsFull):
        await one.handoffs.change(left[0], {"pin": True})
    assert not one.store.pinned()


async def test_an_automatic_handoff_of_another_machine_is_fetched_for_the_next_request(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    left = await one.leave(blocks=16, automatic=new_id(automatic=True))
    await two.handoffs.page("local", limit=1, after=None)  # it reads what is new
    automatic = AutomaticHandoffs(
        two.handoffs, LoadCost(), two.metrics.handoffs, HandoffSettings(), {}, SaveRule(64), audits_of(two)
    )
    prompt = [*range(256), 7, 8]
    assert automatic.find(ENGINE, "local", prompt) == (None, "not_here")
    await two.quiet()
    match, _ = automatic.find(ENGINE, "local", prompt)
    assert match is not None
    assert (match.record.id, match.tokens) == (left.id, 256)
    assert automatic.find(ENGINE, "another", prompt) == (None, "no_candidate")
    two.store.delete(left.key)
    one.pool.files.drop([left.key])
    assert automatic.find(ENGINE, "local", prompt) == (None, "not_here")
    await two.quiet()
    assert two.handoffs.index.known(left.id) is None  # it hides no other one


class Remembers(FakeEngine):
    """An engine that brings into memory what is in its machine's store."""

    here: Machine

    async def warm(self, key: str) -> Warmed:
        size = self.here.store.bytes_of(key)
        return Warmed(size, size, whole=bool(size), memory=1 << 30) if size else await super().warm(key)


def warming(machine: Machine) -> tuple[Warming, Remembers]:
    engine = Remembers("e", supports_handoffs=True, weights=ENGINE.weights, state=EngineState.READY)
    engine.here = machine
    places = FairQueue(QueueLimits(2, waiting=8), warms_busy)
    return Warming(machine.handoffs, lambda: [engine], HandoffSettings(), places), engine


@pytest.mark.fault("C26")
async def test_kv_of_another_machine_is_fetched_before_it_is_brought_into_memory(
    server: StoreServer, tmp_path: Path
) -> None:
    """Also where a request would compute, because that is faster."""
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    left = await one.leave(blocks=600)
    bringing, engine = warming(two)
    found = await two.handoffs.get(left.id, "local")
    two.handoffs.fetches._rates[two.handoffs.holdings.tier.source_of(found)].extend([1.0] * RATES_KEPT)
    engine.throughput.prefilled(1000, 0.001)
    assert not await two.handoffs.fetches.fetch_here(found, engine), "a request computes"
    told = await bringing.handoff(left.id, "local", lambda _engine: True)
    assert (told.state, [(row.engine, row.whole, row.reason) for row in told.data]) == (
        "done",
        [("e", True, None)],
    )
    assert told.data[0].bytes == len(one.read(left.key))
    with pytest.raises(HandoffNotFound):
        await bringing.handoff(left.id, "another", lambda _engine: True)
    await one.handoffs.delete(await one.handoffs.get(left.id, "local"))
    with pytest.raises(HandoffNotFound):
        await bringing.handoff(left.id, "local", lambda _engine: True)


@pytest.mark.fault("C26")
async def test_where_it_cannot_be_fetched_the_answer_says_so(server: StoreServer, tmp_path: Path) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    left = await one.leave(blocks=16)
    bringing, engine = warming(two)
    found = await two.handoffs.get(left.id, "local")
    one.pool.files.drop([left.key])
    told = await bringing.handoff(found.id, "local", lambda _engine: True)
    assert [(row.bytes, row.whole, row.reason) for row in told.data] == [(0, False, "kv_gone")]
    assert not engine.warmed or engine.warmed == [left.key]
    await two.quiet()


async def test_a_fetched_automatic_handoff_still_gives_way_to_others(
    server: StoreServer, tmp_path: Path
) -> None:
    budget = {"shared_budget": 4 * 1024 * 1024}
    one, two = (machine(tmp_path / each, server.url, **budget) for each in ("one", "two"))
    asked_for = await one.leave(blocks=300)
    automatic = await one.leave(blocks=300, automatic=new_id(automatic=True))
    await two.handoffs.page("local", limit=1, after=None)
    await two.handoffs.fetch_here(automatic, ENGINE)
    assert two.handoffs.is_here(automatic)
    await one.leave(blocks=600)
    first, second = one.pool.files.sizes([asked_for.key, automatic.key])
    assert (first > 0, second) == (True, 0)


async def test_what_was_continued_elsewhere_a_moment_ago_is_deleted_too(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record = await one.leave(blocks=8)
    found = await two.handoffs.get(record.id, "local")
    automatic = await one.leave(blocks=16, automatic=new_id(automatic=True))
    await two.handoffs.delete(found)
    assert one.storage.here.records.read(automatic.id) is None
    assert not list(server.client.scan_iter("baton:f:*"))


async def test_kv_that_one_machine_distrusts_is_used_on_none(server: StoreServer, tmp_path: Path) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    first = await one.leave(blocks=8)
    second = await one.leave(blocks=16, after=first)
    copies = [await two.handoffs.get(each.id, "local") for each in (first, second)]
    for each in copies:
        await two.handoffs.fetch_here(each, ENGINE)
        assert two.handoffs.is_here(each)
    await one.handoffs.distrust(first, None)  # an audit found another answer
    for each in copies:
        again = await two.handoffs.get(each.id, "local")
        await two.handoffs.fetch_here(again, ENGINE)
        assert not two.handoffs.is_here(again)


async def test_images_go_along_once_for_all_and_are_verified(server: StoreServer, tmp_path: Path) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    pictures = [picture(1), picture(2), picture(1)]
    placed = [PlacedImage(each, 10 * index, 4, (7,)) for index, each in enumerate(pictures)]
    records = []
    for _ in range(2):
        record = one.handoffs.begin(ENGINE, "local")
        transfer = TransferRequest(images=placed, report=TransferReport(saves=False))
        one.handoffs.end(record, transfer, range(50))
        await one.quiet()
        records.append(record)
    first, second = [await two.handoffs.get(record.id, "local") for record in records]
    assert await two.handoffs.images(first) == placed
    assert len(list(server.client.scan_iter("baton:f:*"))) == 2
    await one.handoffs.delete(records[0])
    assert await two.handoffs.images(second) == placed
    (key, *_) = server.client.scan_iter("baton:f:*")
    chunk = server.client.hget(key, "0")
    server.client.hset(key, "0", chunk[:-1] + bytes([chunk[-1] ^ 1]))
    with pytest.raises(HandoffImagesLost):
        await two.handoffs.images(second)
    await two.handoffs.delete(second)
    assert not list(server.client.scan_iter("baton:f:*"))


async def test_unknown_is_not_said_while_the_store_is_down(tmp_path: Path) -> None:
    with store_server("valkey", tmp_path) as server:
        one = machine(tmp_path / "one", server.url)
        record = await one.leave()
        server.kill()
        with pytest.raises(HandoffStoreUnavailable):
            await one.handoffs.get("x" * 32, "local")
        assert await one.handoffs.get(record.id, "local") is record
        assert one.handoffs.is_here(record)
        with pytest.raises(HandoffStoreUnavailable):
            await one.handoffs.delete(record)
        later = await one.leave()  # in this gateway alone
        assert await one.handoffs.get(later.id, "local") is later


@pytest.mark.fault("C2")
async def test_a_store_that_hangs_is_left_alone_after_three_deadlines(tmp_path: Path) -> None:
    with store_server("valkey", tmp_path) as server:
        one = machine(tmp_path / "one", server.url, shared_timeout_s=0.5)
        await one.leave()
        with server.stopped():
            for _ in range(3):
                began = time.monotonic()
                with pytest.raises(HandoffStoreUnavailable):
                    await one.handoffs.get("x" * 32, "local")
                assert time.monotonic() - began < 20  # not for as long as it is stopped
            began = time.monotonic()
            for _ in range(100):
                with pytest.raises(HandoffStoreUnavailable):
                    await one.handoffs.get("x" * 32, "local")
            assert time.monotonic() - began < 100 * 0.5 / 2  # half of a hundred deadlines


async def test_a_store_that_was_flushed_costs_a_prefill_and_no_more(tmp_path: Path) -> None:
    with store_server("valkey", tmp_path) as server:
        one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
        record = await one.leave()
        found = await two.handoffs.get(record.id, "local")
        for key in server.client.scan_iter("baton:f:*"):
            server.client.delete(key)
        await two.handoffs.fetch_here(found, ENGINE)
        assert not two.handoffs.is_here(found)
        assert await two.handoffs.get(record.id, "local") is found
        server.client.flushall()
        assert await gone(two.handoffs, found)


@pytest.mark.fault("C5")
async def test_a_slow_store_is_left_for_computing_and_taken_up_again_once_it_is_fast(tmp_path: Path) -> None:
    with (
        store_server("valkey", tmp_path) as server,
        tcp_proxy(urlsplit(server.url).port or 0) as proxy,
    ):
        slow = f"valkey://127.0.0.1:{proxy.port}/0"
        one = machine(tmp_path / "one", server.url)
        two = machine(tmp_path / "two", slow, shared_timeout_s=5)
        engine = FakeEngine("a", supports_handoffs=True)
        engine.throughput.prefilled(1000, 0.1)
        left = [await one.leave(blocks=600) for _ in range(2 * MEASURE_EVERY + 1 + RATES_KEPT)]

        async def brought(record: Handoff) -> bool:
            found = await two.handoffs.get(record.id, "local")
            vars(found)["tokens"] = found.tokens[:1000]  # as long to compute as the engine was measured
            await two.handoffs.fetch_here(found, engine)
            return two.handoffs.is_here(found)

        proxy.delay_s = 0.1
        others = left[RATES_KEPT:]
        assert all([await brought(each) for each in left[:RATES_KEPT]])  # and the rate is measured
        assert not any([await brought(each) for each in others[: MEASURE_EVERY - 1]])
        proxy.delay_s = 0.0
        await brought(others[MEASURE_EVERY - 1])  # beside it, KV is fetched, and measured
        for _ in range(20):
            others = [each for each in others if not two.handoffs.is_here(each)]
            if await brought(others[-1]):
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("it was never fetched again")


@pytest.mark.fault("C5")
async def test_a_fetch_that_was_cut_off_is_not_waited_for_again_where_computing_is_faster(
    tmp_path: Path,
) -> None:
    with (
        store_server("valkey", tmp_path) as server,
        tcp_proxy(urlsplit(server.url).port or 0) as proxy,
    ):
        slow = f"valkey://127.0.0.1:{proxy.port}/0"
        one = machine(tmp_path / "one", server.url)
        two = machine(tmp_path / "two", slow, shared_timeout_s=5, shared_fetch_s=0.5)
        engine = FakeEngine("a", supports_handoffs=True)
        engine.throughput.prefilled(1000, 0.1)
        waited = []
        for record in [await one.leave(blocks=1200) for _ in range(2)]:
            found = await two.handoffs.get(record.id, "local")
            vars(found)["tokens"] = found.tokens[:1000]  # as long to compute as the engine was measured
            proxy.delay_s = 0.02
            began = time.monotonic()
            await two.handoffs.fetch_here(found, engine)
            waited.append(time.monotonic() - began)
            assert not two.handoffs.is_here(found)
            while running := list(two.handoffs.fetches.running.values()):
                await asyncio.wait(running)  # it is cut off with its next chunk, and its rate known then
            proxy.delay_s = 0.0
        assert waited[0] > 0.45
        assert waited[1] < 0.4


@pytest.mark.fault("C5")
@pytest.mark.parametrize(
    ("bytes_per_s", "prefill_s", "loads", "fetched"),
    [(1e9, 1.0, 1, True), (1e9, 1.0, 2, False), (1e3, 3600.0, 0, False)],
)
async def test_one_slow_load_decides_nothing_and_what_would_be_cut_off_is_not_waited_for(
    bytes_per_s: float, prefill_s: float, loads: int, fetched: bool, server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    found = await two.handoffs.get((await one.leave(blocks=600)).id, "local")
    source = two.handoffs.holdings.tier.source_of(found)
    two.handoffs.fetches._rates[source].extend([bytes_per_s] * RATES_KEPT)
    engine = FakeEngine("a", supports_handoffs=True)
    engine.throughput.prefilled(len(found.tokens), prefill_s)
    for _ in range(loads):
        engine.throughput.loaded(found.bytes, 5.0)
    assert await two.handoffs.fetches.fetch_here(found, engine) is fetched
    assert (two.handoffs.skipped_fetch_s(found) is None) is fetched


@pytest.mark.fault("E19")
@pytest.mark.parametrize(
    ("names", "blocks", "asked"),
    [
        (1, 4, ["record", "look", "look"]),
        (1, 600, ["record", "look", "look", "fetch", "fetch"]),  # of three chunks, the first with its head
        (2, 4, ["record"] * 2 + ["look"] * 4 + ["record"] * 2),  # each beside the other's
    ],
)
async def test_what_a_request_asks_the_store_before_it_begins(
    names: int, blocks: int, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record once, its files' names, and their bytes; and again whether several are all still there."""
    with store_server("valkey", tmp_path) as server:
        one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
        ids = [(await one.leave(blocks=blocks)).id for _ in range(names)]
        ended = two.exchanges(monkeypatch)
        found = await Sources(two.handoffs, wait_s=5).all(ids, ENGINE, "local")
        assert ended == asked
        assert all(two.read(each.key) == one.read(each.key) for each in found)
        ended.clear()
        await Sources(two.handoffs, wait_s=5).all(ids, ENGINE, "local")
        assert set(ended) == {"record"}  # its KV is here


async def test_a_damaged_chunk_is_never_put_into_a_store(tmp_path: Path) -> None:
    with store_server("valkey", tmp_path) as server:
        one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
        record = await one.leave(blocks=600)
        server.client.hset(one.pool.connection.file_key(record.key), "1", b"short")
        await two.handoffs.fetch_here(await two.handoffs.get(record.id, "local"), ENGINE)
        assert not two.store.exists(record.key)
        assert not list((tmp_path / "two/store/writing").iterdir())


@pytest.mark.parametrize("field", ["n", "c"])
@pytest.mark.parametrize("value", [b"many", b"\xff", b"-1", b"0", b""])
async def test_what_is_no_file_is_computed(field: str, value: bytes, tmp_path: Path) -> None:
    with store_server("valkey", tmp_path) as server:
        one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
        record = await one.leave()
        found = await two.handoffs.get(record.id, "local")
        server.client.hset(one.pool.connection.file_key(record.key), field, value)
        with pytest.raises(StoreError):
            two.storage.fetch(found, 5)
        server.client.hset("baton:{i}:entry", record.key, b"\xff\xfe")
        with pytest.raises(StoreError):
            two.storage.fetch(found, 5)
        await two.handoffs.fetch_here(found, ENGINE)
        assert not two.handoffs.is_here(found)


@pytest.mark.fault("C8")
def test_gateways_with_another_secret_are_refused(tmp_path: Path) -> None:
    with store_server("valkey", tmp_path) as server:
        machine(tmp_path / "one", server.url)
        with pytest.raises(SettingsError, match="another secret"):
            machine(tmp_path / "two", server.url, secret="another secret, which is as long as the other")
        with pytest.raises(SettingsError, match="at least 32"):
            machine(tmp_path / "three", server.url, secret="short")
        machine(
            tmp_path / "four", server.url, shared_pool="other", secret="another secret, as long as the other"
        )


@pytest.mark.fault("C8")
def test_a_store_with_a_password_refuses_a_wrong_one(tmp_path: Path) -> None:
    with store_server("valkey", tmp_path, "--requirepass", "right") as server:
        (tmp_path / "password").write_text("wrong\n")
        with pytest.raises(SettingsError, match="refuses"):
            machine(tmp_path / "one", server.url, shared_password_file=tmp_path / "password")
        (tmp_path / "password").write_text("right\n")
        machine(tmp_path / "two", server.url, shared_password_file=tmp_path / "password")


async def test_a_gateway_starts_without_the_store_and_uses_it_once_it_is_there(tmp_path: Path) -> None:
    from support.gateways import free_port

    port = free_port()
    one = machine(tmp_path / "one", f"valkey://127.0.0.1:{port}/0")
    alone = await one.leave()
    assert not alone.on_disk
    with store_server("valkey", tmp_path, port=port) as server:
        one.pool.connection.breaker.resting_until = 0.0
        record = await one.leave()
        two = machine(tmp_path / "two", server.url)
        assert not await gone(two.handoffs, record)


@pytest.mark.fault("C7")
async def test_gateways_whose_clocks_differ_agree_on_the_end_of_a_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_server("valkey", tmp_path) as server:
        one = machine(tmp_path / "one", server.url)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 600)
        two = machine(tmp_path / "two", server.url)
        two.handoffs.holdings.wall = lambda: real() + 600
        record = await two.leave(ttl_s=300)
        monkeypatch.undo()
        found = await one.handoffs.get(record.id, "local")
        assert one.handoffs.seconds_left(found) == pytest.approx(300, abs=10)


async def test_a_clock_that_is_set_while_the_gateway_runs_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_server("valkey", tmp_path) as server:
        one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
        real, monotonic = time.time, time.monotonic
        monkeypatch.setattr(time, "time", lambda: real() - 600)
        two.handoffs.holdings.wall = time.time
        two.pool.connection._clock = lambda: monotonic() + 61  # a minute later
        record = await two.leave(ttl_s=300)
        monkeypatch.undo()
        found = await one.handoffs.get(record.id, "local")
        assert one.handoffs.seconds_left(found) == pytest.approx(300, abs=10)


def test_a_server_is_there_for_most_of_these_tests() -> None:
    assert BINARIES["valkey"]


async def test_a_gateway_that_ends_keeps_what_it_could_not_push(tmp_path: Path) -> None:
    with store_server("valkey", tmp_path) as server:
        one = machine(tmp_path / "one", server.url)
        one.pool.files.close()
        record = await one.leave()
        assert one.handoffs.is_here(record)
        assert not list(server.client.scan_iter("baton:f:*"))


async def test_pushes_leave_threads_for_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_server("valkey", tmp_path) as server:
        one, over = machine(tmp_path / "one", server.url), threading.Event()
        monkeypatch.setattr(Here, "share", lambda *_: over.wait(60))
        for _ in range(50):
            record = one.handoffs.begin(ENGINE, "local")
            one.entry(record.key)
            one.handoffs.end(record, TransferRequest(), range(64))
        try:
            await becomes(lambda: len(one.handoffs.saving._sharing) == 50)
            began = time.monotonic()
            await asyncio.to_thread(one.handoffs.is_here, record)
            assert time.monotonic() - began < 20
        finally:
            over.set()
        await one.quiet()


async def test_no_more_than_so_many_pushes_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_server("valkey", tmp_path) as server:
        monkeypatch.setattr(background, "PUSHES", 1)
        monkeypatch.setattr(background, "MAX_PUSHES", 1)
        one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
        over = threading.Event()
        monkeypatch.setattr(Here, "share", lambda *_: over.wait(60))
        records = []
        for _ in range(3):
            records.append(one.handoffs.begin(ENGINE, "local"))
            one.entry(records[-1].key)
            one.handoffs.end(records[-1], TransferRequest(), range(64))
        await becomes(lambda: any(each.on_disk for each in records))
        (written,) = (each for each in records if each.on_disk)
        assert (await two.handoffs.get(written.id, "local")).state is HandoffState.READY
        over.set()
        await one.quiet()


async def test_a_gateway_that_ends_while_it_pushes_leaves_the_handoff_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_server("valkey", tmp_path) as server:
        one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
        over = threading.Event()
        monkeypatch.setattr(Here, "share", lambda *_: over.wait(60))
        monkeypatch.setattr(service, "CLOSE_WITHIN_S", 0.5)
        async with one.handoffs.running(), one.handoffs.settling():
            record = one.handoffs.begin(ENGINE, "local")
            one.entry(record.key)
            one.handoffs.end(record, TransferRequest(), range(64))
            await one.handoffs.settled(record, 20)
        found = await two.handoffs.get(record.id, "local")
        assert (found.state, len(found.tokens)) == (HandoffState.READY, 64)
        over.set()


async def test_images_that_are_pushed_slowly_hold_up_no_other_handoff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_server("valkey", tmp_path) as server:
        one, over = machine(tmp_path / "one", server.url), threading.Event()
        monkeypatch.setattr(Here, "save_images", lambda *_: over.wait(60))
        shown = picture(1)
        record = one.handoffs.begin(ENGINE, "local")
        placed = PlacedImage(shown, 0, 4, (7,))
        one.handoffs.end(
            record, TransferRequest(images=[placed], report=TransferReport(saves=False)), range(50)
        )
        try:
            await asyncio.sleep(0.1)
            other = one.handoffs.begin(ENGINE, "local")
            one.entry(other.key)
            one.handoffs.end(other, TransferRequest(), range(64))
            await becomes(lambda: other.on_disk)
        finally:
            over.set()
        await one.quiet()
