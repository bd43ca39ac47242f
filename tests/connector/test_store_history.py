"""Several processes work on one store, some are killed; what each saw is then held against what was put."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import store_history
from support.history_checker import Event, run_workers, violations
from support.store_history import BUDGET, WRONG

from baton.library.here.records import RecordFolder
from baton_kv.stores.file import FileStore

SCRIPT = Path(store_history.__file__)
WORKERS = 3
ROUNDS = 20


def rounds(tmp_path: Path) -> Iterator[Path]:
    """A folder each; what happens in one is chance, so there is another until all that is judged has happened."""
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        yield folder
    pytest.fail(f"in {ROUNDS} rounds not all of it has happened")


def judged(kind: str, folder: Path, seconds: float) -> bool:
    """Whether something was found, deleted and killed meanwhile."""
    command = [sys.executable, str(SCRIPT), kind, str(folder / "store")]
    events, kills = run_workers(command, folder / "logs", WORKERS, seconds)
    hits = sum(each.op == "get" and each.value is not None for each in events)
    found = violations(events, deleted_for_good=kind == "records")
    print(
        f"\nB10 {kind}: {len(events)} operations, {hits} hits, {kills} kills, {len(found)} violations in {seconds} s"
    )
    assert found == []
    return min(hits, kills, sum(each.op == "delete" for each in events)) > 0


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
    for folder in rounds(tmp_path):
        happened = judged("entries", folder, seconds)
        assert FileStore(folder / "store", budget=BUDGET).size() <= BUDGET
        if happened:
            break


@pytest.mark.fault("B10")
@pytest.mark.fault("D10")
@pytest.mark.parametrize("seconds", [1.5, pytest.param(20.0, marks=pytest.mark.chaos)])
def test_every_record_read_is_the_last_one_written(seconds: float, tmp_path: Path) -> None:
    for folder in rounds(tmp_path):
        happened = judged("records", folder, seconds)
        files = RecordFolder(folder / "store")
        records = files.read_all()
        assert files.size() == sum(path.stat().st_size for path in (folder / "store").glob("*.json"))
        pinned = sum(record.footprint.non_kv_bytes for record in records if record.pin)
        pinned += sum(FileStore(folder / "kv").pinned().values())
        assert pinned <= BUDGET / 2
        if happened and pinned:
            break
