"""Work on several buffers as if they were one."""

from __future__ import annotations

from collections.abc import Sequence

MAX_BUFFERS = 1024
"""Most buffers that one system call takes on Linux (IOV_MAX)."""


def rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of the buffers after their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []
