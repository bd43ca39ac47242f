"""The store's secret: the key of its digests, so that only who may read the folder can make an entry."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from baton_kv.folders import CREATE, folder, open_file

SECRET_BYTES = 32
NAME = "secret"


def store_secret(root: Path) -> bytes:
    """The secret beside a store's entries, made at first use; the same for every process.

    Raises:
        OSError: it can neither be read nor made, or the folder is not this user's alone.
        ValueError: the file is not a secret.
    """
    with folder(root) as top:
        with contextlib.suppress(FileExistsError):
            _make(top)
        with os.fdopen(open_file(NAME, within=top), "rb") as stream:
            secret = stream.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{root / NAME} is not a store's secret; remove the store and start again")
    return secret


def _make(top: int) -> None:
    """Make it whole or not at all: written aside, then linked, which refuses when another was first."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(NAME, dir_fd=top, follow_symlinks=False)
        return
    aside = f".{secrets.token_hex(8)}"
    descriptor = os.open(aside, CREATE, 0o600, dir_fd=top)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_bytes(SECRET_BYTES))
        os.link(aside, NAME, src_dir_fd=top, dst_dir_fd=top)
    finally:
        os.unlink(aside, dir_fd=top)
