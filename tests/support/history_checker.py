"""Run processes that work on a store at random, kill some, and hold what each saw against what was put."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.store_history import WRONG

NEVER = 2**63
TESTS = Path(__file__).parents[1]


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


def run_workers(
    command: Sequence[str], logs: Path, workers_at_once: int, seconds: float
) -> tuple[list[Event], int]:
    """Run several processes for a while; return their events and how many were killed.

    Args:
        command: what each runs; it gets the path of its log and a seed as further arguments.
        logs: folder of the logs, which is made.
        workers_at_once: number of processes.
        seconds: how long.
    """
    rng, kills, started = random.Random(3), 0, 0
    logs.mkdir()

    def start() -> subprocess.Popen[bytes]:
        nonlocal started
        started += 1
        arguments = [*command, str(logs / f"{started}.log"), str(started)]
        path = os.pathsep.join([str(TESTS), *sys.path])
        return subprocess.Popen(arguments, env=os.environ | {"PYTHONPATH": path})

    workers = [start() for _ in range(workers_at_once)]
    while len(list(logs.iterdir())) < workers_at_once:
        assert all(each.poll() is None for each in workers)
        time.sleep(0.05)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(rng.uniform(0.2, 0.6) * max(1.0, seconds / 6))
        victim = rng.randrange(workers_at_once)
        assert workers[victim].poll() is None, "a worker failed by itself"
        workers[victim].send_signal(signal.SIGKILL)
        workers[victim].wait()
        kills += 1
        workers[victim] = start()
    for each in workers:
        each.kill()
        each.wait()
    return events_of(logs), kills
