"""Copies go through any layout unchanged, and on a GPU they come after the model's work.

The GPU here is a recorder: it runs nothing late, but notes in which order streams, events and copies were asked for.
`bench/gpu` asks a real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from connector.rank_engines import LOADED, SAVED, RankedEngine
from support.memory_store import MemoryStore

from baton_kv import copies
from baton_kv.blocks import HeadShard, KVBlocks
from baton_kv.copies import CudaCopies, HostStaging, Staging, in_words, private_memory, stretches

HEADS, BLOCKS, ROWS, TOKENS, VALUES = 3, 8, 2, 4, 6
Log = list[tuple[str, object]]


class Recorder:
    """What is used of `torch.cuda`, on tensors of the host."""

    def __init__(self) -> None:
        self.log: Log = []
        recorder = self

        class Stream:
            def __init__(self, device: object = None) -> None: ...

            def wait_event(self, event: object) -> None:
                recorder.log.append(("wait for", event))

            def synchronize(self) -> None:
                recorder.log.append(("stream ended", self))

        class Event:
            def __init__(self, blocking: bool = False) -> None: ...

            def record(self, stream: object) -> None:
                recorder.log.append(("record on", stream))

            def synchronize(self) -> None:
                recorder.log.append(("event reached", self))

        self.Stream, self.Event = Stream, Event
        self.model_stream = Stream()

    def set_device(self, device: object) -> None:
        self.log.append(("device", device))

    def current_stream(self, device: object = None) -> object:
        self.log.append(("asked for the current stream", device))
        return self.model_stream

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.log.append(("on stream", stream))
        yield
        self.log.append(("left stream", stream))

    def said(self) -> list[str]:
        return [name for name, _ in self.log]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return empty(*args, **more)

    monkeypatch.setattr(copies.torch, "cuda", recorder)
    monkeypatch.setattr(copies.torch, "empty", unpinned)
    return recorder


def pools() -> dict[str, torch.Tensor]:
    """The heads of a layer as different layouts show them."""
    kv = torch.randint(0, 256, (HEADS, BLOCKS, ROWS, TOKENS, 8 * VALUES), dtype=torch.uint8)
    tokens_apart = kv.repeat(1, 1, 1, 1, 2)[..., : 8 * VALUES]
    blocks_apart = torch.stack([kv, kv], 2)[:, :, 0]
    heads_inside = kv.transpose(0, 1).contiguous().transpose(0, 1)
    heads_innermost = kv.permute(1, 2, 3, 0, 4).contiguous().permute(3, 0, 1, 2, 4)
    odd = torch.randint(0, 256, (HEADS, BLOCKS, ROWS, TOKENS, 7), dtype=torch.uint8)
    return {
        "dense": kv,
        "tokens apart": tokens_apart,
        "blocks apart": blocks_apart,
        "heads inside blocks": heads_inside,
        "heads inside tokens": heads_innermost,
        "not in words": odd,
    }


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("name", pools())
@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_slabs_come_and_go_unchanged(cuda: Recorder, kind: str, name: str, skip: int) -> None:
    pool = pools()[name]
    before, size = pool.clone(), pool[0, 0].numel()
    staging: Staging = HostStaging()
    if kind == "cuda":
        staging = copies.CudaStaging(torch.device("cpu"), HEADS * BLOCKS * size)
    taken = b"".join(bytes(slab) for slab in staging.gather(pool, [5, 1, 6]))
    assert taken == before[:, [5, 1, 6]].numpy().tobytes()
    sent = torch.randint(0, 256, (HEADS, 3 + skip, *pool.shape[2:]), dtype=torch.uint8)
    data = staging.buffer(sent.numel())[: sent.numel()]
    data[:] = sent.numpy().tobytes()
    staging.scatter(pool, [2, 7, 0], data, skip)
    assert torch.equal(pool[:, [2, 7, 0]], sent[:, skip:])
    assert torch.equal(pool[:, [1, 3, 4, 5, 6]], before[:, [1, 3, 4, 5, 6]])


@pytest.mark.parametrize("name", pools())
@pytest.mark.parametrize("kind", ["host", "cuda"])
@pytest.mark.parametrize("blocks", [[5, 6, 7, 1, 2], [4], [7, 6, 5], [0, 1, 2, 3, 4, 5, 6, 7], [3, 3]])
def test_slabs_are_gathered_into_memory_that_stays(
    cuda: Recorder, kind: str, name: str, blocks: list[int]
) -> None:
    """Also blocks that follow one another in the pool, which are copied at once."""
    pool, size = pools()[name], pools()[name][0, 0].numel()
    staging: Staging = HostStaging()
    if kind == "cuda":
        staging = copies.CudaStaging(torch.device("cpu"), HEADS * BLOCKS * size)
    room = private_memory(HEADS * len(blocks) * size)
    taken = staging.gather(pool, blocks, room)
    expected = pool[:, blocks].numpy().tobytes()
    assert (b"".join(taken), bytes(room)) == (expected, expected)
    other = torch.zeros_like(pool)
    if len(set(blocks)) == len(blocks):
        staging.scatter(other, blocks, room.toreadonly())
        assert torch.equal(other[:, blocks], pool[:, blocks])
        assert int(other.count_nonzero()) == int(pool[:, blocks].count_nonzero())


@pytest.mark.parametrize(
    ("blocks", "found"),
    [
        ([], []),
        ([4], [(0, 4, 1)]),
        ([4, 5, 6], [(0, 4, 3)]),
        ([6, 5, 4], [(0, 6, 1), (1, 5, 1), (2, 4, 1)]),
        ([1, 2, 9, 10, 10], [(0, 1, 2), (2, 9, 2), (4, 10, 1)]),
    ],
)
def test_stretches_of_blocks(blocks: list[int], found: list[tuple[int, int, int]]) -> None:
    assert list(stretches(blocks)) == found


@pytest.mark.parametrize("name", ["dense", "heads inside blocks", "blocks apart"])
def test_rows_are_the_pool_itself(name: str) -> None:
    pool = pools()[name]
    rows = HostStaging().rows(pool, [6, 2])
    assert rows is not None
    rows[3][:] = bytes(len(rows[3]))
    assert pool[1, 2].count_nonzero() == 0
    assert pool[1, 6].count_nonzero() > 0
    assert HostStaging().rows(pools()["heads inside tokens"], [6, 2]) is None


def test_words_are_taken_where_everything_is_a_multiple_of_eight_bytes() -> None:
    found = {name: in_words(pool).dtype for name, pool in pools().items()}
    assert found.pop("not in words") is torch.uint8
    assert set(found.values()) == {torch.int64}
    shifted = torch.zeros(HEADS * BLOCKS * ROWS * TOKENS * 8 + 1, dtype=torch.uint8)[1:]
    assert in_words(shifted.view(HEADS, BLOCKS, ROWS, TOKENS, 8)).dtype is torch.uint8


def test_copies_wait_for_the_fence_and_have_ended_when_they_are_told(cuda: Recorder) -> None:
    """The fence is of the model's stream; the thread that copies has a stream of its own and asks for no other."""
    pool = pools()["dense"]
    made = CudaCopies(torch.device("cpu"), 1, pool.numel())
    fence = made.fence()
    assert cuda.log == [
        ("asked for the current stream", torch.device("cpu")),
        ("record on", cuda.model_stream),
    ]
    cuda.log.clear()
    with made.staging(fence) as staging:
        assert cuda.log == [("device", torch.device("cpu")), ("wait for", fence)]
        cuda.log.clear()
        data = staging.gather(pool[:1], [1, 2])
        assert cuda.said() == ["on stream", "record on", "left stream", "event reached"]
        cuda.log.clear()
        staging.scatter(pool[:1], [3], data[0])
        assert cuda.said() == ["on stream", "record on", "left stream", "event reached"]
        assert cuda.model_stream not in [what for _, what in cuda.log]
        cuda.log.clear()
    assert cuda.said() == ["stream ended"]


