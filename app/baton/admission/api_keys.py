"""Create, revoke and look up API keys, of which only digests are stored.

A key is 256 random bits, so a plain SHA-256 is enough: a slow hash would only help with keys that can be
guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import structlog
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from baton.config.settings import Settings
from baton.errors import SettingsError
from baton.telemetry.ids import LOCAL_TENANT
from baton.telemetry.metrics import NOBODY, OTHER

KEY_PREFIX = "bt_"
MAX_KEY_CHARS = 256
LOOK_EVERY_S = 1.0
"""Seconds for which a revoked key may still be accepted by a running gateway."""

RESERVED_TENANTS = frozenset({LOCAL_TENANT, NOBODY, OTHER})
"""Names with another meaning: every request on a gateway without keys, requests without a valid key, and the
tenants that are counted together."""

TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class StoredKey(BaseModel):
    """One entry of the keys file.

    Attributes:
        id: names the key in `baton keys list` and `revoke`.
        sha256: digest of the key, in hexadecimal.
        created_at: Unix time.
        operator: whether it may also start and stop engines, and change what the gateway serves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    tenant: TenantName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created_at: int
    operator: bool = False


FILE = TypeAdapter(list[StoredKey])


def digest(key: str) -> str:
    """Return the SHA-256 of a key in hexadecimal, which is all that is stored of it."""
    return hashlib.sha256(key.encode("utf-8", errors="replace")).hexdigest()


class Keyring:
    """Finds what is stored of a key. The look-up takes the same path for every wrong key.

    Raises:
        SettingsError: a key belongs to the reserved tenant `local`.
    """

    def __init__(self, keys: list[StoredKey]) -> None:
        self._keys = _by_digest(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> StoredKey | None:
        """Find the stored entry of a key; None: it is unknown."""
        return self._keys.get(digest(key[:MAX_KEY_CHARS]))

    def serves(self, tenant: str) -> bool:
        """Return whether a tenant has a key."""
        return any(key.tenant == tenant for key in self._keys.values())


class KeysFile(Keyring):
    """The keyring of a file that may change: created and revoked keys take effect within `LOOK_EVERY_S`.

    While the file is unusable the last good keys stay valid, which is logged. A file that was removed closes
    the gateway, like one whose last key was revoked.

    Args:
        clock: returns seconds of a monotonic clock.

    Raises:
        SettingsError: the file cannot be read, or holds no valid keys.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._looked = clock()
        self._state = _state(file)
        super().__init__(read_keys(file))

    def find(self, key: str) -> StoredKey | None:
        self._look()
        return super().find(key)

    def serves(self, tenant: str) -> bool:
        self._look()
        return super().serves(tenant)

    def _look(self) -> None:
        if self._clock() - self._looked < LOOK_EVERY_S:
            return
        self._looked = self._clock()
        state = _state(self._file)
        if state == self._state:
            return
        self._state = state
        log = structlog.get_logger("baton.keys")
        try:
            keys = _by_digest(read_keys(self._file))
        except SettingsError as error:
            log.error("keys_file_unusable", cause=error.message)
            return
        self._keys = keys
        log.info("keys_file_read", keys=len(keys))


def _by_digest(keys: list[StoredKey]) -> dict[str, StoredKey]:
    for key in keys:
        if key.tenant == LOCAL_TENANT:
            raise SettingsError(
                f"auth.keys_file: the key {key.id[:80]!r} belongs to the tenant '{LOCAL_TENANT}', whose "
                "handoffs were made without keys: revoke it with `baton keys revoke`, and create another"
            )
    return {key.sha256: key for key in keys}


def _state(file: Path) -> tuple[int, int, int] | None:
    """Identify the state of the file: it changes when the file is replaced or written to."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def keyring_for(settings: Settings) -> Keyring | None:
    """Return the known keys; None: there is no keys file, and every request is of the local tenant.

    A keys file without keys, as after the last was revoked, closes the gateway: every request is refused.

    Raises:
        SettingsError: `auth.keys_file` does not exist, or the gateway would serve a network without keys.
    """
    if settings.keys_file.exists():
        return KeysFile(settings.keys_file)
    if settings.auth.keys_file is not None:
        raise SettingsError(f"auth.keys_file: {settings.keys_file} does not exist; `baton keys create`")
    if not settings.loopback and not settings.auth.allow_unauthenticated:
        raise SettingsError(
            f"host: {settings.host} can be reached from other machines and there are no API keys: "
            "make one with `baton keys create`, or set auth.allow_unauthenticated = true"
        )
    return None


def read_keys(file: Path) -> list[StoredKey]:
    """Read the stored keys; an empty list: there is no file.

    Raises:
        SettingsError: the file cannot be read, is no keys file, or may be written by every user.
    """
    try:
        with file.open("rb") as stream:
            if os.fstat(stream.fileno()).st_mode & stat.S_IWOTH:
                raise SettingsError(
                    f"{file}: every user of this machine may write it, and so make keys: `chmod o-w` it"
                )
            return FILE.validate_json(stream.read())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror or 'cannot be read'}") from None
    except ValidationError:
        raise SettingsError(f"{file}: not a keys file; `baton keys create` makes one") from None


def create_key(file: Path, tenant: str, *, operator: bool = False) -> str:
    """Add a key for `tenant` and return it; it cannot be shown again.

    Args:
        operator: see `StoredKey`.

    Raises:
        SettingsError: the tenant's name is reserved or not a plain word, or the file cannot be written.
    """
    if tenant in RESERVED_TENANTS:
        raise SettingsError(f"tenant {tenant!r}: this name is reserved; choose another")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    try:
        stored = StoredKey(
            id=secrets.token_hex(4),
            tenant=tenant,
            sha256=digest(key),
            created_at=int(time.time()),
            operator=operator,
        )
    except ValidationError:
        raise SettingsError(f"tenant {tenant[:80]!r}: use 1 to 64 letters, digits, '.', '_' or '-'") from None
    with _locked(file):
        _write(file, [*read_keys(file), stored])
    return key


def revoke_key(file: Path, key_id: str) -> None:
    """Remove a key.

    Raises:
        SettingsError: no key has this id.
    """
    with _locked(file):
        keys = read_keys(file)
        kept = [key for key in keys if key.id != key_id]
        if len(kept) == len(keys):
            raise SettingsError(f"there is no key with the id {key_id[:80]!r}; `baton keys list` shows them")
        _write(file, kept)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lock the file for one writer, and turn an error of the disk into a `SettingsError`."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(file.with_name(f".{file.name}.lock"), mode=0o600):
            yield
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror or 'cannot be written'}") from None


def _write(file: Path, keys: list[StoredKey]) -> None:
    """Replace the file atomically, readable by its owner only."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=".keys-")
    try:
        with os.fdopen(descriptor, "w") as stream:
            # Without defaults, so that an older gateway reads the file.
            json.dump([key.model_dump(exclude_defaults=True) for key in keys], stream, indent=2)
        os.replace(temporary, file)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
