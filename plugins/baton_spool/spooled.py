"""Temporary files and folders: made under a name nobody can foresee, locked until they are removed.

The lock (flock(2)) goes with its process, however that ends: what bears a name of ours and no lock was left
behind by a process that was killed, and the next start sweeps it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from baton_spool.folders import opened, place

WITHOUT_WAITING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_MODE, FOLDER_MODE = 0o600, 0o700


@dataclass(frozen=True)
class Naming:
    """How files, or folders, of one use are called: `prefix`, sixteen hexadecimal digits, `suffix`."""

    prefix: str
    suffix: str = ""
    folders: bool = False

    def new(self) -> str:
        """Draw a name."""
        return f"{self.prefix}{secrets.token_hex(8)}{self.suffix}"

    def fits(self, name: str) -> bool:
        """Whether a name may have been drawn."""
        return bool(re.fullmatch(f"{re.escape(self.prefix)}[0-9a-f]{{16}}{re.escape(self.suffix)}", name))


@dataclass(frozen=True)
class Swept:
    """What a sweep did.

    Attributes:
        removed: files and folders that killed processes had left.
        foreign: names that fit, of links, pipes and what else is not this user's file or folder; untouched.
    """

    removed: int = 0
    foreign: tuple[str, ...] = ()


class Made:
    """A file or a folder in use, empty at first; the caller's to `remove`, from any thread.

    Attributes:
        path: for those who open it by name.
        descriptor: holds the lock; of a file, open for reading and writing.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._here = True
        self._lock = threading.Lock()

    def remove(self) -> None:
        """Remove it with what is in it, and free its lock; a second call does nothing."""
        with self._lock:
            here, self._here = self._here, False
        if not here:
            return
        try:
            with contextlib.suppress(OSError), opened(self.path.parent) as folder:
                _remove(folder, self.path.name, self.descriptor)
        finally:
            os.close(self.descriptor)


def make(folder: Path | None, naming: Naming) -> Made:
    """Make a file or a folder that this user alone may open, and lock it.

    Args:
        folder: to make it in; None: the system's folder for temporary files.
        naming: of its use.

    Raises:
        FolderRefused: see `folders.opened`.
        OSError: there is no room, or no right to write.
    """
    with opened(folder) as parent:
        while True:
            name = naming.new()
            descriptor = (
                _new_folder(parent, name) if naming.folders else os.open(name, NEW, FILE_MODE, dir_fd=parent)
            )
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is(parent, name, descriptor):
                return Made(place(folder) / name, descriptor)
            os.close(descriptor)  # another process swept it before it was locked


def sweep(folder: Path | None, *namings: Naming) -> Swept:
    """Remove what killed processes of this user left behind: what is named so, and locked by nobody.

    What is not a regular file or a folder, belongs to another user, or has another mode than `make` gives, is
    neither opened nor removed, so that a pipe cannot hold the start up.

    Raises:
        FolderRefused: see `folders.opened`.
    """
    removed, foreign = 0, []
    with opened(folder) as parent:
        for name in os.listdir(parent):
            naming = next((naming for naming in namings if naming.fits(name)), None)
            if naming is None:
                continue
            with contextlib.suppress(OSError):  # somebody else removed it, or has it locked
                if _is_ours(os.stat(name, dir_fd=parent, follow_symlinks=False), naming):
                    removed += _sweep_one(parent, name, naming)
                else:
                    foreign.append(name)
    return Swept(removed, tuple(sorted(foreign)))


def _new_folder(parent: int, name: str) -> int:
    os.mkdir(name, FOLDER_MODE, dir_fd=parent)
    return os.open(name, WITHOUT_WAITING | os.O_DIRECTORY, dir_fd=parent)


def _sweep_one(parent: int, name: str, naming: Naming) -> bool:
    descriptor = os.open(name, WITHOUT_WAITING, dir_fd=parent)
    try:
        if not _is_ours(os.fstat(descriptor), naming):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _remove(parent, name, descriptor)
    finally:
        os.close(descriptor)


def _is_ours(found: os.stat_result, naming: Naming) -> bool:
    kind, mode = (stat.S_ISDIR, FOLDER_MODE) if naming.folders else (stat.S_ISREG, FILE_MODE)
    return kind(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o777 == mode


def _is(parent: int, name: str, descriptor: int) -> bool:
    """Whether a name still leads to what is open."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=parent, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove(parent: int, name: str, descriptor: int) -> bool:
    """Remove what is open, if it still has the name; with all that a folder holds."""
    if not _is(parent, name, descriptor):
        return False
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.unlink(name, dir_fd=parent)
        return True
    for inner in os.listdir(descriptor):
        try:
            os.unlink(inner, dir_fd=descriptor)
        except IsADirectoryError:
            shutil.rmtree(inner, dir_fd=descriptor)
    os.rmdir(name, dir_fd=parent)
    return True
