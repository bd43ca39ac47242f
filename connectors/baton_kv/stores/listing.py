"""Name and list the files of a store's folders; functions take descriptors of folders, never paths."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from io import FileIO
from typing import NamedTuple

from baton_kv.folders import LOCK, open_file
from baton_kv.stores.base import StoreError

KEY = re.compile(r"[a-z0-9][a-z0-9-]{0,63}/[A-Za-z0-9_-]{16,64}")
SUFFIX = ".kv"
PIN = ".pin"
LINK = re.compile(r"[0-9]{3}")
"""Pattern of what follows an entry's id in the name of a file that it shares."""
ABANDONED_AFTER_S = 600
"""Seconds after which a file in `writing` is taken to have lost its writer."""


class StoredEntry(NamedTuple):
    """An entry as it is listed in a folder.

    Attributes:
        scope: first part of the key, the tenant's.
        name: name of its own file.
        file: number of its own file (the inode).
        shared: numbers of the files of other entries that it needs.
        used_ns: time of last use, nanoseconds since the epoch.
        pinned: whether the entry is protected from eviction.
    """

    scope: str
    name: str
    file: int
    shared: frozenset[int]
    used_ns: int
    pinned: bool

    @property
    def key(self) -> str:
        """Return the entry's key."""
        return f"{self.scope}/{self.name.removesuffix(SUFFIX)}"

    @property
    def files(self) -> frozenset[int]:
        """Return the numbers of all files that it needs."""
        return self.shared | {self.file}


@dataclass
class Listing:
    """The entries and files of a store.

    Attributes:
        entries: the entries.
        sizes: size in bytes of each file, by its number.
        scopes: scope of each file, by its number.
        loose: number of names of shared files, by file, whose entry has no file of its own: it is being
            written, or its writer was killed.
    """

    entries: list[StoredEntry] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    scopes: dict[int, str] = field(default_factory=dict)
    loose: Counter[int] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        """Return the bytes of all files, each counted once."""
        return sum(self.sizes.values())

    def by_scope(self) -> Counter[str]:
        """Return the bytes of the files of each scope."""
        held: Counter[str] = Counter()
        for file, size in self.sizes.items():
            held[self.scopes[file]] += size
        return held

    def pinned(self, also: str | None) -> dict[str, int]:
        """Return the bytes that pins protect, by scope; the entry with the key `also` counts as pinned."""
        pinned = [each for each in self.entries if each.pinned or each.key == also]
        held: Counter[str] = Counter()
        for file in {file for each in pinned for file in each.files}:
            held[self.scopes[file]] += self.sizes[file]
        return held


def split(key: str) -> tuple[str, str]:
    """Return a key's scope and the name of its file.

    Raises:
        StoreError: the key does not have the form `scope/id`.
    """
    if KEY.fullmatch(key) is None:
        raise StoreError("not a valid key; keys have the form scope/id")
    scope, _, name = key.partition("/")
    return scope, f"{name}{SUFFIX}"


def pin_of(name: str) -> str:
    """Return the name of the file that pins an entry."""
    return f"{name.removesuffix(SUFFIX)}{PIN}"


def make_scope(scope: str, entries: int) -> bool:
    """Create a scope's folder if it is missing; return whether it was."""
    try:
        os.mkdir(scope, 0o700, dir_fd=entries)
    except FileExistsError:
        return False
    return True


def set_mark(name: str, target: int, wanted: bool) -> None:
    """Create an empty file, or remove it, as `wanted` says."""
    if wanted:
        os.close(open_file(name, within=target, flags=LOCK))
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=target)


def list_scope(listing: Listing, scope: str, target: int) -> None:
    """Add the entries and files in a scope's folder to a listing.

    Args:
        listing: what is added to.
        scope: the scope.
        target: descriptor of its folder.
    """
    own: dict[str, int] = {}
    shared: dict[str, set[int]] = defaultdict(set)
    pins: set[str] = set()
    used: dict[int, int] = {}
    with os.scandir(target) as listed:
        for each in listed:
            stem, _, kind = each.name.partition(".")
            if kind == PIN[1:]:
                pins.add(stem)
            elif kind == SUFFIX[1:] or LINK.fullmatch(kind):
                if each.inode() not in used and not _measured(listing, used, each):
                    continue
                if kind == SUFFIX[1:]:
                    own[stem] = each.inode()
                else:
                    shared[stem].add(each.inode())
    listing.scopes.update(dict.fromkeys(used, scope))
    for stem, file in own.items():
        files = frozenset(shared.pop(stem, ()))
        listing.entries.append(StoredEntry(scope, f"{stem}{SUFFIX}", file, files, used[file], stem in pins))
    for loose in shared.values():
        listing.loose.update(loose)


def _measured(listing: Listing, used: dict[int, int], each: os.DirEntry[str]) -> bool:
    """Note a file's size and time of last use; return False if it was removed or is no regular file."""
    try:
        status = each.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(status.st_mode):
        return False
    listing.sizes[each.inode()], used[each.inode()] = status.st_size, status.st_mtime_ns
    return True


def number_in(name: str, top: int) -> int:
    """Return the number in a file; 0 if the file is missing or holds no number."""
    try:
        with FileIO(open_file(name, within=top), "rb") as stream:
            return max(0, int(stream.read(32)))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return 0


def remove_abandoned(target: int, named: re.Pattern[str]) -> None:
    """Remove temporary files that a killed writer left in a folder.

    Args:
        target: descriptor of the folder.
        named: pattern of the temporary files' names; other files are left alone.
    """
    for name in os.listdir(target):
        with contextlib.suppress(OSError):
            age = time.time() - os.stat(name, dir_fd=target, follow_symlinks=False).st_mtime
            if named.fullmatch(name) and age > ABANDONED_AFTER_S:
                os.unlink(name, dir_fd=target)
