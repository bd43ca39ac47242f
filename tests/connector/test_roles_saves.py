"""The two roles together, on tensors: what is saved, what is not, and what parameters may say."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from connector.role_engines import BLOCK, PROMPT, SECRET, Engine
from support.memory_store import MemoryStore

from baton_kv import scheduler_role
from baton_kv.blocks import CacheGroup, GroupBlocks, HeadShard, KVBlocks, LayoutRefused
from baton_kv.contract import (
    EXPENDABLE,
    PARAMS_KEY,
    Malformed,
    TransferParams,
    new_key,
    params_to_load,
    params_to_save,
    parse,
)
from baton_kv.copies import HostStaging
from baton_kv.folders import store_secret
from baton_kv.format import Part
from baton_kv.scheduler_role import HeldBlocks, SchedulerRole
from baton_kv.stores.base import StoreError
from baton_kv.worker_role import LOW_PRIORITY, savers_for


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_a_save_that_fails_releases_its_blocks_and_leaves_nothing(store: MemoryStore) -> None:
    engine = Engine(store)
    engine.worker._blocks.pool = None  # type: ignore[assignment,method-assign]  # whatever breaks there
    held, _ = engine.scheduler.finished(
        "a", params_to_save(), tokens=PROMPT, prompt=49, computed=49, block_ids=([1, 2, 3, 6],), whole=True
    )
    assert held
    finished = engine.run(1)
    assert finished.saved == {"a"}
    assert finished.outcomes[0].failure == "other"
    assert list(store.keys()) == []


class NotingStore(MemoryStore):
    """A store that notes how nice the threads are that write, by key."""

    def __init__(self) -> None:
        super().__init__()
        self.niceness: dict[str, int] = {}

    def put(self, key: str, *args: Any, **more: Any) -> int:
        self.niceness[key] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        commit = more["commit"] or (lambda place: place())
        commit(lambda: self.note(f"{key} placed"))
        return super().put(key, *args, **more)

    def note(self, name: str) -> None:
        self.niceness[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


class MeetingStore(MemoryStore):
    """A store in which so many writers wait for one another."""

    def __init__(self, writers: int) -> None:
        super().__init__()
        self._all_here = threading.Barrier(writers)

    def put(self, key: str, *args: Any, **more: Any) -> int:
        self._all_here.wait(10)
        return super().put(key, *args, **more)


def test_several_saves_run_at_once_and_each_saves_its_own() -> None:
    engine = Engine(MeetingStore(3), resident=1024**2, savers=3)
    saved = {new_key("local"): [1 + number, 11 - number, 4 + number, 8] for number in range(3)}
    for number, (key, blocks) in enumerate(saved.items()):
        engine.scheduler.finished(
            f"{number}",
            params_to_save(key),
            tokens=PROMPT,
            prompt=49,
            computed=50,
            block_ids=(blocks,),
            whole=True,
        )
    finished = engine.run(3)
    assert [each.failure for each in finished.outcomes] == [None] * 3
    was = [layer.clone() for layer in engine.layers]
    for key, blocks in saved.items():
        assert engine.scheduler.matched(key, params_to_load(key), [*PROMPT, 5], 0) == 49
        engine.scheduler.allocated(key, ([4, 5, 6, 7],), 49)
        assert engine.run(1).outcomes[0].resident > 0
        assert all(torch.equal(now[4:8], then[blocks]) for now, then in zip(engine.layers, was, strict=True))
        engine.layers[0][4:8] = 0


def test_savers_are_few_where_cores_are() -> None:
    assert [savers_for(cores) for cores in (0, 1, 2, 7, 8, 16, 96)] == [1, 1, 1, 1, 2, 4, 4]
    assert [savers_for(16, ranks) for ranks in (1, 2, 4, 8, 32)] == [4, 2, 1, 1, 1]


def test_what_nobody_asked_for_is_saved_by_a_thread_that_gives_way() -> None:
    store, usual = NotingStore(), os.getpriority(os.PRIO_PROCESS, 0)
    engine = Engine(store)
    asked, automatic = new_key("local"), new_key("local").replace("local/", f"local/{EXPENDABLE}")
    for key in (asked, automatic):
        engine.save(params_to_save(key), [1, 2, 3, 6])
    assert (store.niceness[asked], store.niceness[automatic]) == (usual, LOW_PRIORITY)
    assert [store.niceness[f"{key} placed"] for key in (asked, automatic)] == [usual, usual], "under the lock"


@pytest.mark.parametrize(
    ("tokens", "computed", "blocks", "whole"),
    [
        (PROMPT, 49, [1, 2, 3, 6], False),
        ([5], 1, [1], True),
        (PROMPT, 0, [], True),
        (PROMPT, 49, [1], True),
        (PROMPT, 49, [1, 0, 3, 6], True),
    ],
)
def test_what_is_not_whole_is_not_saved(
    store: MemoryStore, tokens: list[int], computed: int, blocks: list[int], whole: bool
) -> None:
    engine = Engine(store)
    answer = engine.scheduler.finished(
        "a",
        params_to_save(),
        tokens=tokens,
        prompt=len(tokens),
        computed=computed,
        block_ids=(blocks,),
        whole=whole,
    )
    assert answer == (False, None)
    assert engine.scheduler.step().saves == []


def finishes(engine: Engine, request_id: str, blocks: list[int]) -> bool:
    """Whether the blocks of a request that asks for a save are held."""
    held, _ = engine.scheduler.finished(
        request_id, params_to_save(), tokens=PROMPT, prompt=49, computed=49, block_ids=(blocks,), whole=True
    )
    return held


def test_saves_hold_no_more_blocks_than_they_may(store: MemoryStore) -> None:
    engine = Engine(store)
    engine.scheduler = SchedulerRole(store, SECRET, "one", BLOCK, held_blocks=8)
    assert finishes(engine, "a", [1, 2, 3, 6])
    assert finishes(engine, "b", [4, 5, 7, 8])
    assert not finishes(engine, "c", [8, 9, 10, 11])
    (refused,) = engine.scheduler.take_outcomes()
    assert (refused.request_id, refused.kind, refused.failure) == ("c", "save", "busy")
    engine.run(2)
    assert finishes(engine, "c", [8, 9, 10, 11]), "the others' blocks are free again"


def test_the_only_save_may_hold_more_than_all_together(store: MemoryStore) -> None:
    engine = Engine(store)
    engine.scheduler = SchedulerRole(store, SECRET, "one", BLOCK, held_blocks=2)
    assert finishes(engine, "a", [1, 2, 3, 6])
    assert not finishes(engine, "b", [4, 5, 7, 8])


def test_blocks_that_requests_share_are_held_once(store: MemoryStore) -> None:
    """Many that start from one resident context and all save hold its blocks together."""
    engine = Engine(store)
    engine.scheduler = SchedulerRole(store, SECRET, "one", BLOCK, held_blocks=6)
    assert finishes(engine, "a", [1, 2, 3, 6])
    assert finishes(engine, "b", [1, 2, 3, 7])
    assert finishes(engine, "c", [1, 2, 3, 8])
    assert not finishes(engine, "d", [1, 2, 3, 9])


def test_what_automatic_saves_hold_keeps_no_named_save_out() -> None:
    held = HeldBlocks(10)
    assert not held.has_room_for(range(1, 12), 11)
    assert held.has_room_for(range(1, 12)), "somebody waits for the only one"
    assert not held.has_room_for(range(1, 12), 6)
    assert held.has_room_for(range(1, 12), 5), "what is in other entries already is not written"
    held.hold("automatic", range(1, 11), yields=True)
    assert not held.has_room_for([20], 1)
    assert held.has_room_for(range(20, 28)), "somebody waits for it"
    held.hold("named", range(20, 28))
    assert not held.has_room_for(range(30, 36))
    held.release("automatic")
    held.release("named")
    assert held.has_room_for(range(1, 11), 10)


def test_a_save_writes_all_blocks_of_windows_whatever_it_shares(store: MemoryStore) -> None:
    groups = (CacheGroup(), CacheGroup(window=3 * BLOCK))
    scheduler = SchedulerRole(store, SECRET, "one", BLOCK, groups=groups)
    blocks = (GroupBlocks(0, tuple(range(1, 11))), GroupBlocks(6, (11, 12, 13, 14)))
    assert scheduler._written(blocks, ()) == 14
    assert scheduler._written(blocks, (Part(new_key("acme"), "0" * 32, 8),)) == 2 + 4


def test_an_automatic_save_is_given_up_at_its_deadline(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton_kv.worker_role.SPARE_WITHIN_S", -1.0)
    engine = Engine(store)
    automatic = new_key("local").replace("local/", f"local/{EXPENDABLE}")
    for key, failure in ((automatic, "busy"), (new_key("local"), None)):
        held, _ = engine.scheduler.finished(
            "a",
            params_to_save(key),
            tokens=PROMPT,
            prompt=49,
            computed=49,
            block_ids=([1, 2, 3, 6],),
            whole=True,
        )
        assert held
        assert [each.failure for each in engine.run(1).outcomes] == [failure]


def test_blocks_are_free_soon_while_saves_make_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running request must not wait for a device that hangs, however many saves still begin."""
    now = 100.0
    monkeypatch.setattr(scheduler_role, "time", SimpleNamespace(monotonic=lambda: now))
    held = HeldBlocks(8)
    assert not held.free_soon
    held.hold("a", [1, 2])
    now += 0.9
    assert held.free_soon
    held.hold("b", [3])
    now += 0.9
    assert not held.free_soon, "a young save behind one that hangs"
    held.release("a")
    assert held.free_soon
    held.release("b")
    assert not held.free_soon, "nothing is held"


