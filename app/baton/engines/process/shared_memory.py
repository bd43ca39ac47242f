"""Find the shared memory of an engine's processes, and release it when they were killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = {"psm_": ("/psm_", "shared_memory"), "sem.mp-": ("/mp-", "semaphore")}
"""File name prefixes of Python's shared memory and semaphores: prefix and kind in the resource tracker."""


def segments_of(processes: Iterable[psutil.Process]) -> Iterator[Path]:
    """Yield the files of shared memory that these processes have open."""
    known: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended, or we may not look at it
            known |= {Path(mapped.path) for mapped in process.memory_maps()}
    for path in sorted(known):
        if path.parent == SHARED_MEMORY and path.name.startswith(tuple(SEGMENTS)):
            yield path


def release(segment: Path) -> None:
    """Release shared memory whose owner was killed; else it would stay until this process ends."""
    if not segment.exists():
        return
    for prefix, (tracked, kind) in SEGMENTS.items():
        if segment.name.startswith(prefix):
            segment.unlink(missing_ok=True)
            resource_tracker.unregister(tracked + segment.name.removeprefix(prefix), kind)
