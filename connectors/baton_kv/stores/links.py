"""Give one file several names, so that entries share it; functions take descriptors of folders, never paths.

A file's bytes are free when its last name is removed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from baton_kv.stores.base import MAX_SHARED, SharedFiles, SharedMissing, StoreError
from baton_kv.stores.listing import LINK, PIN, SUFFIX, split


def link_of(name: str, index: int) -> str:
    """Return the name under which an entry has a file that it shares.

    Args:
        name: name of the entry's own file.
        index: index of the shared file.
    """
    return f"{name.removesuffix(SUFFIX)}.{index:03}"


def link_shared(shared: SharedFiles, name: str, target: int) -> None:
    """Give an entry the files that it shares, as further names (hard links) in its scope's folder.

    Args:
        shared: the files.
        name: name of the entry's own file.
        target: descriptor of the scope's folder.

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
    """Give a file of a folder another name and mark it as used now; return whether that was possible."""
    try:
        os.link(source, link, src_dir_fd=target, dst_dir_fd=target, follow_symlinks=False)
        os.utime(link, dir_fd=target, follow_symlinks=False)
    except OSError:
        return False
    return True


def require_numbers(root: Path, top: int) -> None:
    """Refuse a file system whose listings give files other numbers (inodes) than the files have.

    Args:
        root: the store's folder, for the message.
        top: its descriptor.

    Raises:
        StoreError: shared files could not be told apart, or counted.
    """
    with os.scandir(top) as listed:
        folders = [each for each in listed if each.is_dir(follow_symlinks=False)]
    if any(each.inode() != each.stat(follow_symlinks=False).st_ino for each in folders):
        raise StoreError(f"{root}: files have no stable numbers on this file system; use another one")


def unlink_shared(name: str, target: int, first: int = 0) -> None:
    """Remove the names under which an entry has the files that it shares; a file without names is gone.

    Args:
        name: name of the entry's own file.
        target: descriptor of the scope's folder.
        first: index of the first file that it no longer shares.
    """
    with contextlib.suppress(FileNotFoundError):
        for index in range(first, MAX_SHARED):
            os.unlink(link_of(name, index), dir_fd=target)


def unlink_corrupt(name: str, target: int) -> None:
    """Remove one of the names of a corrupt file, and what is of no use to its entry without it.

    Args:
        name: the name: an entry's own, or of a file that it shares.
        target: descriptor of the scope's folder.
    """
    stem, _, kind = name.partition(".")
    names = [name, f"{stem}{PIN}"] if name.endswith(SUFFIX) else [name]
    for each in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each, dir_fd=target)
    unlink_shared(stem, target, 0 if name.endswith(SUFFIX) else int(kind) + 1)


def names_of(file: int, target: int) -> list[str]:
    """Return the names under which entries of a scope have a file, by its number."""
    with os.scandir(target) as listed:
        names = [each.name for each in listed if each.inode() == file]
    kinds = {name: name.partition(".")[2] for name in names}
    return [name for name, kind in kinds.items() if kind == SUFFIX[1:] or LINK.fullmatch(kind)]


def rename_shared(count: int, stem: str, name: str, target: int) -> None:
    """Give an entry the files that were linked for it under another stem, instead of those that it shares.

    Args:
        count: number of these files.
        stem: the other stem.
        name: name of the entry's own file.
        target: descriptor of the scope's folder.
    """
    unlink_shared(name, target)
    for index in range(count):
        os.rename(link_of(stem, index), link_of(name, index), src_dir_fd=target, dst_dir_fd=target)


def unlink_loose(target: int, but: str = "") -> None:
    """Remove the names of shared files whose entry has no file of its own, as killed processes leave them.

    Called with the store's lock held.

    Args:
        target: descriptor of the scope's folder.
        but: stem of the names that are linked for an entry that is being written.
    """
    names = os.listdir(target)
    stems = {but, *(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))}
    for name in names:
        stem, _, kind = name.partition(".")
        if LINK.fullmatch(kind) and stem not in stems:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=target)
