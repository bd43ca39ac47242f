"""What one tenant's requests wait for in stored handoffs holds up no other tenant: each pool is shared by turns."""

from __future__ import annotations

import ast
import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from baton.admission.fair_threads import in_own_thread
from baton.config.groups import HandoffSettings
from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferReport, TransferRequest
from baton.errors import GatewayOverloaded, HandoffNotFound
from baton.library.handoff import Handoff, HandoffState, new_id
from baton.library.here.images import ImageStore
from baton.library.here.records import News, RecordFolder
from baton.library.holdings import FETCHES, PUSHES, THREADS, HandoffThreads
from baton.library.library import Library
from baton.library.tiers import Here, nowhere
from baton.telemetry.metrics import GatewayMetrics
from baton_kv.stores.file import FileStore

pytestmark = [pytest.mark.fault("E19"), pytest.mark.timeout(60)]
FLOOD = 200
ENGINE = FakeEngine("a", supports_handoffs=True)


@dataclass(frozen=True)
class SlowStorage(Here):
    """A shared store that does not answer what one tenant asks, until it is let go."""

    go: threading.Event = field(default_factory=threading.Event)
    calls: Counter[str] = field(default_factory=Counter)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def _wait(self, name: str, tenant: str) -> None:
        self.calls[name] += 1
        self.begun.release()
        if tenant == "flood":
            self.go.wait(50)

    def find(self, _id: str, tenant: str) -> Handoff | None:
        self._wait("find", tenant)
        return None

    def is_here(self, _record: Handoff) -> bool:
        return False

    def fetch(self, record: Handoff, _within_s: float) -> int:
        self._wait("fetch", record.tenant)
        return 1

    def share(self, record: Handoff) -> None:
        self._wait("share", record.tenant)

    def refresh(self) -> News:
        self._wait("refresh", "flood")
        return News()


def slow_handoffs(wait_s: float | None = None) -> tuple[SlowStorage, Library]:
    records = RecordFolder(None)
    storage = SlowStorage(nowhere().store, records, ImageStore(None), cast("Any", object()))
    metrics = GatewayMetrics()
    threads = HandoffThreads(wait_s, metrics.queues)
    library = Library(HandoffSettings(), storage, metrics.handoffs, threads=threads)
    records.refresh = storage.refresh  # type: ignore[method-assign]  # from now on
    return storage, library


async def until(storage: SlowStorage, calls: int) -> None:
    """Wait until so many calls of the flood are under way."""
    for _ in range(calls):
        await in_own_thread(storage.begun.acquire, timeout=20)


def flood(work: Callable[[], Any]) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(work()) for _ in range(FLOOD)]


async def end(storage: SlowStorage, tasks: list[asyncio.Task[Any]]) -> list[Any]:
    storage.go.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_look_ups_of_one_tenant_hold_up_no_other() -> None:
    storage, handoffs = slow_handoffs()
    tasks = flood(lambda: handoffs.get(new_id(), "flood"))
    await until(storage, THREADS)
    for tenant in ("another", "a third", "another"):
        with pytest.raises(HandoffNotFound):
            await asyncio.wait_for(handoffs.get(new_id(), tenant), 20)
    assert storage.calls["find"] == THREADS + 3
    assert all(isinstance(each, HandoffNotFound) for each in await end(storage, tasks))


async def test_a_tenant_that_waits_too_long_is_refused_and_nobody_else() -> None:
    storage, handoffs = slow_handoffs(wait_s=0.01)
    tasks = flood(lambda: handoffs.get(new_id(), "flood"))
    await until(storage, THREADS)
    refused, _ = await asyncio.wait(tasks[THREADS:])
    assert all(isinstance(each.exception(), GatewayOverloaded) for each in refused)
    with pytest.raises(HandoffNotFound):
        await handoffs.get(new_id(), "another")
    await end(storage, tasks)


async def test_lists_of_all_tenants_share_one_look_at_the_store() -> None:
    storage, handoffs = slow_handoffs()
    first = asyncio.ensure_future(handoffs.page("flood", limit=9, after=None))
    await until(storage, 1)
    tasks = flood(lambda: handoffs.page("flood", limit=9, after=None))
    tasks.append(asyncio.ensure_future(handoffs.page("another", limit=9, after=None)))
    await asyncio.sleep(0)
    assert await end(storage, [first, *tasks]) == [([], False)] * (FLOOD + 2)
    assert storage.calls["refresh"] == 2


