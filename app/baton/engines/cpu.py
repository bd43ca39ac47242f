"""Read what this machine's processor is and can. No other file reads `/proc/cpuinfo`."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
X86 = ("x86_64", "AMD64")
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})
"""Flags of x86 processors that multiply bfloat16 matrices in hardware; the others emulate it."""
NOTABLE = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")
"""Flags that decide how fast a model runs, in the order in which they are named."""


@dataclass(frozen=True)
class Processor:
    """The processor of this machine.

    Attributes:
        name: its model name, as the kernel tells it.
        architecture: the instruction set, as `uname -m` tells it.
        flags: what it can, by the kernel's words; empty: the kernel does not tell.
    """

    name: str
    architecture: str
    flags: frozenset[str]

    @property
    def emulates_bfloat16(self) -> bool:
        """It is an x86 processor that is known to have no instruction for bfloat16."""
        return self.architecture in X86 and bool(self.flags) and not self.flags & BFLOAT16

    def __str__(self) -> str:
        notable = ", ".join(flag for flag in NOTABLE if flag in self.flags)
        return f"{self.name} ({notable})" if notable else self.name


def read_processor(cpuinfo: Path = CPUINFO, architecture: str | None = None) -> Processor:
    """Read the processor.

    Args:
        cpuinfo: the kernel's description of every core; the first is read.
        architecture: the instruction set; None: this machine's.
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
