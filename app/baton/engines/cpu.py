"""Read this machine's processor: its name, architecture and instruction sets.

No other file reads `/proc/cpuinfo`.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
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
        """Whether this is an x86 processor that is known to have no bfloat16 instructions."""
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
