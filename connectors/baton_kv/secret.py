"""Create and read the store's secret, the key of all its digests."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from baton_kv.folders import CREATE, folder, make_folder, open_file

SECRET_BYTES = 32
NAME = "secret"


def store_secret(root: Path) -> bytes:
    """Return the 32 bytes of a store's secret, created at first use; every process gets the same.

    Args:
        root: the store's folder.

    Raises:
        OSError: the secret can neither be read nor created, or others may access the folder.
        ValueError: the file `secret` is not 32 bytes long.
    """
    with folder(root) as top:
        with contextlib.suppress(FileExistsError):
            _make(top)
        with os.fdopen(open_file(NAME, within=top), "rb") as stream:
            secret = stream.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise ValueError(
            f"{root / NAME} is not {SECRET_BYTES} bytes long; remove the folder {root} and start again"
        )
    return secret


def install_secret(root: Path, secret: bytes) -> None:
    """Give a store the secret of others that it shares entries with.

    Args:
        root: the store's folder.
        secret: 32 bytes.

    Raises:
        OSError: the secret can neither be read nor created, or others may access the folder.
        ValueError: the store has another secret.
    """
    make_folder(root)
    with folder(root) as top, contextlib.suppress(FileExistsError):
        _make(top, secret)
    if store_secret(root) != secret:
        raise ValueError(f"{root} was made with another secret: name another folder, or remove it")


def _make(top: int, secret: bytes | None = None) -> None:
    """Create the secret atomically: written to a temporary file, then linked, which fails if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(NAME, dir_fd=top, follow_symlinks=False)
        return
    temporary = f".{secrets.token_hex(8)}"
    descriptor = os.open(temporary, CREATE, 0o600, dir_fd=top)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secret or secrets.token_bytes(SECRET_BYTES))
        os.link(temporary, NAME, src_dir_fd=top, dst_dir_fd=top)
    finally:
        os.unlink(temporary, dir_fd=top)
