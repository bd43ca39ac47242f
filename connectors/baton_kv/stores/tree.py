"""The names and the files of a store's folder; functions take descriptors of folders, never paths."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from io import FileIO
from typing import NamedTuple

from baton_kv.folders import LOCK, open_file
from baton_kv.stores.base import StoreError

KEY = re.compile(r"[a-z0-9][a-z0-9-]{0,63}/[A-Za-z0-9_-]{16,64}")
SUFFIX = ".kv"
PIN = ".pin"
ABANDONED_AFTER_S = 600
"""A file that has been in `writing` this long has no writer any more."""


class Found(NamedTuple):
    """An entry as the folder lists it.

    Attributes:
        scope: the first part of its key.
        name: of its file.
        size: bytes.
        used_ns: nanoseconds since the epoch: its last use.
        pinned: it stays when others go for the budget.
    """

    scope: str
    name: str
    size: int
    used_ns: int
    pinned: bool

    @property
    def key(self) -> str:
        """Its key."""
        return f"{self.scope}/{self.name.removesuffix(SUFFIX)}"


def split(key: str) -> tuple[str, str]:
    """A key's scope, and the name of its file.

    Raises:
        StoreError: it is no key.
    """
    if KEY.fullmatch(key) is None:
        raise StoreError("not a key of this store")
    scope, _, name = key.partition("/")
    return scope, f"{name}{SUFFIX}"


def pin_of(name: str) -> str:
    """The name of the file that pins an entry."""
    return f"{name.removesuffix(SUFFIX)}{PIN}"


def make_scope(scope: str, entries: int) -> bool:
    """Make a scope's folder; whether there was none."""
    try:
        os.mkdir(scope, 0o700, dir_fd=entries)
    except FileExistsError:
        return False
    return True


def set_mark(name: str, target: int, wanted: bool) -> None:
    """Make an empty file, or remove it."""
    if wanted:
        os.close(open_file(name, within=target, flags=LOCK))
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=target)


def entries_in(scope: str, target: int) -> Iterator[Found]:
    """The entries in a scope's folder."""
    with os.scandir(target) as listed:
        files = {each.name: each for each in listed}
    for name, each in files.items():
        if not name.endswith(SUFFIX):
            continue
        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
            status = each.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield Found(scope, name, status.st_size, status.st_mtime_ns, pin_of(name) in files)


def number_in(name: str, top: int) -> int:
    """The number that a file holds; 0: there is none, or it holds no number."""
    try:
        with FileIO(open_file(name, within=top), "rb") as stream:
            return max(0, int(stream.read(32)))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return 0


def remove_abandoned(target: int, named: re.Pattern[str]) -> None:
    """Remove the files of a folder that a killed writer left behind, and nobody else's.

    Args:
        target: descriptor of the folder.
        named: what a writer calls them.
    """
    for name in os.listdir(target):
        with contextlib.suppress(OSError):
            age = time.time() - os.stat(name, dir_fd=target, follow_symlinks=False).st_mtime
            if named.fullmatch(name) and age > ABANDONED_AFTER_S:
                os.unlink(name, dir_fd=target)
