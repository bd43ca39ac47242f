"""Prove on a GPU that saves and loads come after the model's work; measure them beside a plain pinned copy.

The model is a stream that is late on purpose: it sleeps and then writes KV, which a save must see; it sleeps
again and then zeroes blocks, as vLLM does before it gives them to a request, and a load must land after. The
same without fences must go wrong, or the test proves nothing.

    python bench/gpu/ordering.py                 # on an NVIDIA GPU
    python bench/gpu/ordering.py --device cpu    # the logic alone, anywhere
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from baton_kv.blocks import KVBlocks
from baton_kv.cache_groups import GroupBlocks
from baton_kv.contract import new_key
from baton_kv.messages import LoadJob, SaveJob, StepJobs
from baton_kv.secret import store_secret
from baton_kv.stores.file import FileStore
from baton_kv.worker_role import WorkerRole

LAYERS, BLOCKS, HEADS, TOKENS, VALUES = 8, 512, 8, 16, 256
"""A block of a layer of Llama-3-8B in bfloat16: 64 KiB."""
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""vLLM's layouts (`vllm.v1.kv_cache_layout`): the order of layer, block, head, token and value in memory."""
LATE_MS = 300
IDS = (7, 3, 500, 11, *range(100, 220))
BLOCKS_MOVED = (GroupBlocks(0, IDS),)
GIB = 2**30


def pool_of(layout: str, device: str) -> list[torch.Tensor]:
    """Return a view `[blocks, heads, tokens, values]` a layer, of random bfloat16 numbers."""
    shape, strides, step = (LAYERS, BLOCKS, HEADS, TOKENS, VALUES), [0] * 5, 1
    for dimension in reversed(LAYOUTS[layout]):
        strides[dimension] = step
        step *= shape[dimension]
    raw = torch.randint(-9000, 9000, (step,), dtype=torch.int16, device=device).view(torch.bfloat16)
    return list(raw.as_strided(shape, strides).unbind(0))


class Model:
    """The model's stream, which is late by `LATE_MS`; on a CPU it is never late."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._stream = torch.cuda.Stream() if self._cuda else None
        properties = torch.cuda.get_device_properties(0) if self._cuda else None
        self._cycles = int(LATE_MS * getattr(properties, "clock_rate", 1_700_000)) if self._cuda else 0

    @contextmanager
    def late(self) -> Iterator[None]:
        """Give the stream work behind a sleep; it stays this thread's current stream, as in vLLM's worker."""
        if self._stream is not None:
            torch.cuda.synchronize()
            torch.cuda.set_stream(self._stream)
            torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]  # the only way to be late
        yield


class Trial:
    """A worker over a pool in one layout.

    Args:
        layout: name of the layout.
        device: `cuda` or `cpu`.
        folder: folder of the store.
        verify: whether chunks are verified.
    """

    def __init__(self, layout: str, device: str, folder: Path, *, verify: bool = True) -> None:
        self.layers = pool_of(layout, device)
        store = FileStore(folder)
        blocks = KVBlocks(self.layers, BLOCKS)
        self.worker = WorkerRole(store, store_secret(folder), blocks, verify=verify)
        self.device = device
        self.key = new_key("bench")

    def unfence(self) -> None:
        """Let copies wait for nothing: the control, which must go wrong on a GPU."""
        if self.device == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.Stream())
            self.worker._copies.fence = lambda: done  # type: ignore[method-assign]  # the control

    def save(self) -> float:
        save = SaveJob(
            "a", self.key, tuple(range(len(IDS) * TOKENS)), 1, BLOCKS_MOVED, "bench", secrets.token_hex(16)
        )
        return self._run(StepJobs(saves=[save]))

    def load(self) -> float:
        return self._run(StepJobs(loads=[LoadJob("b", self.key, BLOCKS_MOVED, len(IDS) * TOKENS, "bench")]))

    def _run(self, jobs: StepJobs) -> float:
        self.worker.start(jobs)
        while not (finished := self.worker.poll()).outcomes:
            time.sleep(0.001)
        (outcome,) = finished.outcomes
        if outcome.failure is not None:
            raise SystemExit(f"a {outcome.kind} failed: {outcome.failure}")
        return outcome.seconds


def is_ordered(layout: str, device: str, folder: Path, *, fenced: bool) -> bool:
    """Return whether a save and a load beside a late model are what they would be beside none."""
    trial, model = Trial(layout, device, folder), Model(device)
    if not fenced:
        trial.unfence()
    index = torch.tensor(IDS, device=device)
    wanted = [
        torch.randn((len(IDS), HEADS, TOKENS, VALUES), device=device).to(torch.bfloat16) for _ in trial.layers
    ]
    untouched = [block for block in range(BLOCKS) if block not in IDS]
    with model.late():
        for layer, kv in zip(trial.layers, wanted, strict=True):
            layer[index] = kv
        trial.save()
    others = [layer[untouched].clone() for layer in trial.layers]
    with model.late():
        for layer in trial.layers:
            layer[index] = 0
        trial.load()
    if device == "cuda":
        torch.cuda.synchronize()
    trial.worker.shutdown()
    right = all(same(layer[index], kv) for layer, kv in zip(trial.layers, wanted, strict=True))
    pairs = zip(trial.layers, others, strict=True)
    return right and all(same(layer[untouched], kv) for layer, kv in pairs)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits; NaN is equal to itself."""
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


def plain_copy(device: str, size: int) -> float:
    """Return the seconds of one copy of so many bytes from pinned memory to the device."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def prove_order(device: str, folder: Path) -> int:
    """Try every layout with fences, and on a GPU without; return how many were not as they must be."""
    bad = 0
    for number, layout in enumerate(LAYOUTS):
        fenced = is_ordered(layout, device, folder / f"{number}-fenced", fenced=True)
        print(f"{layout}: with fences {'right' if fenced else 'WRONG'}", end="")
        bad += not fenced
        if device == "cuda":
            free = is_ordered(layout, device, folder / f"{number}-free", fenced=False)
            print(f", without {'RIGHT: this proves nothing' if free else 'wrong, as it must be'}", end="")
            bad += free
        print()
    return bad


def measure(device: str, folder: Path) -> None:
    """Print GiB/s of saves and loads beside a plain copy of as many bytes."""
    size = LAYERS * len(IDS) * HEADS * TOKENS * VALUES * 2
    plain = plain_copy(device, size)
    print(f"\n{size / 2**20:.0f} MiB; a plain copy from pinned memory {size / plain / GIB:.1f} GiB/s")
    for layout in ("LBHNC", "LBNHC"):
        for verify in (True, False):
            trial = Trial(layout, device, folder / f"{layout}-{verify}", verify=verify)
            saved, loaded = (min(step() for _ in range(5)) for step in (trial.save, trial.load))
            trial.worker.shutdown()
            print(
                f"{layout}, {'verified' if verify else 'not verified'}: save {size / saved / GIB:.2f} GiB/s, "
                f"load {size / loaded / GIB:.2f} GiB/s, {plain / loaded:.2f} of the plain copy"
            )


def main() -> None:
    """Prove the order, then measure; exit with 1 if something was out of order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    if device == "cuda":
        print(torch.cuda.get_device_name(0))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        bad = prove_order(device, Path(folder))
        measure(device, Path(folder))
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
