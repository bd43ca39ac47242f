"""Set the environment variables that vLLM reads, and find those that would overrule the settings."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

from baton.config.environment import cores
from baton.config.groups import MIB
from baton.config.settings import Settings


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
        settings: the settings of this process.
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
