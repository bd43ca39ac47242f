"""Machines change, delete, restore and expire archived handoffs for a minute, over a service that fails at random."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.archives import Archive, ArchivedMachine, archive_server, archived_machine, with_s3
from support.s3_proxy import Refusal, S3Proxy, s3_proxy
from support.shared_stores import ENGINE

from baton.admission import breaker
from baton.errors import HandoffNotFound, HandoffStoreUnavailable
from baton.library.archive import records as archive_records
from baton.library.archive import tier as archive_tier
from baton.library.archive.archiver import remove_expired

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    with_s3,
]
SECONDS = 60
AT_ONCE = 6


@dataclass
class Left:
    """A handoff that the test left.

    Attributes:
        id: its id.
        key: of its KV.
        kv: its KV.
        labels: what it may be called: the last label that was acknowledged, and those whose fate is unknown.
        deleted: its deletion was acknowledged.
        perhaps: its deletion was tried.
    """

    id: str
    key: str
    kv: bytes
    labels: set[str | None] = field(default_factory=lambda: {None})
    deleted: bool = False
    perhaps: bool = False
    guard: asyncio.Lock = field(default_factory=asyncio.Lock)


class History:
    """What two machines do to archived handoffs, and what must hold of it."""

    def __init__(self, machines: list[ArchivedMachine], seed: int) -> None:
        self.machines, self.left = machines, list[Left]()
        self.done = 0
        self._random = random.Random(seed)

    async def act(self) -> None:
        """Do something at random, and note what may be true then."""
        machine = self._random.choice(self.machines)
        action = self._random.choice(
            ["leave", "change", "change", "look", "fetch", "fetch", "delete", "evict"]
        )
        if action == "leave" or not self.left:
            record = await machine.leave(blocks=self._random.randint(1, 40), pin=True)
            self.left.append(Left(record.id, record.key, machine.read(record.key)))
            return
        left = self._random.choice(self.left[-30:])
        async with left.guard:  # so that the last change is known
            await getattr(self, action)(machine, left)
        self.done += 1

    async def look(self, machine: ArchivedMachine, left: Left) -> None:
        await machine.handoffs.get(left.id, "local")  # perhaps as it was: the archive cannot be asked

    async def change(self, machine: ArchivedMachine, left: Left) -> None:
        found = await machine.handoffs.get(left.id, "local")
        label = f"label {self.done}"
        left.labels = {*left.labels, label}
        await machine.handoffs.change(found, {"label": label})
        left.labels = {label}

    async def fetch(self, machine: ArchivedMachine, left: Left) -> None:
        found = await machine.handoffs.get(left.id, "local")
        await machine.handoffs.fetch_here(found, ENGINE)
        if machine.handoffs.is_here(found):
            assert machine.read(left.key) == left.kv

    async def delete(self, machine: ArchivedMachine, left: Left) -> None:
        found = await machine.handoffs.get(left.id, "local")
        left.perhaps = True
        await machine.handoffs.delete(found)
        left.deleted = True

    async def evict(self, machine: ArchivedMachine, left: Left) -> None:
        """The machine loses it, if the archive has it."""
        found = await machine.handoffs.get(left.id, "local")
        if found.archived:
            machine.handoffs.upkeep._evict(found)

    async def acts(self, until: float) -> None:
        while time.monotonic() < until:
            with contextlib.suppress(HandoffNotFound, HandoffStoreUnavailable):  # looked at in the end
                await self.act()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Archive, S3Proxy]]:
    with archive_server(tmp_path / "s3") as archive, s3_proxy(archive.endpoint) as proxy:
        yield archive, proxy


async def settled(history: History) -> None:
    """Wait until all machines have written what they had to."""
    for machine in history.machines:
        machine.storage.archive.bucket.breaker.resting_until = 0.0
        deadline = time.monotonic() + 120
        while machine.storage.archiver.jobs:
            assert time.monotonic() < deadline
            for name in machine.storage.archiver.later:
                machine.storage.archiver.later[name] = 0.0
            await asyncio.sleep(0.2)
        await machine.quiet()
        machine.storage.archive.records._unknown.clear()


@pytest.mark.fault("C18")
@pytest.mark.fault("C23")
async def test_nothing_deleted_comes_back_and_no_change_is_lost_over_a_service_that_fails_at_random(
    site: tuple[Archive, S3Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, proxy = site
    monkeypatch.setattr(archive_tier, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(archive_records, "UNKNOWN_FOR_S", 0.0)
    monkeypatch.setattr(breaker, "REST_S", 0.05)
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)

    def refuse(_method: str, _path: str) -> Refusal | None:
        return (503, "SlowDown") if chance.random() < 0.03 else None

    with ExitStack() as stack:
        machines = []
        for name in ("one", "two", "three"):
            made = archived_machine(
                tmp_path / name, archive, archive_endpoint=proxy.endpoint, archive_timeout_s=5
            )
            stack.callback(made.close)
            machines.append(made)
        history = History(machines, seed)
        proxy.refuse = refuse
        until = time.monotonic() + SECONDS
        await asyncio.gather(*(history.acts(until) for _ in range(AT_ONCE)))
        proxy.refuse = lambda _method, _path: None
        await settled(history)
        later = archived_machine(tmp_path / "later", archive, archive_timeout_s=5)
        stack.callback(later.close)
        for left in history.left:
            for machine in (*machines, later):
                try:
                    found = await machine.handoffs.get(left.id, "local")
                except HandoffNotFound:
                    assert left.perhaps
                    continue
                assert not left.deleted
                assert found.label in left.labels
                await machine.handoffs.fetch_here(found, ENGINE)
                assert machine.read(left.key) == left.kv
        print(f"{history.done} operations on {len(history.left)} handoffs")
        assert history.done > 100
        require_nothing_left(later, archive)


def require_nothing_left(machine: ArchivedMachine, archive: Archive) -> None:
    """Require that all objects go with their handoffs."""
    for ahead_s in (2 * 86_400, 4 * 86_400):
        at = time.time() + ahead_s
        remove_expired(machine.storage.archive, now=lambda at=at: at)
    assert archive.names() == ["gateways"]
