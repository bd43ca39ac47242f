"""API keys: made once, shown once, kept only as digests.

A key is 256 random bits, so a plain SHA-256 is enough to store: there is nothing to guess faster.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from baton.errors import SettingsError
from baton.settings import Settings

KEY_PREFIX = "bt_"
MAX_KEY_CHARS = 256

TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class StoredKey(BaseModel):
    """One line of the keys file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    tenant: TenantName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created_at: int


FILE = TypeAdapter(list[StoredKey])


def digest(key: str) -> str:
    """SHA-256 of a key, in hexadecimal: all that is ever stored of it."""
    return hashlib.sha256(key.encode("utf-8", errors="replace")).hexdigest()


class Keyring:
    """The tenants that hold a key. Looking a key up takes one path, whatever is wrong with it."""

    def __init__(self, keys: list[StoredKey]) -> None:
        self._tenants = {key.sha256: key.tenant for key in keys}

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant(self, key: str) -> str | None:
        return self._tenants.get(digest(key[:MAX_KEY_CHARS]))


def keyring_for(settings: Settings) -> Keyring | None:
    """The known keys, or None when everyone is the local tenant.

    A keys file closes the gateway, also one whose last key was revoked: nobody may call then.

    Raises:
        SettingsError: the gateway would serve a network without asking who calls.
    """
    if settings.keys_file.exists():
        return Keyring(read_keys(settings.keys_file))
    if settings.auth.keys_file is not None:
        raise SettingsError(f"auth.keys_file: {settings.keys_file} does not exist; `baton keys create`")
    if not settings.loopback and not settings.auth.allow_unauthenticated:
        raise SettingsError(
            f"host: {settings.host} can be reached from other machines and there are no API keys: "
            "make one with `baton keys create`, or set auth.allow_unauthenticated = true"
        )
    return None


def read_keys(file: Path) -> list[StoredKey]:
    """The stored keys; none when there is no file.

    Raises:
        SettingsError: the file is there but cannot be used.
    """
    try:
        return FILE.validate_json(file.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror or 'cannot be read'}") from None
    except ValidationError:
        raise SettingsError(f"{file}: not a keys file; `baton keys create` makes one") from None


def create_key(file: Path, tenant: str) -> str:
    """Add a key for `tenant` and return it; it cannot be shown again.

    Raises:
        SettingsError: the tenant's name is not a plain word, or the file cannot be written.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    try:
        stored = StoredKey(
            id=secrets.token_hex(4), tenant=tenant, sha256=digest(key), created_at=int(time.time())
        )
    except ValidationError:
        raise SettingsError(f"tenant {tenant[:80]!r}: use 1 to 64 letters, digits, '.', '_' or '-'") from None
    with _locked(file):
        _write(file, [*read_keys(file), stored])
    return key


def revoke_key(file: Path, key_id: str) -> None:
    """Take a key away.

    Raises:
        SettingsError: there is no such key.
    """
    with _locked(file):
        keys = read_keys(file)
        kept = [key for key in keys if key.id != key_id]
        if len(kept) == len(keys):
            raise SettingsError(f"there is no key with the id {key_id[:80]!r}; `baton keys list` shows them")
        _write(file, kept)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One writer at a time; what the disk refuses becomes one line."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(file.with_name(f".{file.name}.lock"), mode=0o600):
            yield
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror or 'cannot be written'}") from None


def _write(file: Path, keys: list[StoredKey]) -> None:
    """Replace the file whole, readable by its owner only."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=".keys-")
    try:
        with os.fdopen(descriptor, "w") as stream:
            json.dump([key.model_dump() for key in keys], stream, indent=2)
        os.replace(temporary, file)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
