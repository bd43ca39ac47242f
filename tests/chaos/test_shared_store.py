"""A shared store that is killed, stopped, full, flushed, slow or out of reach: never other KV, and never for long."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.history_checker import run_workers, violations
from support.paused_process import halt
from support.shared_fuzz import survive
from support.shared_history import BUDGET, connect
from support.shared_index import index_errors
from support.shared_stores import ENGINE, Machine, StoreServer, machine, servers, store_server
from support.tcp_proxy import TcpProxy, tcp_proxy

from baton.errors import BatonError, HandoffNotFound, HandoffPinsFull, HandoffStoreUnavailable
from baton.library.handoff import Handoff, HandoffState, new_id
from baton.library.holdings import THREADS
from baton.relay.sources import Sources
from baton_kv.stores.base import EntryMissing

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600), pytest.mark.parametrize("name", servers)]
MIB = 1024 * 1024
BLOCKS = 600
"""Blocks of a context: two MiB and a half, so of three chunks."""
KILLS = 24
DEADLINE_S, FETCH_S = 0.5, 2.0
KEPT = ("--appendonly", "yes", "--appendfsync", "always")
"""What the server has answered outlives it."""


@contextlib.contextmanager
def behind_proxy(name: str, folder: Path, *options: str) -> Iterator[tuple[StoreServer, TcpProxy, str]]:
    """A server, a proxy before it, and the proxy's address."""
    with store_server(name, folder, *options) as server, tcp_proxy(port_of(server)) as proxy:
        yield server, proxy, f"valkey://127.0.0.1:{proxy.port}/0"


def port_of(server: StoreServer) -> int:
    return urlsplit(server.url).port or 0


async def looked_up(machine: Machine, record: Handoff) -> Handoff | str:
    """Return a handoff as a gateway finds it, else the name of the error."""
    try:
        found = await machine.handoffs.get(record.id, record.tenant)
        await machine.handoffs.fetch_here(found, ENGINE)
    except BatonError as error:
        return type(error).__name__
    return found


def is_whole(machine: Machine, record: Handoff, right: bytes) -> bool:
    """Whether what an engine of a machine would load is right; nothing is right too."""
    return not machine.handoffs.is_here(record) or machine.read(record.key) == right


async def back(machine: Machine) -> Handoff:
    """Save handoffs until one reaches the store: the breaker lets somebody try after a while, which is over now."""
    deadline = time.monotonic() + 20
    while True:
        machine.pool.connection.breaker.resting_until = 0.0
        record = await machine.leave()
        if record.on_disk:
            return record
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


@pytest.mark.fault("C1")
@pytest.mark.parametrize("work", ["push", "fetch"])
async def test_a_store_that_is_killed_anywhere_leaves_no_half_entry(
    name: str, work: str, tmp_path: Path
) -> None:
    """Kill it after every so many bytes of a push or a fetch, scripts among them, and start it again."""
    outcomes: Counter[str] = Counter()
    with store_server(name, tmp_path, *KEPT) as server:
        port = port_of(server)
        one = machine(tmp_path / "one", server.url, shared_timeout_s=DEADLINE_S)
        ready = await one.leave(blocks=BLOCKS)
        right, size = one.read(ready.key), len(one.read(ready.key))
    for number in range(KILLS):
        with store_server(name, tmp_path, *KEPT, port=port) as server, tcp_proxy(port) as proxy:
            settings = {"shared_timeout_s": DEADLINE_S, "shared_fetch_s": FETCH_S}
            two = machine(tmp_path / f"two-{number}", f"valkey://127.0.0.1:{proxy.port}/0", **settings)
            share = (number / (KILLS - 3)) ** 3  # most of them among the first bytes, where the scripts are
            proxy.once("sent" if work == "push" else "received", int(share * size), server.kill)
            began = time.monotonic()
            if work == "push":
                saved = await two.leave(blocks=BLOCKS)
                outcomes["shared" if saved.on_disk else "here alone"] += 1
                assert two.handoffs.is_here(saved)
            else:
                found = await looked_up(two, ready)
                outcomes[found if isinstance(found, str) else str(two.handoffs.is_here(found))] += 1
                assert is_whole(two, ready, right)
            assert time.monotonic() - began < FETCH_S + 4 * DEADLINE_S
            two.storage.close()
        with store_server(name, tmp_path, *KEPT, port=port) as server:
            assert index_errors(server.client) == []
            three = machine(tmp_path / f"three-{number}", server.url, shared_timeout_s=5)
            found = await looked_up(three, ready)
            assert isinstance(found, Handoff)
            assert is_whole(three, found, right)
            three.storage.close()
    print(f"\nC1 {name} {work}: {KILLS} kills: {dict(outcomes)}")
    assert len(outcomes) > 1  # some were killed within it


