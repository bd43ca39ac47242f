"""Let a process hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def halt(pid: int) -> None:
    """Stop a process, and return when none of its threads runs any more: they go on for a while otherwise."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while not all(_is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.001)


def _is_stopped(thread: Path) -> bool:
    try:
        state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended
    return state in "TZX"


@contextmanager
def halted(pid: int) -> Iterator[None]:
    """A process hangs while inside."""
    halt(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
