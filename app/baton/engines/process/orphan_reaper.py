"""Sees to it that no engine outlives its gateway, also one that was killed.

The keeper is a small process of its own. It holds one end of a pipe and looks now and then which processes
descend from the gateway; when that is gone, so that the pipe ends, it ends them. One that was started since
the last look carries the gateway's mark in its environment, as vLLM's processes do until they are named.
They notice the end of their workers, but not that of the process that started them. Then it removes their
temporary folder: vLLM leaves its sockets behind also when it ends by itself.

Run as a script in an interpreter without packages, so it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "VLLM_GATEWAY_MARK"
LONGEST_FOLDER = 50
"""Characters of `parent`: a socket's whole path may have 107, and its own name has 36."""
SPARED = b"resource_tracker"
"""It gives back shared memory once the others are gone, and then ends."""
LOOK_EVERY_S = 1.0
"""Much less than vLLM's processes take from their start to their names."""
ROUNDS, ROUND_S = 20, 0.25
"""A process that is being started when the gateway ends shows up a little later."""


class Keeper:
    """The gateway's side: a context in which engines may be started.

    Args:
        parent: the folder that the engines' temporary folder is made in; None: the machine's temporary one.

    Attributes:
        mark: what stands in the environment of everything that is not to outlive the gateway, under `MARK`.
        scratch: the engines' temporary folder, made when the context is entered and removed at its end.
    """

    def __init__(self, parent: str | None = None) -> None:
        self.mark = secrets.token_hex(16)
        self.scratch = ""
        self._parent = parent or tempfile.gettempdir()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Keeper:
        short = len(self._parent) <= LONGEST_FOLDER
        self.scratch = tempfile.mkdtemp(prefix="baton-", dir=self._parent if short else "/tmp")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.mark, str(os.getpid()), self.scratch],
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
            if wanted in variables and not spared(int(folder.name)):
                yield int(folder.name)


Born = tuple[int, str]
"""A process and when it began, so that another one with its number is not taken for it."""


def parents() -> dict[Born, int]:
    """Every process and its parent's number."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name), fields[19]] = int(fields[1])
    return found


def descendants(roots: set[int]) -> set[Born]:
    """All processes under these."""
    left, known, found = parents(), set(roots), set[Born]()
    while under := {born for born, parent in left.items() if parent in known}:
        found |= under
        known |= {pid for pid, _ in under}
        left = {born: parent for born, parent in left.items() if born not in under}
    return {(pid, begun) for pid, begun in found if pid != os.getpid()}


def end(mark: str, known: set[Born]) -> int:
    """End these processes, what is under them and what has the mark, until none shows up any more.

    Returns:
        how many there were.
    """
    ended: set[int] = set()
    for _ in range(ROUNDS):
        alive = {pid for pid, _ in known & parents().keys()}
        under = {pid for pid, _ in descendants(alive)}
        victims = {pid for pid in alive | under if not spared(pid)} | set(marked(mark))
        for pid in victims:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not victims - ended:
            break
        ended |= victims
        time.sleep(ROUND_S)
    return len(ended)


def spared(pid: int) -> bool:
    """Whether it is a resource tracker, or gone but for its number."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return SPARED in words or not words
    return True


def keep(mark: str, gateway: int, scratch: str) -> None:
    """Look after the gateway's processes until it is gone; then end them and remove `scratch`."""
    known: set[Born] = set()
    while not select.select([sys.stdin], [], [], LOOK_EVERY_S)[0]:
        known = descendants({gateway}) | (known & parents().keys())
    end(mark, known)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    keep(sys.argv[1], int(sys.argv[2]), sys.argv[3])
