"""Set the environment variables that vLLM reads, and find those that would overrule the settings."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from baton.config.environment import cores
from baton.config.groups import MIB
from baton.config.settings import Settings

SPINS = "10000"
"""Rounds that an engine's OpenMP threads wait before they sleep (`GOMP_SPINCOUNT`): tens of microseconds,
where libgomp takes milliseconds in which the gateway waits for a processor. `bench/spin.py` measures it."""


def environment_conflicts() -> list[str]:
    """Return the variables that would overrule the settings, each with what to do instead."""
    conflicts = []
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        conflicts.append(
            "VLLM_CPU_KVCACHE_SPACE is set and would overrule every engine's kv_cache_memory: "
            "unset it and give `kv_cache_memory` per engine"
        )
    return conflicts


def allocator_remaps() -> bool:
    """Return whether torch is told to use an allocator beside which vLLM refuses any KV connector."""
    return "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def runs_eager(settings: Settings) -> bool:
    """Return whether no engine compiles its model; on a CPU that is the default."""
    return all(engine.args.get("enforce_eager", True) for engine in settings.own_engines)


def cpu_threads(settings: Settings) -> str:
    """Return the cores of the engines' threads in vLLM's notation, `RANK 0|RANK 1|...`.

    vLLM wants as many lists as an engine has ranks, and all engines read one variable: with engines of
    different numbers of ranks nothing is bound.
    """
    if settings.cpu_threads != "auto":
        return settings.cpu_threads
    ranks = {int(engine.args.get("tensor_parallel_size") or 1) for engine in settings.own_engines}
    if len(ranks) > 1:
        return "nobind"
    count, own = ranks.pop(), cores()
    parts = [own[rank::count] or own for rank in range(count)]
    return "|".join(",".join(map(str, part)) for part in parts)


def openmp_environment() -> dict[str, str] | None:
    """Compute the variables that the OpenMP runtime of an engine core of one rank on a CPU reads.

    It is what vLLM gives the worker process of a core that has one: torch's own runtime, and one thread bound
    to each core of `VLLM_CPU_OMP_THREADS_BIND`. It is read after `apply_environment`, and belongs into no
    other process. An operator's own variables stay.

    Returns:
        Variables and their values; None: the cores are not those of one rank.
    """
    cores_of_ranks = os.environ["VLLM_CPU_OMP_THREADS_BIND"]
    if not re.fullmatch(r"nobind|[0-9,-]+", cores_of_ranks):
        return None
    wanted: dict[str, str] = {}
    preloaded = os.environ.get("LD_PRELOAD", "")
    if not any(name in preloaded for name in ("libgomp", "libomp", "libiomp")):
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return {}
        torch = Path(spec.origin).parent
        found = [
            *sorted((torch.parent / "torch.libs").glob("libgomp*.so*")),
            *sorted((torch / "lib").glob("libgomp*.so*")),
        ]
        if found:
            wanted["LD_PRELOAD"] = f"{preloaded}:{found[0]}" if preloaded else str(found[0])
    if cores_of_ranks != "nobind":
        listed = [str(core) for part in cores_of_ranks.split(",") for core in _span(part)]
        wanted |= {"OMP_NUM_THREADS": str(len(listed)), "GOMP_CPU_AFFINITY": " ".join(listed)}
    return {name: value for name, value in wanted.items() if name == "LD_PRELOAD" or name not in os.environ}


def _span(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def apply_environment(
    settings: Settings,
    *,
    offline: bool,
    compiles: bool,
    marks: Mapping[str, str] | None = None,
    scratch: str | None = None,
) -> None:
    """Set the variables that vLLM reads, before it is imported; those that are set already stay.

    Args:
        offline: whether every model is on this machine, so that no hub is asked.
        marks: variables that every process started by this one carries.
        compiles: whether some engine uses torch.compile. Where none does, vLLM would still compile small
            helpers at the first request that needs one (log probabilities, say): up to 18 s in which
            every client waits, and the engine's death where there is no C++ compiler.
        scratch: temporary folder of the processes that this one starts; its own stays. None: the same.
    """
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cpu_threads(settings),
        "VLLM_LOGGING_LEVEL": "INFO" if settings.log_level == "debug" else "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
        # glibc gives large blocks back once they are free, and the kernel fills the next ones with zeros:
        # a tenth of a forward pass on a CPU. So: heap up to the most glibc allows, and kept.
        "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),
        "MALLOC_TRIM_THRESHOLD_": str(1024 * MIB),
    }
    if "OMP_WAIT_POLICY" not in os.environ:
        wanted["GOMP_SPINCOUNT"] = SPINS
    if not compiles:
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    if offline:
        wanted["HF_HUB_OFFLINE"] = "1"
    if scratch is not None:
        own = tempfile.gettempdir()  # known from now on, whatever the variable says
        os.environ["TMPDIR"] = wanted["VLLM_RPC_BASE_PATH"] = scratch
        if compiles:  # worth keeping from run to run
            wanted["TORCHINDUCTOR_CACHE_DIR"] = f"{own}/torchinductor_{os.getuid()}"
    os.environ.update(marks or {})
    for variable, value in wanted.items():
        os.environ.setdefault(variable, value)
