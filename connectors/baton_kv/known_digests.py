"""Remember the digests of weights, so that an engine's start does not read gigabytes again."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

MAX_REMEMBERED = 64
SETTLED_AFTER_S = 2.0
"""A file that changed this recently may change again without a new time stamp, so it is not remembered."""


class KnownDigests:
    """A small JSON file of digests, by the paths, sizes, times and inodes of the files they are of.

    Args:
        file: the file; only its owner may write the folder that it is in. A file that cannot be read counts
            as empty, and one that cannot be written is left out: files are then read again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def digest(self, files: Sequence[Path]) -> str:
        """Return the BLAKE3 digest, hexadecimal, of the names, sizes and bytes of these files.

        Raises:
            OSError: a file cannot be read.
        """
        known, name = self._read(), _state(files)
        if name in known:
            return known[name]
        began = time.time()
        found = digest_of(files)
        if _state(files) == name and all(file.stat().st_ctime < began - SETTLED_AFTER_S for file in files):
            self._write(dict([*known.items(), (name, found)][-MAX_REMEMBERED:]))
        return found

    def _read(self) -> dict[str, str]:
        try:
            with open(os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
                held = json.load(file)
        except (OSError, ValueError):
            return {}
        pairs = held.items() if isinstance(held, dict) else ()
        return {name: digest for name, digest in pairs if isinstance(digest, str) and len(digest) == 64}

    def _write(self, known: dict[str, str]) -> None:
        beside = self._file.with_name(f"{self._file.name}.{secrets.token_hex(8)}")
        with contextlib.suppress(OSError):
            try:
                with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    json.dump(known, file)
                beside.replace(self._file)
            finally:
                beside.unlink(missing_ok=True)


def digest_of(files: Sequence[Path]) -> str:
    """Return the BLAKE3 digest, hexadecimal, of the names, sizes and bytes of files.

    Raises:
        OSError: a file cannot be read.
    """
    digest = blake3(max_threads=blake3.AUTO)
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        digest.update_mmap(file)
    return digest.hexdigest()


def _state(files: Sequence[Path]) -> str:
    """Return a digest of all that changes with a file but its bytes."""
    seen = []
    for file in files:
        stat = file.stat()
        seen.append(
            (
                str(file.absolute()),
                stat.st_dev,
                stat.st_ino,
                stat.st_size,
                stat.st_mtime_ns,
                stat.st_ctime_ns,
            )
        )
    return blake3(json.dumps(seen).encode()).hexdigest()
