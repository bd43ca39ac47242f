"""Which cores the threads of an engine run on that a test starts without a gateway."""

from __future__ import annotations

import os

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def engine_cores(ranks: int = 1) -> str:
    """What `VLLM_CPU_OMP_THREADS_BIND` is to be: for one rank as it is already, else all cores, divided over the ranks."""
    cores = sorted(os.sched_getaffinity(0))
    parts = [cores[rank::ranks] or cores for rank in range(ranks)]
    whole = "|".join(",".join(map(str, part)) for part in parts)
    return whole if ranks > 1 else os.environ.get(VARIABLE, whole)
