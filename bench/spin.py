"""Choose how long an engine's OpenMP threads wait before they sleep: `python bench/spin.py` (a minute).

It needs torch alone. One process computes what a decoding step of SmolLM2-135M computes, on as many bound
threads as there are cores; another, the front end, needs a processor between two steps, as the gateway does.
While the threads spin they hold every core, so a step begins late; when they sleep too soon, each parallel
region wakes them. Printed are steps/s for each `GOMP_SPINCOUNT`, medians of alternating rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

COUNTS = (None, "1000", "3000", "10000", "30000", "100000", "300000")
"""Values of `GOMP_SPINCOUNT`; None: libgomp's own, some milliseconds."""
LAYERS, HIDDEN, INNER = 30, 576, 1536
FRONT_END_S = 0.001
SECONDS = 2.0


def step_rate(threads: int) -> float:
    """Steps a second of a model that answers a front end after each one."""
    import torch

    weights = [torch.randn(HIDDEN, width).to(torch.bfloat16) for width in (960, HIDDEN, INNER, INNER)]
    down = torch.randn(INNER, HIDDEN).to(torch.bfloat16)
    torch.set_num_threads(threads)
    front = subprocess.Popen(
        [sys.executable, "-S", __file__, "--front"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert front.stdin is not None
    assert front.stdout is not None

    def step() -> None:
        values = torch.ones(8, HIDDEN, dtype=torch.bfloat16)
        for _ in range(LAYERS):
            for weight in weights:
                inner = values @ weight
            values = torch.nn.functional.silu(inner) @ down
            values = values / values.abs().amax()
        front.stdin.write(b"x")  # type: ignore[union-attr]
        front.stdout.read(1)  # type: ignore[union-attr]

    for _ in range(20):
        step()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        step()
        steps += 1
    rate = steps / (time.perf_counter() - began)
    front.stdin.close()
    front.wait()
    return rate


def front_end() -> None:
    """Take a processor for a millisecond whenever a byte comes, then answer."""
    while os.read(0, 1):
        began = time.thread_time()
        while time.thread_time() - began < FRONT_END_S:
            pass
        os.write(1, b"x")


def main() -> None:
    """Measure each value in a process of its own, rounds alternating."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--front", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.front:
        return front_end()
    if options.one:
        return print(step_rate(options.one))
    cores = sorted(os.sched_getaffinity(0))
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    runtime = next((Path(spec.origin).parent / "lib").glob("libgomp*"), None)
    bound = {
        "OMP_NUM_THREADS": str(len(cores)),
        "GOMP_CPU_AFFINITY": " ".join(map(str, cores)),
        **({"LD_PRELOAD": str(runtime)} if runtime else {}),
    }
    seen: dict[str | None, list[float]] = {count: [] for count in COUNTS}
    for number in range(options.rounds):
        for count in COUNTS if number % 2 == 0 else COUNTS[::-1]:
            spin = {} if count is None else {"GOMP_SPINCOUNT": count}
            command = [sys.executable, __file__, "--one", str(len(cores))]
            told = subprocess.run(
                command, env=os.environ | bound | spin, capture_output=True, check=True, text=True
            )
            seen[count].append(float(told.stdout))
    print(f"{len(cores)} cores\n\n| GOMP_SPINCOUNT | steps/s |\n|---|---|")
    for count, rates in seen.items():
        print(f"| {count or 'libgomp decides'} | {statistics.median(rates):.1f} |")
    return None


if __name__ == "__main__":
    main()
