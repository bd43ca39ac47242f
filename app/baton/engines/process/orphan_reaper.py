"""Kill the engine processes that a gateway leaves behind when it ends, also when it was killed.

The orphan reaper is a small process of its own. It holds one end of a pipe and lists the gateway's
descendants every second; when the gateway has ended, the pipe closes, and the reaper kills them. Processes
started since the last look are found by the gateway's mark in their environment, which vLLM's processes show
until they set their title. vLLM's processes notice when their workers end, but not when their parent does.

At last the reaper removes the engines' temporary folder: vLLM leaves its sockets there even when it ends
by itself.

It runs as a script in an interpreter without packages, so this file imports the standard library alone.
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
"""Most characters of `parent`: a socket's whole path may have 107, and vLLM's name for it has 36."""
SPARED = b"resource_tracker"
"""Python's resource tracker is not killed: it releases shared memory once the others are gone, then ends."""
LOOK_EVERY_S = 1.0
"""Seconds between two looks: much less than vLLM's processes take until they set their title."""
ROUNDS, ROUND_S = 20, 0.25
"""Rounds of killing, and seconds between them: a process that was being started shows up a little later."""


class OrphanReaper:
    """The gateway's side of the orphan reaper: a context within which engines may be started.

    Args:
        parent: folder in which the engines' temporary folder is made; None: the machine's temporary folder.

    Attributes:
        mark: value that `MARK` must have in the environment of all that is not to outlive the gateway.
        scratch: path of the engines' temporary folder, made on entry and removed on exit.
    """

    def __init__(self, parent: str | None = None) -> None:
        self.mark = secrets.token_hex(16)
        self.scratch = ""
        self._parent = parent or tempfile.gettempdir()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> OrphanReaper:
        short = len(self._parent) <= LONGEST_FOLDER
        self.scratch = tempfile.mkdtemp(prefix="baton-", dir=self._parent if short else "/tmp")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.mark, str(os.getpid()), self.scratch],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C in the terminal does not end it
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes that are left, remove the temporary folder, and wait until that is done."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ROUNDS * ROUND_S * 2)


def marked(mark: str) -> Iterator[int]:
    """Yield the ids of processes whose environment holds the mark, except this one and resource trackers."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if wanted in variables and not spared(int(folder.name)):
                yield int(folder.name)


StartedProcess = tuple[int, str]
"""A process id and its start time, so that a later process with the same id is not mistaken for it."""


def parents() -> dict[StartedProcess, int]:
    """Return every process with its parent's id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name), fields[19]] = int(fields[1])
    return found


def descendants(roots: set[int]) -> set[StartedProcess]:
    """Return all processes below those with these ids, except this one."""
    left, known, found = parents(), set(roots), set[StartedProcess]()
    while below := {process for process, parent in left.items() if parent in known}:
        found |= below
        known |= {pid for pid, _ in below}
        left = {process: parent for process, parent in left.items() if process not in below}
    return {(pid, started) for pid, started in found if pid != os.getpid()}


def kill_all(mark: str, known: set[StartedProcess]) -> int:
    """Kill these processes, their descendants and all with the mark, round by round until none shows up.

    Returns:
        The number of processes killed.
    """
    killed: set[int] = set()
    for _ in range(ROUNDS):
        alive = {pid for pid, _ in known & parents().keys()}
        below = {pid for pid, _ in descendants(alive)}
        victims = {pid for pid in alive | below if not spared(pid)} | set(marked(mark))
        for pid in victims:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not victims - killed:
            break
        killed |= victims
        time.sleep(ROUND_S)
    return len(killed)


def spared(pid: int) -> bool:
    """Return whether a process is not to be killed: it is a resource tracker, or has ended already."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return SPARED in words or not words
    return True


def watch(mark: str, gateway: int, scratch: str) -> None:
    """Follow the gateway's processes until it ends; then kill those that are left and remove `scratch`."""
    known: set[StartedProcess] = set()
    while not select.select([sys.stdin], [], [], LOOK_EVERY_S)[0]:
        known = descendants({gateway}) | (known & parents().keys())
    kill_all(mark, known)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]), sys.argv[3])
