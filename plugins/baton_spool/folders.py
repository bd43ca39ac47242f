"""The folder that temporary files lie in: opened without following links, its owner and mode checked."""

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
    """The folder is not one to put files in. `strerror` is a clause that names it and says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)


def place(folder: Path | None) -> Path:
    """The path of a folder; None: the system's folder for temporary files, with its links resolved."""
    return Path(os.path.realpath(tempfile.gettempdir())) if folder is None else folder


@contextmanager
def opened(folder: Path | None) -> Iterator[int]:
    """Open a folder for a while: a descriptor, by which names in it are to be used.

    Args:
        folder: made by the operator; None: the system's folder for temporary files.

    Raises:
        FolderRefused: it is missing, a link or no folder; belongs to a user who is neither this process's nor
            root; is this user's and everybody may delete in it; or cannot be written.
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
    """See to it that files can be put in a folder.

    Raises:
        FolderRefused: as `opened`, or it cannot be written.
    """
    with opened(folder) as descriptor:
        if not os.access(f"/proc/self/fd/{descriptor}", os.W_OK | os.X_OK):
            raise FolderRefused(f"{place(folder)} is no folder that can be written")


def _check(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise FolderRefused(
            f"{path} belongs to user {found.st_uid}; name a folder of this user ({os.geteuid()}) or of root"
        )
    # Root's folders without the sticky bit are taken: a Kubernetes emptyDir is one, in a pod of one user.
    if found.st_uid and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise FolderRefused(
            f"everybody may delete files in {path}; take their right to write in it (chmod o-w)"
        )


def _why_not(path: Path, error: OSError) -> str:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return f"{path} does not exist or cannot be reached"
    if stat.S_ISLNK(mode):
        return f"{path} is a symbolic link; name the folder that it leads to"
    if not stat.S_ISDIR(mode):
        return f"{path} is no folder"
    return f"{path} is no folder that can be read ({error.strerror})"
