"""Find an engine's processes, kill them, and wait until they are gone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterable

import psutil

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
