"""Open the folder for temporary files without following links, and check its owner and mode."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderRefused(OSError):
    """A folder is not safe or not usable for temporary files; `strerror` names it and says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)


def place(folder: Path | None) -> Path:
    """Return the path of a folder; for None the system's temporary folder, with links resolved."""
    return Path(os.path.realpath(tempfile.gettempdir())) if folder is None else folder


@contextmanager
def opened(folder: Path | None) -> Iterator[int]:
    """Open a folder for the time of the context; gives a descriptor, relative to which to use file names.

    Args:
        folder: a folder created by the operator; None for the system's temporary folder.

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
