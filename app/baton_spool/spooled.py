"""Create temporary files and folders with locks, and sweep those that killed processes left behind.

The kernel releases a lock (flock(2)) when its process ends, however that happens: a file with one of our
names but without a lock was left by a killed process, and the next start removes it.
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
    """The names of temporary files for one purpose: `prefix`, sixteen hexadecimal digits, `suffix`.

    Attributes:
        prefix: beginning of the names.
        suffix: end of the names.
        folders: whether folders are created instead of files.

    Example:
        >>> Naming("baton-", ".tif").fits("baton-0123456789abcdef.tif")
        True
    """

    prefix: str
    suffix: str = ""
    folders: bool = False

    def new(self) -> str:
        """Return a new random name."""
        return f"{self.prefix}{secrets.token_hex(8)}{self.suffix}"

    def fits(self, name: str) -> bool:
        """Return whether a name has this form."""
        return bool(re.fullmatch(f"{re.escape(self.prefix)}[0-9a-f]{{16}}{re.escape(self.suffix)}", name))


@dataclass(frozen=True)
class Swept:
    """The result of a sweep.

    Attributes:
        removed: number of files and folders of killed processes that were removed.
        foreign: names of the right form that were left alone because they are links, pipes or of other users.
    """

    removed: int = 0
    foreign: tuple[str, ...] = ()


class Made:
    """A temporary file or folder in use, initially empty; the caller calls `remove`, from any thread.

    Attributes:
        path: path of the file or folder.
        descriptor: descriptor that holds the lock; of a file, open for reading and writing.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._here = True
        self._lock = threading.Lock()

    def remove(self) -> None:
        """Remove the file or folder with its contents and release the lock; a second call does nothing."""
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
    """Create and lock a temporary file or folder that only this user can open.

    Args:
        folder: the parent folder; None for the system's temporary folder.
        naming: form of the name, and whether to create a folder.

    Raises:
        FolderRefused: see `folders.opened`.
        OSError: the device is full, or the folder is not writable.
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
    """Remove the temporary files and folders that killed processes of this user left behind.

    These have a name of the given forms and no lock. Links, pipes, files of other users and files with
    another mode than `make` gives are neither opened nor removed, so that a pipe cannot block the start.

    Raises:
        FolderRefused: see `folders.opened`.
    """
    removed, foreign = 0, []
    with opened(folder) as parent:
        for name in os.listdir(parent):
            naming = next((naming for naming in namings if naming.fits(name)), None)
            if naming is None:
                continue
            with contextlib.suppress(OSError):  # removed or locked by another process
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
    """Return whether a name still refers to the open file."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=parent, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove(parent: int, name: str, descriptor: int) -> bool:
    """Remove the open file or folder with its contents, if the name still refers to it."""
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
