"""The store's secret: the key of its digests, so that only who may read the folder can make an entry."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

SECRET_BYTES = 32
NAME = "secret"


def store_secret(root: Path) -> bytes:
    """The secret beside a store's entries, made at first use; the same for every process.

    Raises:
        OSError: it can neither be read nor made.
        ValueError: the file is not a secret.
    """
    path = root / NAME
    with contextlib.suppress(FileExistsError):
        _make(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        secret = stream.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{path} is not a store's secret; remove the store and start again")
    return secret


def _make(path: Path) -> None:
    """Make it whole or not at all: written aside, then linked, which refuses when another was first."""
    if path.exists():
        return
    aside = path.with_name(f".{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_bytes(SECRET_BYTES))
        os.link(aside, path)
    finally:
        aside.unlink()
