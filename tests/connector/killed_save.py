"""Saves entries until it is killed: before each system call of a save in turn, or at random moments.

`killed_save.py calls|moments ROOT`. Every kill has a folder of its own under ROOT; each line of the
answer is its name and where the kill was, the last one of `calls` is `survived`.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from baton_kv.contract import new_key
from baton_kv.entry_format import EntryDescription, LayerShape
from baton_kv.entry_writer import write
from baton_kv.secret import store_secret
from baton_kv.stores import file

OS_CALLS = ("open", "close", "mkdir", "utime", "fsync", "rename", "link", "unlink")
LAYERS, BLOCKS, SLAB_BYTES = 3, 4, 16 * 1024
PIECE = 32 * 1024
KILLS = 100
MOMENT_S = 0.02


class Countdown:
    """Ends this process right before the n-th of the calls it stands in front of."""

    def __init__(self, left: int, label: str) -> None:
        self._left = left
        self._label = label

    def tick(self, call: str) -> None:
        self._left -= 1
        if self._left == 0:
            print(self._label, call, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def stand_before(self, module: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(module, name)

        def counted(*args: Any, **named: Any) -> Any:
            self.tick(name)
            return real(*args, **named)

        setattr(module, name, counted)

    def stand_before_all(self) -> None:
        countdown = self

        class CountedFile(FileIO):
            def write(self, data: Any) -> int:
                countdown.tick("write")
                return super().write(data[:PIECE])

        for name in OS_CALLS:
            self.stand_before(os, name)
        self.stand_before(fcntl, "flock")
        setattr(file, "FileIO", CountedFile)  # noqa: B010


def save(root: Path, entries: int, *, connections_allowed: int) -> None:
    """Open the store anew and save some entries, the later ones in the earlier ones' room."""
    size = LAYERS * BLOCKS * SLAB_BYTES
    store = file.FileStore(root, budget=size * connections_allowed + size // 2, fsync=True)
    secret = store_secret(root)
    layer = [memoryview(random.randbytes(SLAB_BYTES)) for _ in range(BLOCKS)]
    for _ in range(entries):
        described = EntryDescription(
            new_key("local"), "f" * 64, 50, 49, (LayerShape(1, SLAB_BYTES),) * LAYERS, BLOCKS
        )
        store.put(described.key, write(described, range(50), lambda *_: layer, secret))


def at_every_call(root: Path) -> None:
    """Kill before the first call, before the second, and so on, until there is no such call."""
    for number in range(1, 1000):
        child = os.fork()
        if child == 0:
            Countdown(number, str(number)).stand_before_all()
            save(root / str(number), 2, connections_allowed=1)
            print(number, "survived", flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1] != signal.SIGKILL:
            return


def at_random_moments(root: Path) -> None:
    moments = random.Random(7)
    for number in range(1, KILLS + 1):
        child = os.fork()
        if child == 0:
            save(root / str(number), 10**6, connections_allowed=3)
            os._exit(0)
        time.sleep(moments.uniform(0, MOMENT_S))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        print(number, "moment", flush=True)


if __name__ == "__main__":
    {"calls": at_every_call, "moments": at_random_moments}[sys.argv[1]](Path(sys.argv[2]))