def test_the_last_sampled_token_has_no_kv(store: MemoryStore) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6], tokens=PROMPT[:33])
    assert engine.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 32


@pytest.mark.parametrize(
    "params",
    [
        None,
        "text",
        7,
        [],
        {},
        {PARAMS_KEY: None},
        {PARAMS_KEY: "x"},
        {PARAMS_KEY: {"load": "../../etc/passwd"}},
        {PARAMS_KEY: {"load": 7}},
        {PARAMS_KEY: {"load": "local/short"}},
        {PARAMS_KEY: {"version": 2, "load": new_key("local")}},
        {PARAMS_KEY: {"save": "x" * 10_000}},
        {PARAMS_KEY: {"load": {"a": {}}}},
    ],
)
def test_nothing_a_client_sends_reaches_the_store(store: MemoryStore, params: object) -> None:
    engine = Engine(store)
    assert engine.scheduler.matched("b", params, PROMPT, 0) == 0
    answer = engine.scheduler.finished(
        "b", params, tokens=PROMPT, prompt=49, computed=49, block_ids=([1, 2, 3, 6],), whole=True
    )
    assert answer == (False, None)
    assert {told.failure for told in engine.scheduler.take_outcomes()} <= {"malformed"}


def test_an_answer_s_parameters_are_the_next_request_s() -> None:
    key = new_key("acme")
    assert parse(params_to_load(key)) == TransferParams(load=key)
    assert parse(params_to_save(key)) == TransferParams(save=key)
    saves = parse(params_to_save())
    assert isinstance(saves, TransferParams)
    assert (saves.save_key or "").startswith("local/")
    assert isinstance(parse({PARAMS_KEY: 1}), Malformed)


