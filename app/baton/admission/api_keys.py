"""Create, revoke and look up API keys, of which only digests are stored.

A key is 256 random bits, so a plain SHA-256 is enough: a slow hash would only help with keys that can be
guessed.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import structlog
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from baton.config.groups import Alias
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
Tokens = Annotated[int, Field(ge=1, le=10**15)]
MOST_TIME = 253_402_300_799
"""The last second of the year 9999, in Unix time."""


class StoredKey(BaseModel):
    """One entry of the keys file.

    Attributes:
        id: names the key in `baton keys list` and `revoke`, and in usage; rotation keeps it.
        sha256: digest of the key, in hexadecimal.
        created_at: Unix time.
        operator: whether it may also start and stop engines, and change what the gateway serves.
        models: names, aliases or patterns of the models that it may use; none: all.
        expires_at: Unix time from which it opens nothing; None: it does not expire.
        day_tokens: tokens, of prompts and answers, that it may use a day of UTC; None: no limit.
        month_tokens: tokens that it may use a month of UTC; None: no limit.
        share: weight of its tenant in the queues of engines; the largest of the tenant's keys counts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(max_length=64)]
    tenant: TenantName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created_at: int
    operator: bool = False
    models: tuple[Alias, ...] = ()
    expires_at: Annotated[int, Field(ge=0, le=MOST_TIME)] | None = None
    day_tokens: Tokens | None = None
    month_tokens: Tokens | None = None
    share: Annotated[int, Field(ge=1, le=100)] = 1

    def may_use(self, *names: str) -> bool:
        """Return whether it may use the model that has these names."""
        return not self.models or any(fnmatchcase(name, pattern) for name in names for pattern in self.models)


FILE = TypeAdapter(list[StoredKey])


def digest(key: str) -> str:
    """Return the SHA-256 of a key in hexadecimal, which is all that is stored of it."""
    return hashlib.sha256(key.encode("utf-8", errors="replace")).hexdigest()


