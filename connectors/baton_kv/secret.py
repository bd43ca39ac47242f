"""Create and read the store's secret, the key of all its digests."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from baton_kv.folders import CREATE, folder, open_file

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


def _make(top: int) -> None:
    """Create the secret atomically: written to a temporary file, then linked, which fails if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(NAME, dir_fd=top, follow_symlinks=False)
        return
    temporary = f".{secrets.token_hex(8)}"
    descriptor = os.open(temporary, CREATE, 0o600, dir_fd=top)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_bytes(SECRET_BYTES))
        os.link(temporary, NAME, src_dir_fd=top, dst_dir_fd=top)
    finally:
        os.unlink(temporary, dir_fd=top)
