"""Prove on a GPU that saves and loads come after the model's work; measure them beside a plain pinned copy.

The model is a stream that is late on purpose: it sleeps and then writes KV, which a save must see; it sleeps
again and then zeroes blocks, as vLLM does before it gives them to a request, and a load must land after. The
same without fences must go wrong, or the test proves nothing.

    python bench/gpu/ordering.py --json results.json    # on an NVIDIA GPU
    python bench/gpu/ordering.py --device cpu           # the logic alone, anywhere
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from baton_kv.blocks import GroupBlocks, KVBlocks
from baton_kv.contract import new_key
from baton_kv.entry import Tags
from baton_kv.folders import store_secret
from baton_kv.messages import LoadJob, SaveJob, StepJobs
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
GIB = 2**30
MODEL_LAYERS = 32
MEASURED = {"cuda": (2048, 8192, 30000), "cpu": (256, 512)}
"""Tokens of the contexts that are measured, with all layers of Llama-3-8B; on a CPU with `LAYERS`."""
SMALL = 2048
"""Contexts up to so many tokens are measured in several layouts."""
STEPS = {"cuda": 300, "cpu": 20}
RUN = 16 * 2**20
"""Bytes that are copied or hashed at once where the phases of a load are measured alone."""


def pool_of(layout: str, device: str, layers: int = LAYERS, blocks: int = BLOCKS) -> list[torch.Tensor]:
    """Return a view `[blocks, heads, tokens, values]` a layer, of random bfloat16 numbers."""
    shape, strides, step = (layers, blocks, HEADS, TOKENS, VALUES), [0] * 5, 1
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
        ids: the blocks that are saved and loaded.
        layers: number of layers.
        blocks: number of blocks of the pool.
    """

    def __init__(
        self,
        layout: str,
        device: str,
        folder: Path,
        *,
        verify: bool = True,
        ids: Sequence[int] = IDS,
        layers: int = LAYERS,
        blocks: int = BLOCKS,
    ) -> None:
        self.layers = pool_of(layout, device, layers, blocks)
        self.worker = WorkerRole(
            FileStore(folder), store_secret(folder), KVBlocks(self.layers, blocks), verify=verify
        )
        self.device = device
        self.key = new_key("bench")
        self.moved = (GroupBlocks(0, tuple(ids)),)
        self.tokens = len(ids) * TOKENS
        self.bytes = layers * len(ids) * HEADS * TOKENS * VALUES * 2

    def unfence(self) -> None:
        """Let copies wait for nothing: the control, which must go wrong on a GPU."""
        if self.device == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.Stream())
            self.worker._copies.fence = lambda: done  # type: ignore[method-assign]  # the control

    def save(self) -> float:
        return self._run(StepJobs(saves=[self.save_job()]))

    def load(self) -> float:
        return self._run(StepJobs(loads=[self.load_job()]))

    def save_job(self) -> SaveJob:
        tokens = tuple(range(self.tokens))
        return SaveJob("a", self.key, tokens, 1, self.moved, "bench", secrets.token_hex(16))

    def load_job(self) -> LoadJob:
        return LoadJob("b", self.key, self.moved, self.tokens, "bench")

    def _run(self, jobs: StepJobs) -> float:
        self.worker.start(jobs)
        return self.wait()

    def wait(self, work: Callable[[], None] = lambda: time.sleep(0.001)) -> float:
        """Work until what was started has ended; return its seconds."""
        while not (finished := self.worker.poll()).outcomes:
            work()
        (outcome,) = finished.outcomes
        if outcome.failure is not None:
            raise SystemExit(f"a {outcome.kind} failed: {outcome.failure}")
        return outcome.seconds


