"""Check the GPUs for `baton doctor`: driver, memory, the engines' shares, the allocator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from baton.config.environment import visible_gpus
from baton.config.gpu_memory import USABLE_SHARE, gpu_shares, gpus_of
from baton.config.settings import Settings
from baton.config.vllm_environment import allocator_remaps
from baton.doctor.findings import Finding
from baton.engines.gpus import Gpu, NoGpu, read_gpus
from baton.engines.vllm_version import installed
from baton.errors import SettingsError

GIB = 1024**3
DRIVERS = {12: 525, 13: 580}
"""The oldest driver series by CUDA's major version, from NVIDIA's table of minor version compatibility."""


def examine_gpus(settings: Settings, command: str = "nvidia-smi") -> Iterator[Finding]:
    """Check what engines on NVIDIA GPUs need.

    Args:
        settings: the settings.
        command: the driver's tool, which lists the GPUs.
    """
    try:
        gpus = read_gpus(command)
    except NoGpu as error:
        mend = "install NVIDIA's driver; without a GPU: pip install 'vllm-baton[cpu]'"
        yield Finding("gpu", f"none found: {error}", True, mend)
        return
    for gpu in gpus:
        text = f"{gpu.name}, {gpu.bytes_free / GIB:.1f} of {gpu.bytes_total / GIB:.1f} GiB free"
        yield Finding(f"gpu {gpu.index}", text)
    yield _driver(gpus[0])
    yield from _shares(settings, gpus)
    yield from _handoffs(settings)


def _driver(gpu: Gpu) -> Finding:
    runtime = installed("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")  # comes with torch
    oldest = DRIVERS.get(int(runtime.partition(".")[0])) if runtime else None
    if oldest is None:
        return Finding("driver", gpu.driver)
    series = int(gpu.driver.partition(".")[0])
    bad = series < oldest
    mend = f"install driver {oldest} or newer" if bad else ""
    return Finding("driver", f"{gpu.driver} (torch needs {oldest} or newer)", bad, mend)


def _shares(settings: Settings, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Check that every engine's GPUs are there and have room for it."""
    try:
        shares = gpu_shares(settings.own_engines)
    except SettingsError as error:
        what, _, mend = error.message.rpartition(": ")
        yield Finding("gpu shares", what, True, mend)
        return
    by_id = _by_id(gpus)
    taken: defaultdict[str, float] = defaultdict(float)
    for engine in settings.own_engines:
        if missing := [gpu for gpu in gpus_of(engine) if gpu not in by_id]:
            mend = "correct args.device_ids or args.tensor_parallel_size"
            yield Finding(f"engine {engine.name}", f"there is no GPU {', '.join(missing)}", True, mend)
            continue
        share = shares.get(engine.name, USABLE_SHARE)
        for gpu in gpus_of(engine):
            taken[gpu] += share
        text = f"GPU {', '.join(gpus_of(engine))}: {share:g} of it"
        short = any(by_id[gpu].bytes_free < taken[gpu] * by_id[gpu].bytes_total for gpu in gpus_of(engine))
        mend = "end what else uses it, or lower `gpu_share`" if short else ""
        yield Finding(
            f"engine {engine.name}", f"{text}{', which is not free now' if short else ''}", short, mend
        )


def _by_id(gpus: Sequence[Gpu]) -> dict[str, Gpu]:
    """Return the GPUs by what `device_ids` may call them: numbers count what CUDA_VISIBLE_DEVICES lists."""
    found = {name: gpu for gpu in gpus for name in (gpu.index, gpu.uuid)}
    visible = visible_gpus()
    if visible is None:
        return found
    seen = {str(number): found[name] for number, name in enumerate(visible) if name in found}
    return {gpu.uuid: gpu for gpu in seen.values()} | seen


def _handoffs(settings: Settings) -> Iterator[Finding]:
    hand_over = [engine.name for engine in settings.own_engines if engine.handoff]
    if not hand_over:
        return
    if allocator_remaps():
        mend = "unset it: vLLM refuses a KV connector beside it"
        yield Finding("allocator", "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True", True, mend)
    rest = "allowed" if settings.handoffs.unproven_devices else "refused when the engine starts"
    text = "proved on GPUs with one rank, unquantised KV and full attention"
    yield Finding("handoffs", f"{', '.join(hand_over)}: {text}; anything else is {rest}")
