"""Open folders and files safely: no links, no folders of other users, nothing that blocks; keep a secret."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Without O_NONBLOCK, opening a pipe in a file's place would block for ever."""
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
NO_FOLDER = (errno.ELOOP, errno.ENOTDIR)
MOUNTS = Path("/proc/self/mountinfo")
SECRET = "secret"
SECRET_BYTES = 32


class FolderNotPrivate(OSError):
    """A folder is a link or accessible to other users; `strerror` names it and says what to change."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)


def make_folder(path: Path, *, name: str | None = None, within: int | None = None) -> None:
    """Create a folder with mode 0700 if it is missing, and check that only this user may access it.

    Args:
        name: name of the folder in `within`.
        within: descriptor of the parent folder; None looks up `path`.

    Raises:
        FolderNotPrivate: there is a link, a file or another user's folder in its place.
        OSError: the folder cannot be created.
    """
    if within is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name or path, 0o700, dir_fd=within)
    os.close(open_folder(path, name=name, within=within))


def open_folder(path: Path, *, name: str | None = None, within: int | None = None) -> int:
    """Open a folder that only this user may access; return its descriptor. Arguments as for `make_folder`.

    Raises:
        FolderNotPrivate: there is a link, a file or another user's folder in its place.
        OSError: the folder is missing or cannot be opened.
    """
    try:
        descriptor = os.open(name or path, FOLDER, dir_fd=within)
    except OSError as error:
        if error.errno not in NO_FOLDER:
            raise
        raise FolderNotPrivate(f"{path} is a link or not a folder; use a folder that you own") from None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise FolderNotPrivate(
                f"{path} belongs to another user or is accessible to others; it must be yours, with mode 0700"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def folder(path: Path, *, name: str | None = None, within: int | None = None) -> Iterator[int]:
    """Open a folder for the time of the context; arguments and exceptions as for `open_folder`."""
    descriptor = open_folder(path, name=name, within=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(name: str | Path, *, within: int | None = None, flags: int = READ) -> int:
    """Open a regular file, for reading unless `flags` say otherwise; return its descriptor.

    Raises:
        OSError: the file is missing, or there is a link, a pipe or a folder in its place.
    """
    descriptor = os.open(name, flags, 0o600, dir_fd=within)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def file_system_of(folder: Path, mounts: Path = MOUNTS) -> Iterator[str]:
    """Yield the types under which the system knows the file system that a folder lies on, or will lie on.

    Args:
        mounts: Linux's table of mounts; see proc_pid_mountinfo(5).
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    device = os.stat(there).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):  # no Linux
        for line in mounts.read_text(errors="replace").splitlines():
            place, _, kind = line.partition(" - ")
            if place.split(" ")[2:3] == [wanted]:
                yield kind.split(" ")[0]


def bytes_in(path: Path | str, *, within: int | None = None) -> int:
    """Return the bytes that a folder's files take, 0 if it is missing.

    A file with several hard links counts at each with its share.

    Raises:
        OSError: the folder cannot be listed.
    """
    total = 0.0
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, FOLDER, dir_fd=within)
        try:
            with os.scandir(descriptor) as found:
                for each in found:
                    with contextlib.suppress(FileNotFoundError):
                        status = each.stat(follow_symlinks=False)
                        total += status.st_size / status.st_nlink
        finally:
            os.close(descriptor)
    return round(total)


def store_secret(root: Path) -> bytes:
    """Return the 32 bytes of a store's secret, created at first use; every process gets the same.

    Raises:
        OSError: the secret can neither be read nor created, or others may access the folder.
        ValueError: the file `secret` is not 32 bytes long.
    """
    with folder(root) as top:
        with contextlib.suppress(FileExistsError):
            _make_secret(top)
        with os.fdopen(open_file(SECRET, within=top), "rb") as stream:
            secret = stream.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise ValueError(
            f"{root / SECRET} is not {SECRET_BYTES} bytes long; remove the folder {root} and start again"
        )
    return secret


def install_secret(root: Path, secret: bytes) -> None:
    """Set a store's secret, 32 bytes, to that of the stores it shares entries with.

    Raises:
        OSError: the secret can neither be read nor created, or others may access the folder.
        ValueError: the store has another secret.
    """
    make_folder(root)
    with folder(root) as top, contextlib.suppress(FileExistsError):
        _make_secret(top, secret)
    if store_secret(root) != secret:
        raise ValueError(f"{root} was made with another secret: name another folder, or remove it")


def _make_secret(top: int, secret: bytes | None = None) -> None:
    """Create the secret atomically: write a temporary file, then link it, which fails if one exists."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(SECRET, dir_fd=top, follow_symlinks=False)
        return
    temporary = f".{secrets.token_hex(8)}"
    descriptor = os.open(temporary, CREATE, 0o600, dir_fd=top)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secret or secrets.token_bytes(SECRET_BYTES))
        os.link(temporary, SECRET, src_dir_fd=top, dst_dir_fd=top)
    finally:
        os.unlink(temporary, dir_fd=top)
