"""Temporary files and folders with unpredictable names, locked while in use and removed after a crash.

The gateway and plugins without it use this library, so it imports neither, only the standard library.

The kernel releases a lock (flock(2)) when its process ends, however that happens: a file with one of our
names but without a lock was left by a killed process, and the next start removes it. The folder is opened
without following links, and its owner and mode are checked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

WITHOUT_WAITING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_MODE, FOLDER_MODE = 0o600, 0o700
FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Naming:
    """The names of temporary files for one purpose: `prefix`, sixteen hexadecimal digits, `suffix`.

    Attributes:
        folders: whether folders are created instead of files.

    Example:
        >>> Naming("baton-", ".tif").fits("baton-0123456789abcdef.tif")
        True
    """

    prefix: str
    suffix: str = ""
    folders: bool = False

    def new(self) -> str:
        """Make a new random name."""
        return f"{self.prefix}{secrets.token_hex(8)}{self.suffix}"

    def fits(self, name: str) -> bool:
        """Check whether a name has this form."""
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


class Removed(Exception):
    """A file was removed while a thread still wrote it: its descriptor may be another file's by now."""


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

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Write bytes at the end of the file.

        Raises:
            Removed: the file was removed.
            OSError: the device is full.
        """
        with self._lock:
            if not self._here:
                raise Removed
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]

    def write_at(self, data: bytes | bytearray | memoryview, place: int) -> None:
        """Write bytes from `place` on; raises as `append`."""
        with self._lock:
            if not self._here:
                raise Removed
            rest = memoryview(data)
            while rest:
                written = os.pwrite(self.descriptor, rest, place)
                rest, place = rest[written:], place + written

    def grow(self, size: int) -> None:
        """Give the file a size without its bytes: they are zeros that take no room; raises as `append`."""
        with self._lock:
            if not self._here:
                raise Removed
            os.ftruncate(self.descriptor, size)

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

    Raises:
        FolderRefused: see `opened`.
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
        FolderRefused: see `opened`.
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
    """Check whether a name still refers to the open file."""
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


class FolderRefused(OSError):
    """A folder is not safe or not usable for temporary files; `strerror` names it and says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)


def place(folder: Path | None) -> Path:
    """Name a folder's path; for None the system's temporary folder, with links resolved."""
    return Path(os.path.realpath(tempfile.gettempdir())) if folder is None else folder


@contextmanager
def opened(folder: Path | None) -> Iterator[int]:
    """Open a folder for the time of the context; gives a descriptor, relative to which to use file names.

    Raises:
        FolderRefused: the folder is missing, a link or not a folder; belongs to a user other than this one
            and root; belongs to this user and is writable for others without the sticky bit; or cannot be
            opened.
    """
    path = place(folder)
    try:
        descriptor = os.open(path, FLAGS)
    except OSError as error:
        raise FolderRefused(_why_not(path, error)) from None
    try:
        _check(path, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def require_folder(folder: Path | None) -> None:
    """Check that files can be created in a folder.

    Raises:
        FolderRefused: see `opened`; or the folder is not writable.
    """
    with opened(folder) as descriptor:
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=descriptor):
            raise FolderRefused(f"{place(folder)} is not writable")


def _check(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise FolderRefused(
            f"{path} belongs to user {found.st_uid}; name a folder of this user ({os.geteuid()}) or of root"
        )
    # Root's folders without the sticky bit are accepted: a Kubernetes emptyDir is one.
    if found.st_uid and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise FolderRefused(f"everybody may delete files in {path}; remove their right to write (chmod o-w)")


def _why_not(path: Path, error: OSError) -> str:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return f"{path} does not exist or cannot be reached"
    if stat.S_ISLNK(mode):
        return f"{path} is a symbolic link; name the folder that it leads to"
    if not stat.S_ISDIR(mode):
        return f"{path} is no folder"
    return f"{path} cannot be opened ({error.strerror})"