def is_ordered(layout: str, device: str, folder: Path, *, fenced: bool, graph: bool = False) -> bool:
    """Return whether a save and a load beside a late model are what they would be beside none.

    Args:
        layout: name of the layout.
        device: `cuda` or `cpu`.
        folder: folder of the store.
        fenced: whether copies wait for the model.
        graph: whether the model writes by replaying a CUDA graph.
    """
    trial, model = Trial(layout, device, folder), Model(device)
    if not fenced:
        trial.unfence()
    index = torch.tensor(IDS, device=device)
    wanted = [
        torch.randn((len(IDS), HEADS, TOKENS, VALUES), device=device).to(torch.bfloat16) for _ in trial.layers
    ]
    untouched = [block for block in range(BLOCKS) if block not in IDS]

    def forward() -> None:
        for layer, kv in zip(trial.layers, wanted, strict=True):
            layer.index_copy_(0, index, kv)

    if graph and device == "cuda":
        before = [layer.clone() for layer in trial.layers]
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            forward()
        for layer, kv in zip(trial.layers, before, strict=True):
            layer.copy_(kv)
    with model.late():
        if graph and device == "cuda":
            captured.replay()
        else:
            forward()
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


def prove_order(device: str, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Try every layout with fences, by a graph, and without fences.

    Returns:
        How many were not as they must be, and what was found. A CPU is in order without fences.
    """
    bad, rows = 0, []
    for number, layout in enumerate(LAYOUTS):
        row: dict[str, Any] = {"layout": layout}
        for name, fenced, graph in (
            ("fenced", True, False),
            ("fenced, graph", True, True),
            ("not fenced", False, False),
        ):
            found = is_ordered(layout, device, folder / f"{number}-{name}", fenced=fenced, graph=graph)
            row[name] = "right" if found else "wrong"
            bad += found != (fenced or device == "cpu")
        print(row, flush=True)
        rows.append(row)
    return bad, rows


def measure(device: str, folder: Path) -> list[dict[str, Any]]:
    """Measure saves and loads of an 8B model's KV, beside a plain copy of as many bytes."""
    rows = []
    layers = MODEL_LAYERS if device == "cuda" else LAYERS
    for tokens in MEASURED[device]:
        blocks = tokens // TOKENS
        ids = torch.randperm(blocks + 64, generator=torch.Generator().manual_seed(tokens))[:blocks].tolist()
        for layout in ("LBHNC", "LBNHC", "BLHNC") if tokens <= SMALL else ("LBHNC",):
            for verify in (True, False):
                where = folder / f"{tokens}-{layout}-{verify}"
                trial = Trial(
                    layout, device, where, verify=verify, ids=ids, layers=layers, blocks=blocks + 64
                )
                plain = plain_copy(device, trial.bytes)
                saves = [trial.save() for _ in range(2 if tokens <= SMALL else 1)]
                loads = [trial.load() for _ in range(3)]
                trial.worker.shutdown()
                row = {"tokens": blocks * TOKENS, "layout": layout, "verified": verify, "bytes": trial.bytes}
                row |= {
                    "plain_gib_s": trial.bytes / plain / GIB,
                    "save_gib_s": trial.bytes / min(saves) / GIB,
                }
                row |= {"first_load_gib_s": trial.bytes / loads[0] / GIB}
                row |= {"load_gib_s": trial.bytes / min(loads) / GIB, "load_of_plain": plain / min(loads)}
                row |= {"load_ms": min(loads) * 1000, "save_ms": min(saves) * 1000}
                rows.append({name: round(x, 3) if isinstance(x, float) else x for name, x in row.items()})
                print(rows[-1], flush=True)
                for file in where.rglob("*.kv"):
                    file.unlink()
                del trial
    return rows


def phases(device: str, folder: Path) -> dict[str, float]:
    """Measure the phases of a load alone, in one thread: GiB/s of reading, proving, copying, scattering."""
    cuda, runs = device == "cuda", 64 if device == "cuda" else 4
    file = folder / "phases"
    file.write_bytes(os.urandom(RUN) * runs)
    host = torch.empty(RUN, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(RUN, dtype=torch.uint8, device=device)
    (layer,) = pool_of("LBHNC", device, 1, 1024)
    words = layer.view(torch.int64).permute(1, 0, 2, 3)
    count = RUN // (words.numel() * 8 // 1024)
    index = torch.randperm(1024)[:count].to(device)
    slabs = target.view(torch.int64).view(HEADS, count, TOKENS, -1)
    view, tags = memoryview(host.numpy()), Tags(bytes(32))
    copied = torch.empty(RUN, dtype=torch.uint8, pin_memory=cuda)
    with file.open("rb", buffering=0) as held:
        work: dict[str, Callable[[int], Any]] = {
            "read": lambda number: os.preadv(held.fileno(), [view], number * RUN),
            "prove": lambda _: tags.make([view]),
            "host to device": lambda _: target.copy_(host, non_blocking=True),
            "scatter": lambda _: words.index_copy_(1, index, slabs),
            "gather": lambda _: torch.index_select(words, 1, index, out=slabs),
            "device to host": lambda _: copied.copy_(target, non_blocking=True),
        }
        found = {}
        for name, step in work.items():
            for _ in (0, 1):  # the second pass counts
                began = time.perf_counter()
                for run in range(runs):
                    step(run)
                if cuda:
                    torch.cuda.synchronize()
                found[name] = round(runs * RUN / (time.perf_counter() - began) / GIB, 2)
    print(found, flush=True)
    return found


def steps(device: str, folder: Path) -> dict[str, Any]:
    """Measure steps like those of decoding, alone, beside saves and beside loads: milliseconds each.

    A step reads 4 GiB of weights and writes one token's KV, by replaying a graph; the host waits for each.
    """
    cuda = device == "cuda"
    layers, blocks = (MODEL_LAYERS, 1024) if cuda else (2, 64)
    trial = Trial("LBHNC", device, folder / "steps", ids=range(blocks - 16), layers=layers, blocks=blocks)
    size = 8192 if cuda else 128
    weights = [torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(layers)]
    given = torch.randn(8, size, device=device, dtype=torch.bfloat16)

    def forward() -> None:
        state = given
        for layer, weight in zip(trial.layers, weights, strict=True):
            state = torch.nn.functional.rms_norm(state @ weight, (size,))
            layer[blocks - 1, 0, 0].copy_(state[0, :VALUES].repeat(VALUES // min(VALUES, size)))

    replay: Callable[[], None] = forward
    wait: Callable[[], None] = lambda: None  # noqa: E731  # a name for both devices
    if cuda:
        stream = torch.cuda.Stream()
        torch.cuda.set_stream(stream)
        forward()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            forward()
        replay, wait = captured.replay, stream.synchronize
    times: list[float] = []

    def step() -> None:
        began = time.perf_counter()
        replay()
        wait()
        times.append((time.perf_counter() - began) * 1000)

    def told() -> dict[str, float]:
        if not times:
            return {"steps": 0}
        ordered, count = sorted(times), len(times)
        found = {"steps": count, "median_ms": statistics.median(times), "p99_ms": ordered[int(count * 0.99)]}
        times.clear()
        return {name: round(value, 3) for name, value in found.items()}

    for _ in range(20):
        step()
    times.clear()
    results: dict[str, Any] = {"bytes": trial.bytes}
    for _ in range(STEPS[device]):
        step()
    results["alone"] = told()
    for name, jobs in (
        ("saving", StepJobs(saves=[trial.save_job()])),
        ("loading", StepJobs(loads=[trial.load_job()])),
    ):
        seconds = 0.0
        for _ in range(3):
            trial.worker.start(jobs)
            seconds += trial.wait(step)
        results[name] = told() | {"gib_s": round(3 * trial.bytes / seconds / GIB, 2)}
    trial.worker.shutdown()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream())
    print(results, flush=True)
    return results


def main() -> None:
    """Prove the order, then measure; exit with 1 if something was out of order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="file to write results to")
    parser.add_argument("--folder", default="/dev/shm", help="where entries are stored, up to 9 GiB")
    options = parser.parse_args()
    device: str = options.device
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu"}
    print(results["device"])

    def keep(name: str, value: Any) -> None:
        results[name] = value
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1))

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bad, rows = prove_order(device, Path(folder))
        keep("order", {"out_of_order": bad, "layouts": rows})
        keep("phases_gib_s", phases(device, Path(folder)))
        keep("steps", steps(device, Path(folder)))
        keep("speed", measure(device, Path(folder)))
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
