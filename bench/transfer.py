"""Bytes a second of saves and loads, beside a plain copy of the same bytes in memory. `make bench-transfer`.

The connector's worker role on a pool shaped as SmolLM2-135M's (30 layers, blocks of 128 tokens in bf16),
without an engine around it; entries in shared memory. Copy, save and loads alternate; printed are medians.
The first load is by an engine that has not seen the entry and proves it, the later one by the same engine,
which has it in memory (`resident`); "no memory" is a load of an engine that keeps nothing and proves it;
"not proved" one of an engine with `verify = false`; "other order" one that proves it, keeps nothing and
brings it into the order of a machine with AMX.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from servers import machine

from baton_kv.blocks import GroupBlocks, KVBlocks
from baton_kv.contract import new_key
from baton_kv.folders import store_secret
from baton_kv.joins.packing import AMX, PLAIN, Packings, SlabPacking
from baton_kv.messages import LoadJob, SaveJob, StepJobs
from baton_kv.stores.file import FileStore
from baton_kv.worker_role import WorkerRole

LAYERS, HEADS, BLOCK, HEAD_SIZE = 30, 3, 128, 64
GIB = 1024**3
Bytes = numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]


class Pool:
    """A KV pool and a worker over it, as one engine has them."""

    def __init__(
        self, store: FileStore, blocks: int, *, verify: bool = True, resident: int = 0, order: str = PLAIN
    ) -> None:
        pool = torch.zeros((blocks, LAYERS, HEADS, BLOCK, 2 * HEAD_SIZE), dtype=torch.bfloat16)
        pool.view(torch.int16).random_(0, 2**15)
        packing = SlabPacking.known(order, BLOCK, HEAD_SIZE, pool.dtype)
        packings = Packings.of([packing] * LAYERS)
        layers = KVBlocks([pool[:, layer] for layer in range(LAYERS)], order=packings)
        self._worker = WorkerRole(store, store_secret(store.root), layers, verify=verify, resident=resident)

    def save(self, key: str, tokens: int) -> float:
        """Save so many tokens' blocks; the seconds it took, as the worker reports them."""
        ids = tuple(range(1, 1 + -(-tokens // BLOCK)))
        blocks = (GroupBlocks(0, ids),)
        return self._run(
            StepJobs(saves=[SaveJob("a", key, tuple(range(tokens)), tokens, blocks, "bench", "0" * 32)])
        )

    def load(self, key: str, tokens: int) -> float:
        """Load them; the seconds it took, as the worker reports them."""
        ids = tuple(range(1, 1 + -(-tokens // BLOCK)))
        return self._run(StepJobs(loads=[LoadJob("b", key, (GroupBlocks(0, ids),), tokens, "bench")]))

    def _run(self, jobs: StepJobs) -> float:
        self._worker.start(jobs)
        while not (finished := self._worker.poll()).outcomes:
            time.sleep(0.002)
        (outcome,) = finished.outcomes
        assert outcome.failure is None, outcome
        return outcome.seconds


def copy(target: Bytes, source: Bytes) -> float:
    """Copy in memory, in one thread; the seconds it took."""
    began = time.perf_counter()
    numpy.copyto(target, source)
    return time.perf_counter() - began


def measure(folder: Path, tokens: int, rounds: int) -> dict[str, float]:
    """Median seconds of each, and the bytes they moved."""
    store = FileStore(folder)
    blocks = 2 + -(-tokens // BLOCK)
    size = (blocks - 2) * LAYERS * HEADS * BLOCK * 2 * HEAD_SIZE * 2
    resident = 2 * size + 1024**2
    saver, reader = (Pool(store, blocks, resident=resident) for _ in range(2))
    forgets, unproved = Pool(store, blocks), Pool(store, blocks, verify=False)
    other = Pool(store, blocks, order=AMX)
    source, target = numpy.ones(size, numpy.uint8), numpy.zeros(size, numpy.uint8)
    work: dict[str, Callable[[str], float]] = {
        "copy": lambda key: copy(target, source),
        "save": lambda key: saver.save(key, tokens),
        "first load": lambda key: reader.load(key, tokens),
        "later load": lambda key: reader.load(key, tokens),
        "no memory": lambda key: forgets.load(key, tokens),
        "not proved": lambda key: unproved.load(key, tokens),
        "other order": lambda key: other.load(key, tokens),
    }
    seen: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):
        key = new_key("bench")
        for name, one in work.items():
            seen[name].append(one(key))
        store.delete(key)
    return {name: statistics.median(values[1:]) for name, values in seen.items()} | {"bytes": size}


def main() -> None:
    """Measure, and print Markdown for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8192])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"`make bench-transfer ARGS='{' '.join(sys.argv[1:])}'`, {datetime.date.today()}, {machine()}\n")
    names = ("copy", "save", "first load", "later load", "no memory", "not proved", "other order")
    print(
        "| tokens | MiB | "
        + " | ".join(f"{name}, GiB/s | of copy" for name in names[1:])
        + " | copy, GiB/s |"
    )
    print("|---" * (1 + 2 * len(names)) + "|")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for length in options.lengths:
            found = measure(Path(folder) / "store", length, options.rounds)
            size = found["bytes"]
            cells = [f"{length}", f"{size / 1024**2:.1f}"]
            for name in names[1:]:
                cells += [f"{size / found[name] / GIB:.2f}", f"{found['copy'] / found[name]:.2f}"]
            print(f"| {' | '.join(cells)} | {size / found['copy'] / GIB:.2f} |")


if __name__ == "__main__":
    main()
