"""The secret of a pool is a file's bytes, or the text in it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from baton.errors import SettingsError
from baton.library.here.records import pool_secret

RANDOM = bytes(range(200, 232))


@pytest.mark.parametrize(
    ("data", "secret"),
    [
        (b"a" * 32, b"a" * 32),
        (b" " + b"a" * 32 + b"\n", b"a" * 32),
        ("ü".encode() * 32, "ü".encode() * 32),
        (RANDOM, RANDOM),
        (RANDOM[:-2] + b"\n ", RANDOM[:-2] + b"\n "),
    ],
)
def test_bytes_and_texts_are_taken(data: bytes, secret: bytes, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(data)
    assert pool_secret(file) == hashlib.sha256(secret).digest()


@pytest.mark.parametrize("data", [b"", b"a" * 31 + b"\n", RANDOM[:31]])
def test_what_is_too_short_is_refused(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(data)
    with pytest.raises(SettingsError, match="at least 32"):
        pool_secret(file)
    with pytest.raises(SettingsError, match="No such file"):
        pool_secret(tmp_path / "missing")
