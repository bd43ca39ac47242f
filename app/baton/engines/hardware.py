"""Read what processors and GPUs this machine has, and choose a model's dtype by them."""

from __future__ import annotations

import csv
import json
import math
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.config.groups import CPU_KV_CACHE_BYTES, EngineSettings
from baton.models.catalog import EMBEDDED

CPUINFO = Path("/proc/cpuinfo")
"""Read by no other file."""
X86 = ("x86_64", "AMD64")
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})
"""Flags of x86 processors that multiply bfloat16 matrices in hardware; the others emulate it."""
NOTABLE = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")
"""Flags that decide how fast a model runs, in the order in which `str(processor)` lists them."""


@dataclass(frozen=True)
class Processor:
    """The processor of this machine.

    Attributes:
        name: model name from `/proc/cpuinfo`, e.g. `Intel(R) Xeon(R) Platinum 8481C`.
        architecture: instruction set as `uname -m` prints it, e.g. `x86_64`.
        flags: features by the kernel's names, e.g. `avx2`; empty: unknown.
    """

    name: str
    architecture: str
    flags: frozenset[str]

    @property
    def emulates_bfloat16(self) -> bool:
        """True if this is an x86 processor that is known to have no bfloat16 instructions."""
        return self.architecture in X86 and bool(self.flags) and not self.flags & BFLOAT16

    def __str__(self) -> str:
        notable = ", ".join(flag for flag in NOTABLE if flag in self.flags)
        return f"{self.name} ({notable})" if notable else self.name


def read_processor(cpuinfo: Path = CPUINFO, architecture: str | None = None) -> Processor:
    """Read the processor of this machine.

    Args:
        cpuinfo: file with the kernel's description of every core; the first core is read.
        architecture: instruction set; None: this machine's.
    """
    architecture = architecture or platform.machine()
    try:
        rows = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    except OSError:
        rows = []
    fields: dict[str, str] = {}
    for key, _, value in rows:
        fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    return Processor(fields.get("model name") or architecture, architecture, frozenset(flags.split()))


MIB = 1024**2
QUERY = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version")
TIMEOUT_S = 30
"""The first call after a start loads the driver, which can take seconds."""


class NoGpu(Exception):
    """No GPU was found; the message says why."""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU.

    Attributes:
        index: its number on this machine.
        uuid: its id, `GPU-...`.
        bytes_total: bytes of its memory.
        bytes_free: bytes that no process uses.
    """

    index: str
    uuid: str
    name: str
    bytes_total: int
    bytes_free: int
    driver: str


def read_gpus(command: str = "nvidia-smi") -> list[Gpu]:
    """Find the NVIDIA GPUs that the driver's own tool lists, without importing torch or vLLM.

    Raises:
        NoGpu: the tool is missing, fails, or lists none.
    """
    query = [command, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        raise NoGpu(f"{command} is not installed") from None
    except subprocess.CalledProcessError as error:
        said = (error.stdout or error.stderr or "").strip().partition("\n")[0]
        raise NoGpu(f"{command} failed: {said or f'exit status {error.returncode}'}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoGpu(f"{command} failed: {error}") from None
    rows = [row for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True) if row]
    try:
        found = [
            Gpu(index, uuid, name, int(total) * MIB, int(free) * MIB, driver)
            for index, uuid, name, total, free, driver in rows
        ]
    except ValueError:  # [N/A] where a card has no memory of its own, as on Jetson
        raise NoGpu(f"{command} says what cannot be read: {done.stdout.strip()!r}") from None
    if not found:
        raise NoGpu(f"{command} lists none")
    return found


# Choose the dtype that an engine on a CPU computes in, where its settings name none.
#
# Most models are published in bfloat16. A processor without instructions for it emulates every product:
# SmolLM2 prefills 1,000 tokens in 16.1 s instead of 3.2 s on two cores with AVX2, and in 4.1 s instead of
# 1.5 s with AVX-512 (bench/RESULTS.md). float32 takes twice the memory, for weights and for KV; where that
# memory is missing, vLLM decides.


HALVES = ("bfloat16", "float16")
WIDE = "float32"
WIDE_BYTES = 4
BLOCK_TOKENS = 128
"""Tokens of one KV block on a CPU; the pool holds whole blocks."""
MEMORY_SHARE = 2
"""The weights may take the machine's memory divided by this; KV pools and other engines need the rest."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def dtype_for(
    settings: EngineSettings, model: Path, processor: Processor, *, memory: int | None
) -> str | None:
    """Choose the dtype of one engine.

    Args:
        memory: bytes of memory that this machine has; None: unknown.

    Returns:
        `float32`, or None where vLLM decides: the settings name a dtype, the processor has bfloat16, the
        model is quantized or not in half precision, or float32 would not fit.
    """
    embedded = EMBEDDED.get(settings.model)
    args = {**(embedded.args if embedded else {}), **settings.args}
    if "dtype" in args or args.get("quantization") or not processor.emulates_bfloat16:
        return None
    config = _config(model)
    if _own_dtype(config) not in HALVES or config.get("quantization_config"):
        return None
    weights = 2 * sum(file.stat().st_size for pattern in WEIGHTS for file in model.glob(pattern))
    if memory is not None and weights * MEMORY_SHARE > memory:
        return None
    pool = settings.kv_cache_memory or CPU_KV_CACHE_BYTES
    return WIDE if _kv_bytes(config, args) <= pool else None


def _config(model: Path) -> dict[str, Any]:
    try:
        found = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _own_dtype(config: Mapping[str, Any]) -> object:
    for place in (config, _text(config)):
        for key in ("dtype", "torch_dtype"):
            if place.get(key) is not None:
                return place[key]
    return None


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _kv_bytes(config: Mapping[str, Any], args: Mapping[str, Any]) -> float:
    """Return the bytes of KV that one context of maximum length takes in float32; infinity: unknown."""
    text = _text(config)
    try:
        heads = text["num_attention_heads"]
        size = text.get("head_dim") or text["hidden_size"] // heads
        keys = text.get("num_key_value_heads") or heads
        length = args.get("max_model_len") or text["max_position_embeddings"]
        blocks = math.ceil(length / BLOCK_TOKENS) + 1  # vLLM keeps one for itself
        return float(2 * text["num_hidden_layers"] * keys * size * WIDE_BYTES * blocks * BLOCK_TOKENS)
    except (KeyError, TypeError, ZeroDivisionError):
        return math.inf
