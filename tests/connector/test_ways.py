"""How many files a saved and a loaded handoff run through inside the engine: whoever follows one reads as many."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from connector.store_relays import LOADED, SAVED, TOKENS, Engine

import baton_kv
from baton_kv.contract import new_key, params_to_save
from baton_kv.stores.file import FileStore

FOLDER = str(Path(baton_kv.__file__).parent)
BUDGET = 11
"""Files beside `connector.py`, which vLLM calls."""


@pytest.fixture
def passed() -> Iterator[Callable[[], set[str]]]:
    """Takes the files of the connector of which a function ran since the last call."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            seen.add(frame.f_code.co_filename.removeprefix(f"{FOLDER}/"))

    def take() -> set[str]:
        found = set(seen)
        seen.clear()
        return found

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield take
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


def finish(engine: Engine) -> None:
    """Begin the jobs of a step and report them when they have ended."""
    engine.worker.start(engine.scheduler.step())
    deadline = time.monotonic() + 30
    while not (outcomes := engine.worker.poll().outcomes):
        assert time.monotonic() < deadline, "the job did not end"
        time.sleep(0.0005)
    engine.scheduler.report(outcomes)
    assert [each.failure for each in engine.scheduler.take_outcomes()] == [None]


def test_a_save_and_a_load_run_through_few_files(tmp_path: Path, passed: Callable[[], set[str]]) -> None:
    store = FileStore(tmp_path / "store", budget=1 << 30)
    saver, loader = Engine(store), Engine(store, seed=1)
    params, tokens = params_to_save(new_key("acme")), list(TOKENS)
    passed()
    assert saver.scheduler.matched("a", params, tokens, 0) == 0
    held, answer = saver.scheduler.finished(
        "a", params, tokens=tokens, prompt=49, computed=50, block_ids=(SAVED,), whole=True
    )
    assert held
    finish(saver)
    saved = passed()
    assert loader.scheduler.matched("b", answer, [*tokens, 1], 0) == 49
    loader.scheduler.allocated("b", (LOADED,), 49)
    finish(loader)
    loaded = passed()
    for way in (saved, loaded):
        assert {"scheduler_role.py", "worker_role.py", "stores/file.py"} <= way, "nothing was noted"
        assert len(way) <= BUDGET, sorted(way)
