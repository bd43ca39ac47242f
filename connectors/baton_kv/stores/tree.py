"""Access the folders of a file store: name, list, share, measure and remove the files of entries.

A file that several entries need has a name (a hard link) for each of them. Its bytes are free when its last
name is removed. Functions take descriptors of folders, never paths.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from baton_kv.folders import LOCK, FolderNotPrivate, bytes_in, folder, open_file, open_folder
from baton_kv.stores.base import MAX_SHARED, SharedFiles, SharedMissing, StoreError

KEY = re.compile(r"[a-z0-9][a-z0-9-]{0,63}/[A-Za-z0-9_-]{16,64}")
SUFFIX = ".kv"
PIN = ".pin"
LINK = re.compile(r"[0-9]{3}")
"""Pattern of what follows an entry's id in the name of a file that it shares."""
IMAGES = "images"
RECORDS = "records"
WRITING = "writing"
KEPT_IN_QUARANTINE = 2
RECORDS_TOTAL = "total"
"""File in the folder of the records: the bytes that they take, as decimal digits."""
WRITTEN = "written"
"""File in the root: the bytes of all entries that were ever placed, as decimal digits."""
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

    def add_scope(self, scope: str, target: int) -> None:
        """Add the entries and files in a scope's folder, of which `target` is the descriptor."""
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
                    if each.inode() not in used and not self._measured(used, each):
                        continue
                    if kind == SUFFIX[1:]:
                        own[stem] = each.inode()
                    else:
                        shared[stem].add(each.inode())
        self.scopes.update(dict.fromkeys(used, scope))
        for stem, file in own.items():
            files = frozenset(shared.pop(stem, ()))
            self.entries.append(StoredEntry(scope, f"{stem}{SUFFIX}", file, files, used[file], stem in pins))
        for loose in shared.values():
            self.loose.update(loose)

    def _measured(self, used: dict[int, int], each: os.DirEntry[str]) -> bool:
        """Note a file's size and time of last use; return False if it was removed or is no regular file."""
        try:
            status = each.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(status.st_mode):
            return False
        self.sizes[each.inode()], used[each.inode()] = status.st_size, status.st_mtime_ns
        return True


class StoreTree:
    """The folders of the file store in `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def folder(self, name: str) -> Iterator[int]:
        """Open one of the root's folders for the time of the context; gives its descriptor."""
        with folder(self.root) as top:
            descriptor = open_folder(self.root / name, name=name, within=top)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def scope(self, scope: str) -> Iterator[int]:
        """Open the folder of a scope's entries for the time of the context; gives its descriptor."""
        with self.folder("entries") as entries:
            descriptor = open_folder(self.root / "entries" / scope, name=scope, within=entries)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock, which excludes other processes and threads that enforce the budget."""
        with folder(self.root) as top:
            descriptor = open_file("lock", within=top, flags=LOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def listing(self) -> Listing:
        """List the entries and files of all scopes.

        Raises:
            StoreError: a folder cannot be listed.
        """
        found = Listing()
        try:
            for scope, target in self._scopes():
                found.add_scope(scope, target)
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None
        return found

    def unlink_loose(self, but: str = "") -> None:
        """Remove names of shared files whose entry has no file of its own, as killed processes leave them.

        Called with the lock held. Names with the stem `but` are linked for an entry that is being written.
        """
        for _, target in self._scopes():
            names = os.listdir(target)
            stems = {but, *(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))}
            for name in names:
                stem, _, kind = name.partition(".")
                if LINK.fullmatch(kind) and stem not in stems:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=target)

    def _scopes(self) -> Iterator[tuple[str, int]]:
        """Yield every scope and a descriptor of its folder."""
        with self.folder("entries") as entries:
            for scope in os.listdir(entries):
                place = folder(self.root / "entries" / scope, name=scope, within=entries)
                # Removed since it was listed, or not a folder of this user: it holds no entry.
                with contextlib.suppress(FileNotFoundError, FolderNotPrivate), place as target:
                    yield scope, target

    def bytes_beside(self) -> int:
        """Return the bytes of the gateway's images and records, which count towards the budget.

        Raises:
            StoreError: a folder cannot be listed.
        """
        try:
            with folder(self.root) as top:
                return bytes_in(IMAGES, within=top) + _number_in(f"{RECORDS}/{RECORDS_TOTAL}", top)
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None

    def being_written(self, but: str = "", without: str = "") -> int:
        """Return the bytes of the files that are being written, which have no place yet.

        Args:
            but: a file that is left out.
            without: the beginning of the names of others that are; empty: of none.

        In memory a file has its size from the beginning.

        Raises:
            StoreError: the folder cannot be listed.
        """
        total = 0
        try:
            with self.folder(WRITING) as writing, os.scandir(writing) as listed:
                for each in listed:
                    with contextlib.suppress(FileNotFoundError):  # placed, or given up
                        left_out = each.name == but or (without and each.name.startswith(without))
                        total += 0 if left_out else each.stat(follow_symlinks=False).st_size
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None
        return total

    def written(self) -> int:
        """Return the bytes of all entries that were ever placed."""
        with folder(self.root) as top:
            return _number_in(WRITTEN, top)

    def add_written(self, size: int) -> None:
        """Count an entry that is about to be placed; called with the lock held."""
        with folder(self.root) as top:
            total = _number_in(WRITTEN, top) + size
            descriptor = open_file(WRITTEN, within=top, flags=LOCK)
        try:
            os.pwrite(descriptor, f"{total:020}".encode(), 0)
        finally:
            os.close(descriptor)

    def quarantine(self, scope: str, corrupt: str) -> None:
        """Move a corrupt file away, of which `corrupt` is a name in the scope; remove all its other names."""
        with self.scope(scope) as source, self.folder("quarantine") as target:
            found = _names_of(os.stat(corrupt, dir_fd=source, follow_symlinks=False).st_ino, source)
            os.rename(corrupt, f"{time.time_ns()}{SUFFIX}", src_dir_fd=source, dst_dir_fd=target)
            for each in found:
                _unlink_corrupt(each, source)
            for old in sorted(os.listdir(target))[:-KEPT_IN_QUARANTINE]:
                os.unlink(old, dir_fd=target)

    def evict(self, entry: StoredEntry) -> None:
        """Remove an entry's names, if they are still there."""
        with contextlib.suppress(FileNotFoundError), self.scope(entry.scope) as target:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.name, dir_fd=target)
            unlink_shared(entry.name, target)


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


