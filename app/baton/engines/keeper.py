"""Sees to it that no engine outlives its gateway, also one that was killed.

The keeper is a small process of its own. It waits for the end of a pipe that the gateway holds, then ends
whatever carries the gateway's mark in its environment, as all do that an engine is made of. vLLM's engine
processes notice the end of their workers, but not that of the process that started them.

Run as a script in an interpreter without packages, so it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "VLLM_GATEWAY_MARK"
SPARED = b"resource_tracker"
"""It gives back shared memory once the others are gone, and then ends."""
ROUNDS, ROUND_S = 20, 0.25
"""A process that is being started when the gateway ends shows up a little later."""


class Keeper:
    """The gateway's side: a context in which engines may be started.

    Attributes:
        mark: what stands in the environment of everything that is not to outlive the gateway, under `MARK`.
    """

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Keeper:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )
        return self

    def __exit__(self, *_: object) -> None:
        """The engines are gone by now; what is not is ended."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ROUNDS * ROUND_S * 2)


def marked(mark: str) -> Iterator[int]:
    """The processes whose environment holds the mark, but for this one and resource trackers."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if wanted in variables and SPARED not in (folder / "cmdline").read_bytes():
                yield int(folder.name)


def end(mark: str) -> int:
    """End the processes with the mark, until none shows up any more; returns how many there were."""
    ended = 0
    for _ in range(ROUNDS):
        found = list(marked(mark))
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended += len(found)
        if not found:
            break
        time.sleep(ROUND_S)
    return ended


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(sys.argv[1])
