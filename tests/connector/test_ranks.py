"""Several tensor-parallel ranks write one entry, and any number of ranks reads it; or nobody does."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from connector.rank_engines import BLOCKS, LOADED, PROMPT, SAVED, SECRET, RankedEngine
from support.memory_store import MemoryStore

from baton_kv.blocks import HeadShard, LayoutRefused
from baton_kv.contract import (
    Transfer,
    TransferFailure,
    TransferOutcome,
    new_key,
    params_to_load,
    params_to_save,
)
from baton_kv.entry import Entry
from baton_kv.scheduler_role import RankOutcomes
from baton_kv.stores.base import Store, StoreFull
from baton_kv.stores.file import ABANDONED_AFTER_S, FileStore

RANKS = (1, 2, 4)
HEADS = (4, 2, 1)


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FileStore(tmp_path / "store") if request.param == "file" else MemoryStore()


@pytest.fixture
def engines() -> Iterator[list[RankedEngine]]:
    """Engines to shut down at the end of the test."""
    made: list[RankedEngine] = []
    yield made
    for engine in made:
        engine.shutdown()


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("heads", "writers", "readers"), list(itertools.product(HEADS, RANKS, RANKS)))
def test_any_number_of_ranks_reads_what_any_other_has_written(
    store: Store, engines: list[RankedEngine], heads: int, writers: int, readers: int
) -> None:
    """Every head goes where it belongs, with fewer heads than ranks too, and no other block changes."""
    writer, reader = RankedEngine(store, heads, writers), RankedEngine(store, heads, readers, seed=1)
    engines += [writer, reader]
    key, ended, outcome = writer.save()
    assert (outcome.failure, ended.saved) == (None, [{outcome.request_id}] * writers)
    ended, outcome = reader.load(key)
    assert (outcome.failure, ended.loaded) == (None, [{outcome.request_id}] * readers)
    assert same(reader.held(LOADED), reader.expected(writer.kv[:, SAVED], [0, 1, 2, 3]))
    others = [block for block in range(BLOCKS) if block not in LOADED]
    assert same(reader.held(others), reader.expected(reader.kv, others))


def test_an_entry_is_the_same_bytes_whoever_wrote_it(tmp_path: Path, engines: list[RankedEngine]) -> None:
    """All but its key and the digest of all."""
    found = []
    for ranks in RANKS:
        store = FileStore(tmp_path / str(ranks))
        engines.append(RankedEngine(store, 4, ranks))
        key, *_ = engines[-1].save()
        with store.open(key) as reader:
            entry = Entry(reader, key, SECRET)
            found.append([bytes(entry.run(layer, 0)) for layer in range(3)])
        assert list((store.root / "writing").iterdir()) == []
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("writers", "readers"), list(itertools.product(RANKS, RANKS)))
def test_ranks_continue_what_other_ranks_have_saved(
    store: Store, engines: list[RankedEngine], writers: int, readers: int
) -> None:
    """The first blocks stay in the first entry's file, the rest is the second's."""
    first, second = RankedEngine(store, 4, writers), RankedEngine(store, 4, readers, seed=1)
    third = RankedEngine(store, 4, 1, seed=2)
    engines += [first, second, third]
    source, *_ = first.save()
    tokens, blocks, key = [*PROMPT, *range(25)], [10, 4, 6, 2, 5], new_key("local")
    params = params_to_save(key, load=source)
    assert second.scheduler.matched("b", params, tokens, 0) == 49
    ends = {"tokens": tokens, "prompt": 75, "computed": 75, "block_ids": (blocks,), "whole": True}
    assert second.scheduler.finished("b", params, **ends)[0]  # type: ignore[arg-type]  # of such
    second.run()
    (outcome,) = second.scheduler.take_outcomes()
    assert outcome.failure is None
    assert store.exists(key, 0)
    store.delete(source)
    assert third.scheduler.matched("c", params_to_load(key), [*tokens, 1], 0) == 74
    third.scheduler.allocated("c", ([*LOADED, 11],), 74)
    assert third.run().failed == set()
    shared = third.expected(first.kv[:, SAVED[:3]], [0, 1, 2])
    assert same(third.held(LOADED[:3]), shared)
    assert same(third.held([LOADED[3], 11]), third.expected(second.kv[:, blocks[3:]], [0, 1]))


def breaks(*_: object) -> None:
    raise RuntimeError("broken")


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_save_leaves_no_entry_and_releases_its_blocks(
    tmp_path: Path, engines: list[RankedEngine], monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    store = FileStore(tmp_path / "store")
    engine = RankedEngine(store, 4, 2)
    engines.append(engine)
    monkeypatch.setattr(engine.workers[broken]._blocks, "pool", breaks)
    key, ended, outcome = engine.save()
    assert outcome.failure is TransferFailure.OTHER
    assert ended.saved == [{outcome.request_id}] * 2
    assert not store.exists(key)
    assert list((store.root / "writing").iterdir()) == [], "what the other rank wrote is removed"


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_load_makes_the_load_fail(
    store: Store, engines: list[RankedEngine], monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    writer, reader = RankedEngine(store, 4, 1), RankedEngine(store, 4, 2, seed=1)
    engines += [writer, reader]
    key, *_ = writer.save()
    monkeypatch.setattr(reader.workers[broken]._blocks, "pool", breaks)
    ended, outcome = reader.load(key)
    assert outcome.failure is TransferFailure.OTHER
    assert (ended.loaded, ended.failed) == ([{outcome.request_id}] * 2, {outcome.request_id})
    assert reader.scheduler.matched(outcome.request_id, params_to_load(key), [1], 0) == 0


def test_a_load_has_ended_when_its_last_rank_has(store: Store, engines: list[RankedEngine]) -> None:
    """A request that ends between two ranks must not save blocks that one of them still fills."""
    engine = RankedEngine(store, 4, 2)
    engines.append(engine)
    key, *_ = engine.save()
    prompt = [*range(100, 150), 1]
    count = engine.scheduler.matched("b", params_to_load(key), prompt, 0)
    engine.scheduler.allocated("b", (LOADED,), count)
    assert engine.scheduler.step().loads
    engine.scheduler.report([TransferOutcome("b", key, Transfer.LOAD)])
    ends = {"tokens": prompt, "prompt": 51, "computed": 51, "block_ids": (LOADED,), "whole": True}
    assert engine.scheduler.finished("b", params_to_save(), **ends) == (False, None)  # type: ignore[arg-type]
    jobs = engine.scheduler.step()
    assert (jobs.saves, jobs.given_up) == ([], ["b"])


def test_outcomes_of_ranks_become_one() -> None:
    """Bytes add up, the slowest counts, and a failure of one is a failure, the one that says more."""
    ranks = RankOutcomes(3)
    rows = [
        TransferOutcome("a", "k", Transfer.LOAD, bytes=10, seconds=1.0),
        TransferOutcome("b", "k", Transfer.SAVE),
        TransferOutcome("a", "k", Transfer.LOAD, failure=TransferFailure.GIVEN_UP, bytes=10, seconds=3.0),
        TransferOutcome("a", "k", Transfer.SAVE),
    ]
    assert list(ranks.add(rows)) == []
    last = TransferOutcome("a", "k", Transfer.LOAD, failure=TransferFailure.CORRUPT, bytes=10, seconds=2.0)
    (found,) = ranks.add([last])
    assert (found.failure, found.bytes, found.seconds) == (TransferFailure.CORRUPT, 30, 3.0)


@pytest.mark.parametrize(
    ("total", "ranks", "shards"),
    [
        (4, 2, [(0, 2, 0, 1), (2, 2, 0, 1)]),
        (2, 4, [(0, 1, 0, 2), (0, 1, 1, 2), (1, 1, 0, 2), (1, 1, 1, 2)]),
        (1, 2, [(0, 1, 0, 2), (0, 1, 1, 2)]),
    ],
)
def test_heads_are_divided_as_vllm_divides_them(
    total: int, ranks: int, shards: list[tuple[int, int, int, int]]
) -> None:
    found = [HeadShard.of_rank(total, rank, ranks) for rank in range(ranks)]
    assert [(each.first, each.count, each.replica, each.replicas) for each in found] == shards
    for layer in range(5):  # each head is written once
        assert sorted(head for each in found for head in each.writes(layer)) == list(range(total))


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(LayoutRefused, match="3 KV heads cannot be divided over 2 ranks"):
        HeadShard.of_rank(3, 0, 2)


def test_of_ranks_that_finish_at_once_exactly_one_seals(tmp_path: Path) -> None:
    store, ranks, rounds = FileStore(tmp_path / "store"), 4, 100
    barrier = Barrier(ranks)

    def write(rank: int) -> int:
        sealed = 0
        for name, key in drafts:
            with store.draft(key, name, size=4, rank=rank, ranks=ranks) as draft:
                draft.write_at(rank, [bytes([rank])])
                barrier.wait()
                if draft.finish():
                    sealed += 1
                    assert draft.read(0, 4) == b"\0\1\2\3"
                    draft.place()
        return sealed

    drafts = [(secrets.token_hex(16), new_key("acme")) for _ in range(rounds)]
    with ThreadPoolExecutor(ranks) as pool:
        assert sum(pool.map(write, range(ranks))) == rounds
    assert set(store.keys()) == {key for _, key in drafts}
    assert list((store.root / "writing").iterdir()) == []


def test_what_a_killed_rank_leaves_behind_is_swept(tmp_path: Path) -> None:
    store, name, key = FileStore(tmp_path / "store"), secrets.token_hex(16), new_key("acme")
    with store.draft(key, name, size=4, rank=0, ranks=2) as draft:
        draft.write_at(0, [b"ab"])
        assert not draft.finish()
    left = list((store.root / "writing").iterdir())
    assert {path.name for path in left} == {name, f"{name}.0"}
    FileStore(tmp_path / "store")
    assert len(list((store.root / "writing").iterdir())) == 2, "it may still be written"
    for path in left:
        os.utime(path, (0, path.stat().st_mtime - ABANDONED_AFTER_S - 1))
    FileStore(tmp_path / "store")
    assert list((store.root / "writing").iterdir()) == []


def test_a_rank_that_comes_after_the_sweep_saves_nothing_and_says_so(
    tmp_path: Path, engines: list[RankedEngine]
) -> None:
    """Its part alone is no entry, and what it wrote is removed."""
    store = FileStore(tmp_path / "store")
    engine = RankedEngine(store, 4, 2)
    engines.append(engine)
    key = new_key("acme")
    ends = {"tokens": PROMPT, "prompt": 50, "computed": 50, "block_ids": (SAVED,), "whole": True}
    assert engine.scheduler.finished("a", params_to_save(key), **ends)[0]  # type: ignore[arg-type]  # of such
    jobs = engine.scheduler.step()
    engine.workers[0].start(jobs)
    engine.wait(engine.workers[0])
    for path in (store.root / "writing").iterdir():
        path.unlink()
    engine.workers[1].start(jobs)
    engine.wait(engine.workers[1])
    (outcome,) = engine.scheduler.take_outcomes()
    assert outcome.failure is TransferFailure.DEVICE
    assert not store.exists(key)
    assert list((store.root / "writing").iterdir()) == []


def test_a_draft_with_a_share_missing_is_not_sealed(tmp_path: Path, engines: list[RankedEngine]) -> None:
    """The marker of a rank whose share went with the draft must not stand for that share."""
    store = FileStore(tmp_path / "store")
    engine = RankedEngine(store, 4, 2)
    engines.append(engine)
    key = new_key("acme")
    ends = {"tokens": PROMPT, "prompt": 50, "computed": 50, "block_ids": (SAVED,), "whole": True}
    assert engine.scheduler.finished("a", params_to_save(key), **ends)[0]  # type: ignore[arg-type]  # of such
    jobs = engine.scheduler.step()
    engine.workers[0].start(jobs)
    engine.wait(engine.workers[0])
    (store.root / "writing" / jobs.saves[0].draft).unlink()
    engine.workers[1].start(jobs)
    engine.wait(engine.workers[1])
    (outcome,) = engine.scheduler.take_outcomes()
    assert (outcome.failure, store.exists(key)) == (TransferFailure.DEVICE, False)


def test_a_scheduler_that_ends_removes_what_nobody_will_complete(
    tmp_path: Path, engines: list[RankedEngine]
) -> None:
    store = FileStore(tmp_path / "store")
    engine = RankedEngine(store, 4, 2)
    engines.append(engine)
    ends = {"tokens": PROMPT, "prompt": 50, "computed": 50, "block_ids": (SAVED,), "whole": True}
    assert engine.scheduler.finished("a", params_to_save(), **ends)[0]  # type: ignore[arg-type]  # of such
    engine.workers[0].start(engine.scheduler.step())
    engine.wait(engine.workers[0])
    assert len(list((store.root / "writing").iterdir())) == 2
    engine.scheduler.shutdown()
    assert list((store.root / "writing").iterdir()) == []


@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_are_those_of_the_entry_however_many_ranks_hold_a_head(
    store: Store, engines: list[RankedEngine], ranks: int
) -> None:
    """The planner learns a rate from them; replicas of a head must not count twice."""
    engine = RankedEngine(store, 1, ranks)
    engines.append(engine)
    key, _, saved = engine.save()
    _, loaded = engine.load(key)
    assert saved.bytes == loaded.bytes == engine.kv[:, SAVED].numel() * 4


def test_ranks_that_do_not_verify_load_the_same(store: Store, engines: list[RankedEngine]) -> None:
    writer, reader = RankedEngine(store, 4, 2), RankedEngine(store, 4, 4, seed=1, verify=False)
    engines += [writer, reader]
    key, *_ = writer.save()
    _, outcome = reader.load(key)
    assert outcome.failure is None
    assert same(reader.held(LOADED), reader.expected(writer.kv[:, SAVED], [0, 1, 2, 3]))


def test_damage_that_one_rank_sees_is_reported_as_damage(tmp_path: Path, engines: list[RankedEngine]) -> None:
    """The other rank may find that the entry is gone by then; it is quarantined, not merely missing."""
    ranks = RankOutcomes(2)
    for failures in itertools.permutations((TransferFailure.MISSING, TransferFailure.CORRUPT)):
        rows = [TransferOutcome("a", "k", Transfer.LOAD, failure=failure) for failure in failures]
        (found,) = ranks.add(rows)
        assert found.failure is TransferFailure.CORRUPT


def test_on_a_full_device_a_draft_evicts_no_more_than_it_needs(device: Path) -> None:
    """Each rank asks for its share, and for what is left of it."""
    store, mib = FileStore(device / "store"), 2**20
    others = [new_key("acme") for _ in range(5)]
    for key in others:
        store.put(key, [bytes(mib)])
    name, key = secrets.token_hex(16), new_key("globex")
    with store.draft(key, name, size=4 * mib, rank=0, ranks=1) as draft:
        for number in range(4):
            draft.write_at(number * mib, [bytes(mib)])
        assert draft.finish()
        draft.place()
    left = [other for other in others if store.exists(other)]
    assert store.exists(key)
    assert 3 <= len(left) < 5, "only as many as the entry has no room beside"


def test_a_draft_that_cannot_fit_is_refused_before_it_is_written(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", budget=100)
    refused = store.draft(new_key("acme"), secrets.token_hex(16), size=101, rank=0, ranks=2)
    with pytest.raises(StoreFull), refused:
        pass
    assert list((store.root / "writing").iterdir()) == []


def test_a_planted_link_in_a_draft_s_place_is_not_followed(tmp_path: Path) -> None:
    store, name = FileStore(tmp_path / "store"), secrets.token_hex(16)
    (tmp_path / "mine").write_bytes(b"precious")
    (store.root / "writing" / name).symlink_to(tmp_path / "mine")
    with (
        pytest.raises(Exception, match="writing acme"),
        store.draft(new_key("acme"), name, size=4, rank=0, ranks=2),
    ):
        pass
    assert (tmp_path / "mine").read_bytes() == b"precious"
