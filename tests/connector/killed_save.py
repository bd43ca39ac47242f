"""Saves entries until it is killed: before each system call of a save in turn, or at random moments.

`killed_save.py calls|pages|chain|ranks|ranks-pages|moments ROOT`. Every kill has a folder of its own under ROOT; each line of the
answer is its name and where the kill was, the last one is `survived` but for `moments`.
"""

from __future__ import annotations

import fcntl
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton_kv.contract import new_key
from baton_kv.entry import Entry, seal, write, write_share
from baton_kv.folders import store_secret
from baton_kv.format import EntryDescription, EntryLayout, LayerShape, Part
from baton_kv.stores import file
from baton_kv.stores.base import SharedFiles

OS_CALLS = ("open", "close", "mkdir", "utime", "fsync", "rename", "link", "unlink", "pwrite", "ftruncate")
OS_CALLS += ("posix_fallocate",)
LAYERS, HEADS, BLOCKS, SLAB_BYTES = 3, 2, 4, 16 * 1024
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

        def writev(descriptor: int, buffers: list[memoryview]) -> int:
            countdown.tick("writev")
            return os.write(descriptor, b"".join(buffers)[:PIECE])

        for name in OS_CALLS:
            self.stand_before(os, name)
        self.stand_before(fcntl, "flock")
        setattr(os, "writev", writev)  # noqa: B010


class Saves:
    """A store, opened anew, and entries to save in it.

    Args:
        root: folder of the store.
        room_for: number of entries that fit the budget.
    """

    def __init__(self, root: Path, room_for: int) -> None:
        size = LAYERS * BLOCKS * SLAB_BYTES
        self.store = file.FileStore(root, budget=size * room_for + size // 2, fsync=True)
        self._secret = store_secret(root)
        self._layer = [memoryview(random.randbytes(SLAB_BYTES)) for _ in range(HEADS * BLOCKS)]

    def _described(self, parts: tuple[Part, ...] = ()) -> EntryDescription:
        shapes = (LayerShape(HEADS, SLAB_BYTES // HEADS),) * LAYERS
        first = parts[-1].stop if parts else 0
        return EntryDescription(new_key("local"), "f" * 64, 50, 49, shapes, BLOCKS, (first,), parts)

    def _slabs(self, _layer: int, heads: range, blocks: range) -> list[memoryview]:
        return [slab[: SLAB_BYTES // HEADS] for slab in self._layer[: len(heads) * len(blocks)]]

    def put(self, parts: tuple[Part, ...] = ()) -> Part:
        """Save an entry; return it as a part of another."""
        described = self._described(parts)
        shared = SharedFiles(tuple(part.key for part in parts), parts[-1].key if parts else "")
        whole = write(described, range(50), self._slabs, self._secret)
        self.store.put(described.key, whole, size=described.kv_bytes, shared=shared)
        with self.store.open(described.key) as reader:
            return Part(described.key, Entry(reader, described.key, self._secret).digest, 2)

    def put_by_ranks(self) -> None:
        """Save an entry as two ranks do, one after the other."""
        described, name = self._described(), secrets.token_hex(16)
        size = EntryLayout(described).size
        for rank in range(2):
            with self.store.draft(described.key, name, size=size, rank=rank, ranks=2) as draft:
                write_share(draft, described, lambda _: range(rank, rank + 1), self._slabs, self._secret)  # noqa: B023  # called at once
                if draft.finish():
                    seal(draft, described, range(50), self._secret)
                    draft.place()


def in_the_other_s_room(root: Path) -> None:
    """Save two entries, the second where the first was."""
    saves = Saves(root, 1)
    saves.put()
    saves.put()


def in_a_chain(root: Path) -> None:
    """Save an entry and one that continues it, and delete the first."""
    saves = Saves(root, 4)
    first = saves.put()
    saves.put((first,))
    saves.store.delete(first.key)


def by_ranks(root: Path) -> None:
    """Save an entry that two ranks write together."""
    Saves(root, 2).put_by_ranks()


def at_every_call(root: Path, work: Callable[[Path], None]) -> None:
    """Kill before the first call, before the second, and so on, until there is no such call."""
    for number in range(1, 1000):
        child = os.fork()
        if child == 0:
            Countdown(number, str(number)).stand_before_all()
            work(root / str(number))
            print(number, "survived", flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1] != signal.SIGKILL:
            return


def at_random_moments(root: Path) -> None:
    moments = random.Random(7)
    for number in range(1, KILLS + 1):
        child = os.fork()
        if child == 0:
            saves = Saves(root / str(number), 3)
            while True:
                saves.put()
        time.sleep(moments.uniform(0, MOMENT_S))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        print(number, "moment", flush=True)


if __name__ == "__main__":
    when, folder = sys.argv[1], Path(sys.argv[2])
    if when == "moments":
        at_random_moments(folder)
    else:
        if when.endswith("pages"):  # so small that a save has some
            setattr(file, "LARGE_PAGE_BYTES", PIECE)  # noqa: B010
        ranked = {"ranks": by_ranks, "ranks-pages": by_ranks}
        work = ({"chain": in_a_chain} | ranked).get(when, in_the_other_s_room)
        at_every_call(folder, work)
