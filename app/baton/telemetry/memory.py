"""Measure the memory that this process can still get, by its cgroups and by the machine.

The page cache counts as free, as in the kernel's own `MemAvailable`, for it is reclaimed before a process is
killed. Otherwise a container that has read its models would look full for ever.
Sources: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst, proc_meminfo(5).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog
from prometheus_client import Gauge

from baton.telemetry.lag import until_beat

EVERY_S = 1.0
UNLIMITED = 1 << 60
"""cgroup v1 says "no limit" with the largest number of pages there is."""


@dataclass(frozen=True)
class CgroupLayout:
    """The file names of one version of cgroups, and the reclaimable fields of its `memory.stat`."""

    limit: str
    used: str
    reclaimable: tuple[str, ...]


V2 = CgroupLayout("memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))
V1 = CgroupLayout(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)


class MemoryReader:
    """Reads the memory that is available.

    Args:
        membership: file that names the cgroups of this process.
    """

    def __init__(
        self,
        cgroups: Path = Path("/sys/fs/cgroup"),
        membership: Path = Path("/proc/self/cgroup"),
        meminfo: Path = Path("/proc/meminfo"),
    ) -> None:
        self._cgroups = cgroups
        self._membership = membership
        self._meminfo = meminfo

    def available(self) -> int | None:
        """Return the bytes that this process can still get; None: unknown."""
        found = [bytes_ for bytes_ in (*self._in_cgroups(), self._in_machine()) if bytes_ is not None]
        return min(found, default=None)

    def total(self) -> int | None:
        """Return the bytes that this process could get if no other used any; None: unknown."""
        kibibytes = _fields(self._meminfo).get("MemTotal:")
        machine = None if kibibytes is None else kibibytes * 1024
        limits = [_limit(folder, layout) for folder, layout in self._folders()]
        return min((limit for limit in (*limits, machine) if limit is not None), default=None)

    def _in_cgroups(self) -> Iterator[int | None]:
        for folder, layout in self._folders():
            yield _left(folder, layout)

    def _folders(self) -> Iterator[tuple[Path, CgroupLayout]]:
        for top, name, layout in self._hierarchies():
            own = top / name.lstrip("/")
            # In a container the name is often that on the host, and only the top is there.
            for folder in (own, *own.parents):
                yield folder, layout
                if folder == top:
                    break

    def _hierarchies(self) -> Iterator[tuple[Path, str, CgroupLayout]]:
        try:
            lines = self._membership.read_text().splitlines()
        except OSError:
            lines = ["0::/"]
        for line in lines:
            _, _, rest = line.partition(":")
            controllers, _, name = rest.partition(":")
            if not controllers:
                yield self._cgroups, name, V2
            elif "memory" in controllers.split(","):
                yield self._cgroups / "memory", name, V1

    def _in_machine(self) -> int | None:
        kibibytes = _fields(self._meminfo).get("MemAvailable:")
        return None if kibibytes is None else kibibytes * 1024


def _left(folder: Path, layout: CgroupLayout) -> int | None:
    """Return the bytes that a cgroup leaves; None: it has no limit."""
    limit = _limit(folder, layout)
    try:
        used = int((folder / layout.used).read_text())
    except (OSError, ValueError):  # missing
        return None
    if limit is None:
        return None
    fields = _fields(folder / "memory.stat")
    return max(0, limit - used + sum(fields.get(name, 0) for name in layout.reclaimable))


def _limit(folder: Path, layout: CgroupLayout) -> int | None:
    """Return a cgroup's limit in bytes; None: it has none."""
    try:
        limit = int((folder / layout.limit).read_text())
    except (OSError, ValueError):  # missing, or "max"
        return None
    return None if limit >= UNLIMITED else limit


def _fields(path: Path) -> dict[str, int]:
    """Return the lines of a file that hold a name and a number."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


class MemoryWatch:
    """Watches whether there is memory for new work.

    Args:
        reserve: bytes below which no new work is taken; also an attribute.

    Attributes:
        short: whether less than `reserve` is available.
    """

    def __init__(self, reader: MemoryReader, reserve: int, gauge: Gauge) -> None:
        self._reader = reader
        self.reserve = reserve
        self._gauge = gauge
        self._log = structlog.get_logger("baton.memory")
        self.short = False
        self.look()

    def look(self) -> None:
        """Measure once."""
        available = self._reader.available()
        self._gauge.set(math.nan if available is None else available)
        short = available is not None and available < self.reserve
        if short and not self.short:
            self._log.warning("memory_short", available=available, reserve=self.reserve)
        elif self.short and not short:
            self._log.info("memory_short_no_more", available=available, reserve=self.reserve)
        self.short = short

    async def run(self) -> None:
        """Measure every second, until cancelled."""
        while True:
            await asyncio.sleep(until_beat(EVERY_S))
            self.look()
