"""Entries of machines with other instructions: keys and values in another order, the same to the last bit."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy
import pytest
import torch

from baton_kv.blocks import GroupBlocks, KVBlocks
from baton_kv.contract import Warmed, new_key
from baton_kv.copies import HostStaging
from baton_kv.entry import Entry
from baton_kv.fingerprint import kv_version
from baton_kv.format import Part
from baton_kv.joins.packing import AMX, PLAIN, Packings, SlabPacking
from baton_kv.messages import LoadJob, SaveJob, StepJobs
from baton_kv.stores.base import Store
from baton_kv.stores.file import FileStore
from baton_kv.worker_role import WorkerRole

SECRET = b"s" * 32
BLOCK, HEADS, SIZE = 64, 2, 32
SAVED, LOADED = (3, 7, 1), (0, 4, 6)
TOKENS = tuple(range(3 * BLOCK))
BYTES = 4 * BLOCK * SIZE


def packing(name: str, tokens: int = BLOCK, size: int = SIZE) -> SlabPacking:
    found = SlabPacking.known(name, tokens, size, torch.bfloat16)
    assert found is not None
    return found


class Machine:
    """The pool and the worker of an engine whose blocks have one packing: attention, then hidden states."""

    def __init__(self, store: Store, name: str, *, verify: bool = True, resident: int = 0, rows: int = 1):
        generator = torch.Generator().manual_seed(len(name))
        layers = [torch.randint(0, 999, (8, HEADS, BLOCK, 2 * SIZE), dtype=torch.int16, generator=generator)]
        layers[0] = layers[0].view(8 * rows, HEADS, BLOCK // rows, 2 * SIZE)
        layers += [torch.randint(0, 99, (8, 1, BLOCK, 8), dtype=torch.int16, generator=generator)]
        packings = Packings.of([packing(name, BLOCK // rows), None]) if name else None
        self.packings = packings
        self.blocks = KVBlocks([each.view(torch.bfloat16) for each in layers], 8, order=packings)
        self.worker = WorkerRole(store, SECRET, self.blocks, verify=verify, resident=resident)

    def run(self, jobs: StepJobs) -> str | None:
        self.worker.start(jobs)
        deadline = time.monotonic() + 30
        while not (outcomes := self.worker.poll().outcomes):
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        return outcomes[0].failure

    def save(self, key: str, parts: tuple[Part, ...] = ()) -> str | None:
        source = parts[-1].key if parts else ""
        blocks = (GroupBlocks(0, SAVED),)
        job = SaveJob("r", key, TOKENS, 3 * BLOCK, blocks, "one", "0" * 32, parts=parts, source=source)
        return self.run(StepJobs(saves=[job]))

    def load(self, key: str) -> str | None:
        return self.run(StepJobs(loads=[LoadJob("r", key, (GroupBlocks(0, LOADED),), 3 * BLOCK, "one")]))

    def held(self, block_ids: tuple[int, ...]) -> list[bytes]:
        return [
            b"".join(HostStaging().gather(self.blocks.pool(layer, self.blocks.heads(layer)), block_ids))
            for layer in range(2)
        ]

    def as_here(self, slabs: list[bytes], name: str) -> list[bytes]:
        """What slabs of another machine must be here, value by value."""
        return [reordered(slabs[0], name, self.blocks.packing), slabs[1]]


def reordered(slabs: bytes, source: str, target: str) -> bytes:
    """Move each value of each key to where the other packing has it: slowly, and by other code."""
    words = numpy.frombuffer(slabs, "u2").reshape(-1, 2 * BLOCK * SIZE)
    found, to, of = numpy.zeros_like(words), packing(target).places, packing(source).places
    for half, token, value in itertools.product(range(2), range(BLOCK), range(SIZE)):
        at = (half * BLOCK + token) * SIZE + value
        found[:, to[at]] = words[:, of[at]]
    return found.tobytes()


@pytest.mark.fault("B28")
@pytest.mark.parametrize(("writer", "reader"), [*itertools.product((PLAIN, AMX), repeat=2)])
@pytest.mark.parametrize("verify", [True, False])
def test_each_machine_loads_what_the_other_saved(
    tmp_path: Path, writer: str, reader: str, verify: bool
) -> None:
    store, key = FileStore(tmp_path / "store"), new_key("acme")
    saver, loader = Machine(store, writer), Machine(store, reader, verify=verify)
    assert (saver.save(key), loader.load(key)) == (None, None)
    assert loader.held(LOADED) == loader.as_here(saver.held(SAVED), writer)
    back = new_key("acme")
    assert (saver.save(back), loader.load(back)) == (None, None)


@pytest.mark.fault("B28")
def test_what_is_in_memory_has_the_order_of_this_machine(tmp_path: Path) -> None:
    """After a load, and after KV was brought into memory: then it is copied as it is."""
    store, key = FileStore(tmp_path / "store"), new_key("acme")
    saver = Machine(store, AMX)
    assert saver.save(key) is None
    for warm in (False, True):
        loader = Machine(store, PLAIN, resident=1 << 20)
        while warm and loader.worker.warm(key, BLOCK) is None:
            time.sleep(0.0005)
        for _ in range(2):
            assert loader.load(key) is None
            assert loader.held(LOADED) == loader.as_here(saver.held(SAVED), AMX)
    (kept,) = loader.worker._resident._kept.values()
    assert Warmed(kept.held).bytes == len(b"".join(saver.held(SAVED)))


@pytest.mark.fault("B28")
def test_a_context_may_be_of_several_machines(tmp_path: Path) -> None:
    """Each file says for itself in which order it is."""
    store, first, second = FileStore(tmp_path / "store"), new_key("acme"), new_key("acme")
    one, other, third = Machine(store, AMX), Machine(store, PLAIN), Machine(store, AMX, resident=1 << 20)
    assert one.save(first) is None
    with store.open(first) as reader:
        digest = Entry(reader, first, SECRET).digest
    assert other.load(first) is None
    for own, theirs in zip(SAVED, LOADED, strict=True):  # goes on after what it has loaded
        for layer in range(2):
            pool = other.blocks.pool(layer, other.blocks.heads(layer))
            pool[:, own] = pool[:, theirs]
    assert other.save(second, (Part(first, digest, 2),)) is None
    for _ in range(2):
        assert third.load(second) is None
        assert third.held(LOADED) == one.held(SAVED)


@pytest.mark.fault("B28")
def test_a_block_that_is_split_is_brought_into_order_row_by_row(tmp_path: Path) -> None:
    store, key = FileStore(tmp_path / "store"), new_key("acme")
    saver, loader = Machine(store, AMX, rows=2), Machine(store, PLAIN, rows=2)
    assert (saver.save(key), loader.load(key)) == (None, None)
    rows = numpy.frombuffer(saver.held(SAVED)[0], "u2").reshape(-1, BLOCK * SIZE)
    order = numpy.empty(BLOCK * SIZE, int)
    order[packing(PLAIN, BLOCK // 2).places] = packing(AMX, BLOCK // 2).places
    assert loader.held(LOADED)[0] == rows[:, order].tobytes()


@pytest.mark.fault("B28")
def test_an_order_that_nobody_knows_is_refused_and_stays(tmp_path: Path) -> None:
    """Of a later version, or an engine's whose own order is not as is known."""
    store, key = FileStore(tmp_path / "store"), new_key("acme")
    saver = Machine(store, PLAIN)
    saver.blocks.packing = "another"
    assert saver.save(key) is None
    for name in (PLAIN, AMX, ""):
        assert Machine(store, name).load(key) == "incompatible"
    assert store.exists(key), "it is of use to others"
    plain = new_key("acme")
    assert Machine(store, "").save(plain) is None
    assert [Machine(store, name).load(plain) for name in ("", PLAIN)] == [None, "incompatible"]


def test_only_packings_of_one_known_name_are_told() -> None:
    assert Packings.of([packing(PLAIN), packing(AMX)]) is None
    assert Packings.of([None]) is None
    places = numpy.arange(BLOCK * SIZE).reshape(BLOCK, SIZE)
    by_tokens = SlabPacking(places, places + BLOCK * SIZE, torch.bfloat16)
    assert by_tokens.name == ""
    assert Packings.of([by_tokens]) is None
    assert SlabPacking.known(AMX, BLOCK, SIZE, torch.float32) is None
    assert SlabPacking.known(AMX, 48, SIZE, torch.bfloat16) is None


@pytest.mark.fault("B29")
def test_a_version_of_vllm_that_nobody_proved_has_kv_of_its_own() -> None:
    assert kv_version("0.32.0") == "0.32.0"
    for version in ("0.32.1", "0.33.0", "0.32", "", "0.32.0.dev1+g0"):
        assert kv_version(version) == version