def link_of(name: str, index: int) -> str:
    """Return an entry's name for the shared file `index`; `name` is that of its own file."""
    return f"{name.removesuffix(SUFFIX)}.{index:03}"


def make_scope(scope: str, entries: int) -> bool:
    """Create a scope's folder if it is missing; return whether it was."""
    try:
        os.mkdir(scope, 0o700, dir_fd=entries)
    except FileExistsError:
        return False
    return True


def touch(descriptor: int) -> None:
    """Set a file's time of last use to now, finer than the kernel's clock tick."""
    now = time.time_ns()
    os.utime(descriptor, ns=(now, now))


def link_shared(shared: SharedFiles, name: str, target: int) -> None:
    """Link the files that an entry shares under names of its own, in the folder of its scope.

    Raises:
        SharedMissing: one of the files is not there, or the device has no further names for it.
    """
    for index, key in enumerate(shared.keys):
        holder = split(shared.holder)[1]
        # The holder's first: under the key itself there may be another entry by now.
        names = (link_of(holder, index), split(key)[1])
        if not any(_linked(source, link_of(name, index), target) for source in names):
            raise SharedMissing(f"the entry needs {key}, which is not there")


def _linked(source: str, link: str, target: int) -> bool:
    """Link a file under another name and mark it as used now; return whether that was possible."""
    try:
        os.link(source, link, src_dir_fd=target, dst_dir_fd=target, follow_symlinks=False)
        os.utime(link, dir_fd=target, follow_symlinks=False)
    except OSError:
        return False
    return True


def rename_shared(count: int, stem: str, name: str, target: int) -> None:
    """Replace an entry's shared files by the `count` files that were linked under a temporary stem."""
    unlink_shared(name, target)
    for index in range(count):
        os.rename(link_of(stem, index), link_of(name, index), src_dir_fd=target, dst_dir_fd=target)


def unlink_shared(name: str, target: int, first: int = 0) -> None:
    """Remove an entry's names of shared files, from index `first` on; a file without names is gone."""
    with contextlib.suppress(FileNotFoundError):
        for index in range(first, MAX_SHARED):
            os.unlink(link_of(name, index), dir_fd=target)


def _unlink_corrupt(name: str, target: int) -> None:
    """Remove one of the names of a corrupt file, and what is of no use to its entry without it."""
    stem, _, kind = name.partition(".")
    names = [name, f"{stem}{PIN}"] if name.endswith(SUFFIX) else [name]
    for each in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each, dir_fd=target)
    unlink_shared(stem, target, 0 if name.endswith(SUFFIX) else int(kind) + 1)


def _names_of(file: int, target: int) -> list[str]:
    """Return the names that a file has in a scope's folder: of its own entry, and of those that share it."""
    with os.scandir(target) as listed:
        names = [each.name for each in listed if each.inode() == file]
    kinds = {name: name.partition(".")[2] for name in names}
    return [name for name, kind in kinds.items() if kind == SUFFIX[1:] or LINK.fullmatch(kind)]


def require_numbers(root: Path, top: int) -> None:
    """Refuse a file system whose listings give files other numbers (inodes) than the files have.

    Raises:
        StoreError: shared files could not be told apart, or counted.
    """
    with os.scandir(top) as listed:
        folders = [each for each in listed if each.is_dir(follow_symlinks=False)]
    if any(each.inode() != each.stat(follow_symlinks=False).st_ino for each in folders):
        raise StoreError(f"{root}: files have no stable numbers on this file system; use another one")


def remove_abandoned(target: int, named: re.Pattern[str]) -> None:
    """Remove temporary files that a killed writer left in a folder; `named` is the pattern of their names."""
    for name in os.listdir(target):
        with contextlib.suppress(OSError):
            age = time.time() - os.stat(name, dir_fd=target, follow_symlinks=False).st_mtime
            if named.fullmatch(name) and age > ABANDONED_AFTER_S:
                os.unlink(name, dir_fd=target)


def _number_in(name: str, top: int) -> int:
    """Return the number in a file; 0 if the file is missing or holds no number."""
    try:
        with FileIO(open_file(name, within=top), "rb") as stream:
            return max(0, int(stream.read(32)))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return 0