def test_tensors_that_cannot_be_moved_by_blocks_are_refused() -> None:
    with pytest.raises(LayoutRefused):
        KVBlocks([torch.zeros(4, 2, 8, 6).transpose(2, 3)])
    with pytest.raises(LayoutRefused):
        KVBlocks([torch.zeros(4, 8, 6)])
    with pytest.raises(LayoutRefused):
        KVBlocks([torch.zeros(6, 2, 8, 6)], count=4)
    with pytest.raises(LayoutRefused):
        KVBlocks([torch.zeros(4, 2, 8, 6)], shard=HeadShard(0, 1, 2))


def test_blocks_are_gathered_in_the_order_asked() -> None:
    layer = torch.arange(6 * 2 * 2 * 1, dtype=torch.float32).reshape(6, 2, 2, 1)
    blocks = KVBlocks([layer])
    found = HostStaging().gather(blocks.pool(0, range(1, 2)), [4, 1])
    values = [numpy.frombuffer(slab, numpy.float32).tolist() for slab in found]
    assert values == [[18, 19], [6, 7]]


def test_a_store_s_secret_is_made_once_and_kept_private(tmp_path: Path) -> None:
    secret = store_secret(tmp_path)
    assert store_secret(tmp_path) == secret
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ValueError, match="not 32 bytes long"):
        store_secret(tmp_path)


def test_a_store_that_cannot_be_read_is_a_miss(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6])
    assert [told.failure for told in engine.scheduler.take_outcomes()] == [None]

    def broken(*_: object) -> object:
        raise StoreError("reading: input/output error")

    monkeypatch.setattr(store, "open", broken)
    assert engine.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 0
    assert [told.failure for told in engine.scheduler.take_outcomes()] == ["device"]
