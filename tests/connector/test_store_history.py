"""Several processes work on one store, some are killed; what each saw is then held against what was put."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import store_history
from support.store_history import BUDGET, WRONG

from baton.handoffs.records.repository import HandoffRepository
from baton_kv.stores.file import FileStore

SCRIPT = Path(store_history.__file__)
WORKERS = 3
NEVER = 2**63


@dataclass(frozen=True)
class Event:
    """One operation.

    Attributes:
        op: `begin`, `put`, `get` or `delete`.
        key: of the entry or the record.
        value: what was put or seen; None: nothing.
        begun: nanoseconds.
        ended: nanoseconds; of a put that was killed: never.
    """

    op: str
    key: str
    value: str | None
    begun: int
    ended: int


def events_of(folder: Path) -> list[Event]:
    found = []
    for path in folder.glob("*.log"):
        for line in path.read_text().splitlines():
            told = json.loads(line)
            found.append(Event(told["op"], told["key"], told["value"], told["from"], told["until"]))
    return found


def violations(events: list[Event], *, deleted_for_good: bool) -> list[Event]:
    """Return the gets that saw what nobody had put, or what had been replaced or deleted before they began."""
    ended = {(each.key, each.value): each.ended for each in events if each.op == "put"}
    puts, deletes = defaultdict(list), defaultdict(list)
    for each in events:
        if each.op == "begin":
            end = ended.get((each.key, each.value), NEVER)
            puts[each.key].append(Event("put", each.key, each.value, each.begun, end))
        elif each.op == "delete":
            deletes[each.key].append(each)

    def wrong(get: Event) -> bool:
        own = [put for put in puts[get.key] if put.value == get.value and put.begun < get.ended]
        if get.value == WRONG or not own:
            return True
        (put,) = own
        later = [*puts[get.key], *deletes[get.key]]
        if deleted_for_good and any(each.ended < get.begun for each in deletes[get.key]):
            return True
        return any(each.begun > put.ended and each.ended < get.begun for each in later)

    return [each for each in events if each.op == "get" and each.value is not None and wrong(each)]


def work(kind: str, tmp_path: Path, seconds: float) -> tuple[list[Event], int]:
    """Run several processes for a while; return their events and how many were killed."""
    rng, kills, started = random.Random(3), 0, 0
    logs = tmp_path / "logs"
    logs.mkdir()

    def start() -> subprocess.Popen[bytes]:
        nonlocal started
        started += 1
        command = [sys.executable, str(SCRIPT), kind, str(tmp_path / "store")]
        return subprocess.Popen([*command, str(logs / f"{started}.log"), str(started)])

    workers = [start() for _ in range(WORKERS)]
    while len(list(logs.iterdir())) < WORKERS:
        assert all(each.poll() is None for each in workers)
        time.sleep(0.05)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(rng.uniform(0.2, 0.6) * max(1.0, seconds / 6))
        victim = rng.randrange(WORKERS)
        assert workers[victim].poll() is None, "a worker failed by itself"
        workers[victim].send_signal(signal.SIGKILL)
        workers[victim].wait()
        kills += 1
        workers[victim] = start()
    for each in workers:
        each.kill()
        each.wait()
    return events_of(logs), kills


def judged(kind: str, tmp_path: Path, seconds: float) -> None:
    events, kills = work(kind, tmp_path, seconds)
    hits = sum(each.op == "get" and each.value is not None for each in events)
    found = violations(events, deleted_for_good=kind == "records")
    print(
        f"\nB10 {kind}: {len(events)} operations, {hits} hits, {kills} kills, {len(found)} violations in {seconds} s"
    )
    assert min(hits, kills, sum(each.op == "delete" for each in events)) > 0
    assert found == []


def test_the_checker_sees_what_is_wrong() -> None:
    def event(op: str, value: str | None, begun: int, ended: int) -> Event:
        return Event(op, "k", value, begun, ended)

    past = [event("begin", "a", 0, 1), event("put", "a", 0, 9), event("begin", "b", 10, 11)]
    past += [event("put", "b", 10, 19)]
    for get, wrong in (
        (event("get", "a", 20, 21), True),  # replaced
        (event("get", "a", 15, 16), False),  # b is being put
        (event("get", "b", 20, 21), False),
        (event("get", "c", 20, 21), True),  # never put
        (event("get", WRONG, 20, 21), True),
    ):
        assert bool(violations([*past, get], deleted_for_good=False)) is wrong
    gone = [*past, event("delete", None, 20, 29)]
    assert violations([*gone, event("get", "b", 30, 31)], deleted_for_good=False)
    assert not violations([*gone, event("get", "b", 25, 31)], deleted_for_good=False)
    again = [*gone, event("begin", "c", 30, 31), event("get", "c", 40, 41)]
    assert not violations(again, deleted_for_good=False)
    assert violations(again, deleted_for_good=True)


@pytest.mark.fault("B10")
@pytest.mark.fault("B12")
@pytest.mark.parametrize("seconds", [1.5, pytest.param(20.0, marks=pytest.mark.chaos)])
def test_every_entry_read_is_the_last_one_put(seconds: float, tmp_path: Path) -> None:
    judged("entries", tmp_path, seconds)
    assert FileStore(tmp_path / "store", budget=BUDGET).size() <= BUDGET


@pytest.mark.fault("B10")
@pytest.mark.fault("D10")
@pytest.mark.parametrize("seconds", [1.5, pytest.param(20.0, marks=pytest.mark.chaos)])
def test_every_record_read_is_the_last_one_written(seconds: float, tmp_path: Path) -> None:
    judged("records", tmp_path, seconds)
    files = HandoffRepository(tmp_path / "store")
    records = files.read_all()
    assert files.size() == sum(path.stat().st_size for path in (tmp_path / "store").glob("*.json"))
    pinned = sum(record.usage.non_kv_bytes for record in records if record.pin)
    pinned += sum(FileStore(tmp_path / "kv").pinned().values())
    assert 0 < pinned <= BUDGET / 2
