"""Find an engine's processes, kill them, and wait until they are gone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

# Find the shared memory of an engine's processes, and release it when they were killed.


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


LOOK_EVERY_S = 0.02


def trees_of(roots: Iterable[int | None]) -> list[psutil.Process]:
    """List processes and all their descendants; those that have ended are left out.

    Args:
        roots: process ids; None stands for a process that was never started.
    """
    found: list[psutil.Process] = []
    for pid in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid) if pid is not None else None
            if root is not None:
                found += [root, *root.children(recursive=True)]
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to those that still run: a stopped process reacts to no other signal."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def wait_until_gone(processes: Iterable[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Wait until these processes have ended, and reap those whose parent this process is.

    A zombie counts as ended: it holds no resources any more.

    Returns:
        The processes that still run after `within_s` seconds.
    """
    deadline = time.monotonic() + within_s
    left = list(processes)
    while (left := [process for process in left if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return left


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.is_running()
        _reap(process)
    return False


def _reap(process: psutil.Process) -> None:
    """Read the exit status of a worker whose core died first, where this process is a container's init.

    Processes that multiprocessing started are left to it.
    """
    started = {child.pid for child in multiprocessing.active_children()}  # this reaps its ended ones
    if process.pid not in started and process.ppid() == os.getpid():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
