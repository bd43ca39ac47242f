"""The shared memory that an engine's processes talk through, and giving it back when they were killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = {"psm_": ("/psm_", "shared_memory"), "sem.mp-": ("/mp-", "semaphore")}
"""How Python names shared memory and semaphores as files, and what its resource tracker calls them."""


def segments_of(processes: Iterable[psutil.Process]) -> Iterator[Path]:
    """The shared memory that these processes have open, as files."""
    known: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):  # gone, or not ours to look at
            known |= {Path(mapped.path) for mapped in process.memory_maps()}
    for path in sorted(known):
        if path.parent == SHARED_MEMORY and path.name.startswith(tuple(SEGMENTS)):
            yield path


def release(segment: Path) -> None:
    """Give shared memory back whose owner was killed; else it would stay until this process ends."""
    if not segment.exists():
        return
    for prefix, (tracked, kind) in SEGMENTS.items():
        if segment.name.startswith(prefix):
            segment.unlink(missing_ok=True)
            resource_tracker.unregister(tracked + segment.name.removeprefix(prefix), kind)