@pytest.mark.parametrize(("work", "places"), [("fetch", FETCHES), ("share", PUSHES)])
async def test_copies_of_one_tenant_hold_up_no_other(work: str, places: int) -> None:
    storage, handoffs = slow_handoffs()

    async def begin(tenant: str) -> None:
        record = handoffs.begin(ENGINE, tenant)
        handoffs.saving._settle(record, record.state)
        record.bytes = 1
        if work == "fetch":
            await handoffs.fetches.fetch_here(record, ENGINE)
        else:
            await handoffs.saving._push_kv(record)

    tasks = flood(lambda: begin("flood"))
    await until(storage, places)
    before = storage.calls[work]
    await asyncio.wait_for(begin("another"), 20)
    assert storage.calls[work] == before + 1
    await end(storage, tasks)


def test_nothing_waits_in_the_default_pool() -> None:
    """`asyncio.to_thread` is refused by ruff; this is its other name."""
    root = Path(__file__).parents[2]
    found = [
        f"{file}:{node.lineno}"
        for folder in ("app", "plugins", "connectors")
        for file in (root / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "run_in_executor"
        and isinstance(node.args[0], ast.Constant)
    ]
    assert found == []
    assert '"asyncio.to_thread".msg' in (root / "pyproject.toml").read_text()


async def test_a_save_of_a_flood_waits_however_long_that_takes() -> None:
    """A refused save would lose a handoff whose client was told that it is there."""
    storage, handoffs = slow_handoffs(wait_s=0.01)
    tasks = flood(lambda: handoffs.get(new_id(), "flood"))
    await until(storage, THREADS)
    record = handoffs.begin(ENGINE, "flood")
    handoffs.end(record, TransferRequest(report=TransferReport(saves=False)), range(64))
    await asyncio.wait(tasks[THREADS:])
    assert record.state is HandoffState.PENDING
    await end(storage, tasks)
    await handoffs.settled(record, 20)
    assert record.state is HandoffState.READY


async def test_a_save_that_holds_the_budgets_lock_does_not_wait_behind_its_tenants_flood() -> None:
    """Others' saves wait for that lock."""
    storage, handoffs = slow_handoffs()
    tasks = flood(lambda: handoffs.get(new_id(), "flood"))
    await until(storage, THREADS)
    for tenant in ("flood", "another"):
        record = handoffs.begin(ENGINE, tenant, automatic=new_id(automatic=True))
        record.tokens.extend(range(64))
        await asyncio.wait_for(handoffs.saving._write_record(record), 20)
    await end(storage, tasks)


async def test_a_deletion_that_is_refused_leaves_the_handoff_and_another_is_final(tmp_path: Path) -> None:
    """A handoff that is gone here and has its record still would be back after a restart."""
    store, threads = FileStore(tmp_path / "store"), HandoffThreads(wait_s=0.01)
    tier = Here(store, RecordFolder(tmp_path / "records"), ImageStore(tmp_path / "images"))
    handoffs = Library(HandoffSettings(), tier, GatewayMetrics().handoffs, threads=threads)
    record = handoffs.begin(ENGINE, "local")
    handoffs.end(record, TransferRequest(report=TransferReport(saves=False)), range(64))
    await handoffs.settled(record, 20)
    await asyncio.gather(*handoffs.background.running)
    go = threading.Event()
    busy = [asyncio.ensure_future(threads.storage.run("local", go.wait, 50)) for _ in range(THREADS)]
    await asyncio.sleep(0)
    with pytest.raises(GatewayOverloaded):
        await handoffs.delete(record)
    go.set()
    await asyncio.gather(*busy)
    assert await handoffs.get(record.id, "local") is record
    await handoffs.delete(record)
    with pytest.raises(HandoffNotFound):
        await handoffs.get(record.id, "local")
    assert not list((tmp_path / "records").glob("*.json"))


async def test_lists_do_not_wait_behind_removals() -> None:
    storage, handoffs = slow_handoffs()
    storage.go.set()
    gone = threading.Event()
    removing = flood(lambda: handoffs.upkeep._run(gone.wait, 50))
    await asyncio.sleep(0)
    assert await asyncio.wait_for(handoffs.page("another", limit=9, after=None), 20) == ([], False)
    gone.set()
    await asyncio.gather(*removing)
