"""Write one entry's file from several processes; the last that finishes puts it into place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from baton_kv.folders import CREATE
from baton_kv.stores.base import Buffer, StoreError

SEALING = "sealing"
"""Suffix of a draft that all ranks have finished, while the last of them completes it."""


class FileDraft:
    """The `Draft` interface over a file in the store's folder `writing`.

    A rank that has finished creates the empty file `NAME.RANK`. A rank that finds those of all ranks renames
    the draft to `NAME.sealing`, which succeeds for exactly one.

    Args:
        writing: descriptor of the folder.
        descriptor: descriptor of the open draft.
        name: name of the draft in the folder.
        rank: number of this rank.
        ranks: number of ranks that write.
        share: bytes that this rank is expected to write.
        write: writes some bytes at an offset; on a full device it first frees as many bytes as it is told.
            Returns the number of bytes written.
        place: moves a file of the folder to the entry's name, within the budget.
    """

    def __init__(
        self,
        writing: int,
        descriptor: int,
        name: str,
        rank: int,
        ranks: int,
        *,
        share: int,
        write: Callable[[int, memoryview, int, int], int],
        place: Callable[[str], None],
    ) -> None:
        self._writing = writing
        self._descriptor = descriptor
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._left = share
        self._write = write
        self._place = place

    def write_at(self, offset: int, parts: Sequence[Buffer]) -> None:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                written = self._write(self._descriptor, view, offset, max(len(view), self._left))
                offset += written
                self._left -= written
                view = view[written:]

    def read(self, start: int, stop: int) -> bytes:
        found = os.pread(self._descriptor, stop - start, start)
        if len(found) != stop - start:
            raise StoreError("reading a draft: it is shorter than it was")
        return found

    def finish(self) -> bool:
        os.close(os.open(marker(self._name, self._rank), CREATE, 0o600, dir_fd=self._writing))
        present = set(os.listdir(self._writing))
        if not all(marker(self._name, rank) in present for rank in range(self._ranks)):
            return False
        try:
            os.rename(self._name, self._sealing, src_dir_fd=self._writing, dst_dir_fd=self._writing)
        except FileNotFoundError:
            return False  # another rank found all finished too, and seals
        return True

    def place(self) -> None:
        self._place(self._sealing)
        with contextlib.suppress(OSError):  # the entry is in its place; what is left behind is swept
            discard(self._writing, self._name)

    @property
    def _sealing(self) -> str:
        return f"{self._name}.{SEALING}"


def marker(name: str, rank: int) -> str:
    """Return the name of the file that says that a rank has finished its share of a draft."""
    return f"{name}.{rank}"


def discard(writing: int, name: str) -> None:
    """Remove a draft and the files beside it, if they are there."""
    for each in os.listdir(writing):
        if each == name or each.startswith(f"{name}."):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(each, dir_fd=writing)