def test_a_slot_comes_back_also_after_a_failure(cuda: Recorder) -> None:
    made = CudaCopies(torch.device("cpu"), 1, 64)
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError), made.staging(None):
            raise ZeroDivisionError
    assert cuda.said().count("stream ended") == 3


def test_every_step_with_jobs_takes_one_fence_before_them(
    cuda: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the worker's own threads: what it saves and loads there is what it saves and loads on CPUs."""
    monkeypatch.setattr(
        "baton_kv.worker_role.copies_for",
        lambda _device, threads, size: CudaCopies(torch.device("cpu"), threads, size),
    )
    store = MemoryStore()
    writer, reader = RankedEngine(store, 4, 2), RankedEngine(store, 4, 1, seed=1)
    key, _, saved = writer.save()
    _, loaded = reader.load(key)
    writer.shutdown()
    reader.shutdown()
    assert (saved.failure, loaded.failure) == (None, None)
    expected = reader.expected(writer.kv[:, SAVED], [0, 1, 2, 3])
    assert all(torch.equal(*pair) for pair in zip(reader.held(LOADED), expected, strict=True))
    fences = [number for number, name in enumerate(cuda.said()) if name == "asked for the current stream"]
    assert len(fences) == 3, "two ranks that save, one that loads"
    assert fences[0] < cuda.said().index("wait for")


def test_a_gpu_that_fails_at_the_fence_ends_no_engine(
    cuda: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RankedEngine(MemoryStore(), 4, 1)

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.workers[0]._copies, "fence", broken)
    _, ended, outcome = engine.save()
    engine.shutdown()
    assert outcome.failure == "other"
    assert ended.saved == [{outcome.request_id}]


def test_the_largest_run_fits_a_slot() -> None:
    blocks = KVBlocks([torch.zeros(4, 2, 16, 8), torch.zeros(4, 2 * 2**20, dtype=torch.uint8)])
    assert blocks.largest_run == 2 * 2**20
    ranks = [KVBlocks([torch.zeros(4, 2, 16, 8)], shard=HeadShard.of_rank(4, rank, 2)) for rank in range(2)]
    assert [rank.largest_run for rank in ranks] == [2**19, 2**19], "a rank has its share of each run"


BOUND = """
import os
import torch
from concurrent.futures import ThreadPoolExecutor
from baton_kv.copies import HostCopies, cores_for

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
with ThreadPoolExecutor(1, initializer=HostCopies(1).begin_thread) as pool:
    used = pool.submit(os.sched_getaffinity, 0).result()
print([sorted(each) for each in (used, cores_for(torch.device("cpu")), cores_for(torch.device("cuda")))])
"""


def test_copies_are_not_bound_to_the_core_of_the_worker_s_first_thread() -> None:
    done = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, check=True)
    allowed = sorted(os.sched_getaffinity(0))
    assert json.loads(done.stdout) == [allowed, allowed, allowed[:1]], (
        "on a GPU they stay where the worker is"
    )