class Keyring:
    """Finds what is stored of a key. The look-up takes the same path for every wrong key.

    Args:
        wall: returns Unix time.

    Raises:
        SettingsError: a key belongs to the reserved tenant `local`.
    """

    def __init__(self, keys: list[StoredKey], wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._take(keys)

    def _take(self, keys: list[StoredKey]) -> None:
        self._keys = _by_digest(keys)
        self._shares: dict[str, int] = {}
        for key in keys:
            self._shares[key.tenant] = max(key.share, self._shares.get(key.tenant, 1))

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> StoredKey | None:
        """Find the stored entry of a key; None: it is unknown, or has expired."""
        return self._unless_expired(self._keys.get(digest(key[:MAX_KEY_CHARS])))

    def named(self, key_id: str) -> StoredKey | None:
        """Find the entry of a key by its id, for work that goes on without its owner; None as for `find`.

        Of a rotated key and its former secret, which have one id, it is the rotated one.
        """
        found = [each for each in self._keys.values() if each.id == key_id and self._unless_expired(each)]
        return found[-1] if found else None

    def _unless_expired(self, found: StoredKey | None) -> StoredKey | None:
        return found if found is None or self._wall() < (found.expires_at or math.inf) else None

    def expired(self, key: str) -> bool:
        """Return whether a key that `find` does not find is one that has expired."""
        return digest(key[:MAX_KEY_CHARS]) in self._keys

    def share(self, tenant: str) -> int:
        """Return a tenant's share: the largest of its keys', 1 where it has none."""
        return self._shares.get(tenant, 1)

    def refresh(self) -> list[str]:
        """Read the keys again; returns the ids of those that are new, gone or changed.

        Raises:
            SettingsError: the file is unusable; the keys stay as they were.
        """
        return []


class KeysFile(Keyring):
    """The keyring of a file that may change: created and revoked keys take effect within `LOOK_EVERY_S`.

    While the file is unusable the last good keys stay valid, which is logged. A file that was removed closes
    the gateway, like one whose last key was revoked.

    Args:
        clock: returns seconds of a monotonic clock.
        wall: returns Unix time.

    Raises:
        SettingsError: the file cannot be read, or holds no valid keys.
    """

    def __init__(
        self,
        file: Path,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._file = file
        self._clock = clock
        self._looked = clock()
        self._state = _state(file)
        super().__init__(read_keys(file), wall)

    def find(self, key: str) -> StoredKey | None:
        self._look()
        return super().find(key)

    def named(self, key_id: str) -> StoredKey | None:
        self._look()
        return super().named(key_id)

    def refresh(self) -> list[str]:
        state, before = _state(self._file), self._keys
        self._take(read_keys(self._file))
        self._state = state
        return sorted({each.id for each in set(before.values()) ^ set(self._keys.values())})

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
            self._take(read_keys(self._file))
        except SettingsError as error:
            log.error("keys_file_unusable", cause=error.message)
            return
        log.info("keys_file_read", keys=len(self._keys))


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
    except ValidationError as error:
        raise SettingsError(
            f"{file}: not a keys file: {_wrong(error)}; `baton keys create` makes one"
        ) from None


def _wrong(error: ValidationError) -> str:
    """Return where the first wrong value is and what is wrong with it, without the value."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def create_key(file: Path, tenant: str, **options: Any) -> str:
    """Add a key for `tenant` and return it; it cannot be shown again.

    Args:
        options: further fields of `StoredKey`.

    Raises:
        SettingsError: the tenant's name is reserved or not a plain word, an option is not valid, or the file
            cannot be written.
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
            **options,
        )
    except ValidationError as error:
        if any(item["loc"] == ("tenant",) for item in error.errors()):
            raise SettingsError(
                f"tenant {tenant[:80]!r}: use 1 to 64 letters, digits, '.', '_' or '-'"
            ) from None
        raise SettingsError(_wrong(error)) from None
    with _locked(file):
        _write(file, [*read_keys(file), stored])
    return key


def revoke_key(file: Path, key_id: str) -> StoredKey:
    """Remove a key, with one that was rotated and still opens; returns it.

    Raises:
        SettingsError: no key has this id.
    """
    with _locked(file):
        keys = read_keys(file)
        gone = _with_id(keys, key_id)
        _write(file, [key for key in keys if key.id != key_id])
    return gone[-1]


def rotate_key(
    file: Path, key_id: str, *, keep_s: int = 0, wall: Callable[[], float] = time.time
) -> tuple[str, StoredKey]:
    """Give a key another secret, with the same id, so that its usage and its budgets go on.

    Args:
        keep_s: seconds for which the former secret opens too.

    Returns:
        The new secret, which cannot be shown again, and the stored key.

    Raises:
        SettingsError: no key has this id, or the file cannot be written.
    """
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    with _locked(file):
        keys, now = read_keys(file), int(wall())
        *_, former = _with_id(keys, key_id)
        rotated = former.model_copy(update={"sha256": digest(secret), "created_at": now})
        kept = [key for key in keys if key.id != key_id]
        if keep_s:
            until = min(now + keep_s, former.expires_at or MOST_TIME)
            kept.append(former.model_copy(update={"expires_at": until}))
        _write(file, [*kept, rotated])
    return secret, rotated


def _with_id(keys: Sequence[StoredKey], key_id: str) -> list[StoredKey]:
    """Return the keys with an id: the last is the one of now, others were rotated.

    Raises:
        SettingsError: there is none.
    """
    if not (found := [key for key in keys if key.id == key_id]):
        raise SettingsError(f"there is no key with the id {key_id[:80]!r}; `baton keys list` shows them")
    return found


def time_of(given: str, wall: Callable[[], float] = time.time) -> int:
    """Return the Unix time that a text names: `30d`, `12h`, or a date or time of ISO 8601, in UTC.

    Raises:
        SettingsError: it is none of these, or is over.
    """
    now = int(wall())
    number, unit = given[:-1], {"d": 86400, "h": 3600, "m": 60}.get(given[-1:])
    try:
        if unit is not None and number.isdecimal() and len(number) < 8:
            until = now + int(number) * unit
        else:
            when = datetime.datetime.fromisoformat(given)
            until = int((when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp())
    except (ValueError, OverflowError):
        raise SettingsError(
            f"{given[:80]!r} is no time: give one such as `30d`, `12h` or `2030-01-31`"
        ) from None
    if not now < until <= MOST_TIME:
        raise SettingsError(f"{given[:80]!r}: this time is over, or beyond the year 9999")
    return until


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lock the file for one writer, and turn an error of the disk into a `SettingsError`."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(file.with_name(f".{file.name}.lock"), mode=0o600):
            for left in file.parent.glob(f".{file.name}-*"):  # of a process that was killed
                left.unlink(missing_ok=True)
            yield
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror or 'cannot be written'}") from None


def _write(file: Path, keys: list[StoredKey]) -> None:
    """Replace the file atomically, readable by its owner only."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(descriptor, "w") as stream:
            # Without defaults, so that an older gateway reads the file.
            json.dump([key.model_dump(exclude_defaults=True) for key in keys], stream, indent=2)
            stream.flush()
            os.fsync(stream.fileno())  # else a power cut could leave the new name with nothing in it
        os.replace(temporary, file)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