@pytest.mark.fault("C2")
@pytest.mark.parametrize("work", ["push", "fetch"])
async def test_a_store_that_stops_costs_no_more_than_its_deadlines(
    name: str, work: str, tmp_path: Path
) -> None:
    with behind_proxy(name, tmp_path) as (server, proxy, url):
        settings = {"shared_timeout_s": DEADLINE_S, "shared_fetch_s": FETCH_S}
        one = machine(tmp_path / "one", server.url)
        ready = await one.leave(blocks=BLOCKS)
        right, longest = one.read(ready.key), 0.0
        for number in range(KILLS // 2):
            two = machine(tmp_path / f"two-{number}", url, **settings)
            share = (number / (KILLS // 2)) ** 3
            proxy.once(
                "sent" if work == "push" else "received",
                int(share * len(right)),
                lambda: halt(server.process.pid),
            )
            began = time.monotonic()
            if work == "push":
                await two.leave(blocks=BLOCKS)
            else:
                await looked_up(two, ready)
            longest = max(longest, time.monotonic() - began)
            assert is_whole(two, ready, right)
            server.process.send_signal(signal.SIGCONT)
            await back(two)
            assert index_errors(server.client) == []
            two.storage.close()
    print(f"\nC2 {name} {work}: longest {longest:.2f} s")
    assert longest < FETCH_S + 4 * DEADLINE_S


@pytest.mark.fault("C3")
async def test_a_full_server_refuses_and_its_index_stays_right(name: str, tmp_path: Path) -> None:
    with store_server(name, tmp_path, "--maxmemory", "12mb") as server:
        one, two = (machine(tmp_path / each, server.url, shared_timeout_s=5) for each in ("one", "two"))
        left = [await one.leave(blocks=BLOCKS) for _ in range(12)]
        shared = [record for record in left if record.on_disk]
        assert len(shared) > 0
        assert index_errors(server.client) == []
        for record in left:
            found = await looked_up(two, record)
            assert found == "HandoffNotFound" or is_whole(two, record, one.read(record.key))
        for record in shared:
            await one.handoffs.delete(record)  # what frees memory is never refused
        assert (await one.leave(blocks=BLOCKS)).on_disk
        assert index_errors(server.client) == []


@pytest.mark.fault("C4")
async def test_a_store_that_is_flushed_under_load_loses_and_garbles_nothing_else(
    name: str, tmp_path: Path
) -> None:
    with store_server(name, tmp_path) as server:
        one, two = (machine(tmp_path / each, server.url, shared_timeout_s=5) for each in ("one", "two"))
        over = threading.Event()

        def flush() -> None:
            while not over.wait(0.05):
                server.client.flushall()

        flusher, seen = threading.Thread(target=flush), Counter[str]()
        flusher.start()
        try:
            for _ in range(60):
                record = await one.leave(blocks=BLOCKS)
                found = await looked_up(two, record)
                seen[found if isinstance(found, str) else "found"] += 1
                with contextlib.suppress(EntryMissing):  # it was flushed before it was looked up
                    assert is_whole(two, record, one.read(record.key))
        finally:
            over.set()
            flusher.join()
        server.client.flushall()
        assert (await one.leave()).on_disk
        assert index_errors(server.client) == []
    print(f"\nC4 {name}: {dict(seen)}")
    assert set(seen) <= {"found", "HandoffNotFound"}


@pytest.mark.fault("C5")
async def test_a_slow_store_is_waited_for_no_longer_than_was_set(name: str, tmp_path: Path) -> None:
    with behind_proxy(name, tmp_path) as (server, proxy, url):
        one = machine(tmp_path / "one", server.url)
        ready = await one.leave(blocks=4 * BLOCKS)
        two = machine(tmp_path / "two", url, shared_timeout_s=5, shared_fetch_s=1)
        proxy.delay_s = 0.05  # for each 64 KiB: a fetch of 10 MiB would take eight seconds
        found = await two.handoffs.get(ready.id, "local")
        began = time.monotonic()
        await two.handoffs.fetch_here(found, ENGINE)
        waited = time.monotonic() - began
        assert not two.handoffs.is_here(found)
        assert waited < 1 + 0.5
        proxy.delay_s = 0.0
        while two.handoffs.fetches.running:
            await asyncio.wait(list(two.handoffs.fetches.running.values()))
        assert not list((tmp_path / "two" / "store").rglob("*.tmp*"))


@pytest.mark.fault("C6")
async def test_a_gateway_that_is_cut_off_catches_up_and_brings_nothing_back(
    name: str, tmp_path: Path
) -> None:
    with behind_proxy(name, tmp_path) as (server, proxy, url):
        one = machine(tmp_path / "one", server.url, shared_timeout_s=DEADLINE_S)
        cut = machine(tmp_path / "cut", url, shared_timeout_s=DEADLINE_S)
        left = [await one.leave() for _ in range(20)]
        assert len((await cut.handoffs.page("local", limit=99, after=None))[0]) == 20
        proxy.silent = True
        for record in left[:10]:
            await one.handoffs.delete(record)
        for record in left[:5]:  # what is cut off may not change what it cannot see
            with pytest.raises(HandoffStoreUnavailable):
                await cut.handoffs.change(record, {"label": "from the island"})
        island = await cut.leave()
        assert (island.on_disk, cut.handoffs.is_here(island)) == (False, True)
        proxy.silent = False
        await back(cut)
        found = {each.id for each in (await cut.handoffs.page("local", limit=99, after=None))[0]}
        assert not found & {record.id for record in left[:10]}
        assert found >= {record.id for record in left[10:]}
        for record in left[:10]:
            assert await looked_up(cut, record) == "HandoffNotFound"
        assert not any(
            "from the island" in str(server.client.hgetall(key)) for key in server.client.scan_iter("*r:*")
        )
        assert index_errors(server.client) == []


@pytest.mark.fault("C9")
async def test_of_a_thousand_races_none_brings_a_deleted_handoff_back(name: str, tmp_path: Path) -> None:
    with store_server(name, tmp_path) as server:
        one, two = (machine(tmp_path / each, server.url, shared_timeout_s=5) for each in ("one", "two"))
        won: Counter[str] = Counter()
        for number in range(1000):
            record = await one.leave()
            other = await two.handoffs.get(record.id, "local")
            changed, _ = await asyncio.gather(
                one.handoffs.change(record, {"label": f"label {number}", "pin": number % 2 == 0}),
                two.handoffs.delete(other),
                return_exceptions=True,
            )
            won["refused" if isinstance(changed, HandoffNotFound) else "made"] += 1
            assert await looked_up(one, record) == await looked_up(two, record) == "HandoffNotFound"
        assert not list(server.client.scan_iter("baton:{i}:r:*"))
        assert index_errors(server.client) == []
    print(f"\nC9 {name}: 0 of 1000 came back; changes {dict(won)}")
    assert len(won) == 2  # both orders happened


@pytest.mark.fault("C10")
async def test_budget_and_pins_hold_at_every_moment_over_four_gateways(name: str, tmp_path: Path) -> None:
    budget = 20 * MIB
    with store_server(name, tmp_path) as server, ExitStack() as stack:
        machines = [
            machine(tmp_path / str(number), server.url, shared_budget=budget, shared_timeout_s=5)
            for number in range(4)
        ]
        over, most = threading.Event(), {"held": 0, "pinned": 0}

        def watch() -> None:
            while not over.is_set():
                for field in most:
                    held = sum(map(int, server.client.hvals("baton:{i}:" + field)))
                    most[field] = max(most[field], held)

        watcher = threading.Thread(target=watch)
        watcher.start()
        stack.callback(watcher.join)
        stack.callback(over.set)

        async def fill(number: int) -> Counter[str]:
            seen: Counter[str] = Counter()
            for turn in range(15):
                record = await machines[number].leave(f"tenant-{number % 3}", blocks=BLOCKS)
                seen["shared" if record.on_disk else "refused"] += 1
                try:
                    if turn % 3 == 0:
                        await machines[number].handoffs.change(record, {"pin": True})
                        seen["pinned"] += 1
                except (HandoffPinsFull, HandoffNotFound) as error:
                    seen[type(error).__name__] += 1
            return seen

        told = sum(await asyncio.gather(*(fill(number) for number in range(4))), Counter[str]())
        assert index_errors(server.client) == []
        rows = server.client.hgetall("baton:{i}:size")
        data = sum(server.client.memory_usage(key) or 0 for key in server.client.scan_iter("baton:f:*"))
    print(f"\nC10 {name}: most {most}, {dict(told)}; {len(rows)} files, {data / MIB:.1f} MiB in the server")
    assert most["held"] <= budget
    assert most["pinned"] <= budget / 2
    assert data < 1.3 * budget  # evicted while it was written: removed all the same


@pytest.mark.fault("B10")
@pytest.mark.fault("C11")
@pytest.mark.parametrize("kind", ["entries", "records"])
def test_what_four_clients_see_is_what_was_put(name: str, kind: str, tmp_path: Path) -> None:
    with store_server(name, tmp_path) as server:
        command = [sys.executable, "-m", "support.shared_history", kind, server.url]
        events, kills = run_workers(command, tmp_path / "logs", 4, 20.0)
        hits = sum(each.op == "get" and each.value is not None for each in events)
        found = violations(events, deleted_for_good=True)
        print(
            f"\nC11 {name} {kind}: {len(events)} operations, {hits} hits, {kills} kills, {len(found)} violations"
        )
        assert min(hits, kills, sum(each.op == "delete" for each in events)) > 0
        assert found == []
        assert index_errors(server.client) == []
        assert connect(server.url)[1].total() <= BUDGET


@pytest.mark.fault("C12")
async def test_a_gateway_that_dies_while_it_saves_leaves_nothing_pending(name: str, tmp_path: Path) -> None:
    with store_server(name, tmp_path) as server:
        one, two = (machine(tmp_path / each, server.url) for each in ("one", "two"))
        record = one.handoffs.begin(ENGINE, "local")
        await one.quiet()
        found = await two.handoffs.get(record.id, "local")
        assert found.state is HandoffState.PENDING
        deadline = time.monotonic() + 30
        while await looked_up(two, record) != "HandoffNotFound":  # nobody reports that it is still pending
            assert time.monotonic() < deadline
            await asyncio.sleep(0.5)
        assert index_errors(server.client) == []


@pytest.mark.fault("C25")
async def test_ten_thousand_bad_values_hold_no_gateway_up(name: str, tmp_path: Path) -> None:
    with store_server(name, tmp_path) as running:
        await survive(running, tmp_path, 10_000, seed=2)


async def continued(machine: Machine, record: Handoff) -> float:
    """Do what a request with `from` does before it is given to an engine; return the seconds."""
    began = time.monotonic()
    found = await Sources(machine.handoffs, wait_s=5).one(record.id, ENGINE, record.tenant)
    took = time.monotonic() - began
    assert machine.handoffs.is_here(found)
    return took


@pytest.mark.fault("E19")
async def test_a_flood_over_a_slow_store_holds_up_no_other_tenant(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that loads KV asks three times, one after the other; each turn waits for one of the flood's."""
    with behind_proxy(name, tmp_path) as (server, proxy, slow):
        one = machine(tmp_path / "one", server.url)
        theirs = [await one.leave("another") for _ in range(2)]
        alone, flooded = machine(tmp_path / "alone", slow), machine(tmp_path / "flooded", slow)
        proxy.delay_s = 0.3
        ended = alone.exchanges(monkeypatch)
        seconds = await continued(alone, theirs[0])
        assert ended == ["record", "look", "look"]

        ended = flooded.exchanges(monkeypatch)
        flood = [
            asyncio.create_task(
                looked_up(flooded, theirs[0].model_copy(update={"id": new_id(), "tenant": "flood"}))
            )
            for _ in range(120)
        ]
        while not ended:  # noqa: ASYNC110  # all threads are busy; one of them adds it
            await asyncio.sleep(0.01)
        before = len(ended)
        while_flooded = await continued(flooded, theirs[1])
        passed = len(ended) - before - 3
        print(
            f"E19 {name}: with its KV {while_flooded:.2f} s, alone {seconds:.2f} s; {passed} of the flood's exchanges"
        )
        proxy.delay_s = 0.0
        assert Counter(await asyncio.gather(*flood)) == {"HandoffNotFound": 120}
        assert passed <= THREADS * (
            3 + 2
        )  # beside its own three, and before each of its two turns of these threads
