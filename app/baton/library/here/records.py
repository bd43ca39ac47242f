"""Save the records of handoffs as small JSON files, so that handoffs outlive the process.

Several gateways may share the folder. Each changes a record only while it holds the folder's lock, and reads
the record again first: none overwrites what another has changed, or restores what another has deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Protocol

import structlog
from pydantic import ValidationError

from baton.errors import SettingsError
from baton.library.handoff import Footprint, Handoff
from baton_kv.folders import CREATE, LOCK, folder, make_folder, open_file
from baton_kv.stores.file import RECORDS_TOTAL

# Read the secret of a pool of gateways, and prove to another one that both use one store.


LEAST_SECRET = 32
PURPOSE = b"baton: this gateway uses the store"
"""Sets these digests apart from all others that are made with the secret."""


def proof_of(secret: bytes, store_id: bytes, challenge: str) -> str:
    """Answer a challenge as only gateways over one store can.

    Args:
        store_id: a random number that is kept in the store.
    """
    parts = (PURPOSE, store_id, challenge.encode())
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def pool_secret(file: Path) -> bytes:
    """Return the key that `handoffs.shared_secret_file` is: the digest of its bytes, or of its text.

    White space around a text is no part of it, so that an editor's last line feed is none.

    Raises:
        SettingsError: it cannot be read, or is too short.
    """
    try:
        data = file.expanduser().read_bytes()
    except OSError as error:
        raise SettingsError(f"handoffs.shared_secret_file: {file}: {error.strerror}") from None
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:  # random bytes
        secret, length = data, len(data)
    else:
        secret, length = text.encode(), len(text)
    if length < LEAST_SECRET:
        raise SettingsError(f"handoffs.shared_secret_file: give at least {LEAST_SECRET} characters or bytes")
    return hashlib.sha256(secret).digest()


# Read and write the files of the records' folder, under the lock that all gateways over the store share.
#
# records/
#   ID.json   the record of one handoff
#   .*        a record that is being written
#   total     the lock file; it holds the bytes that all records take


ABANDONED_AFTER_S = 60.0
"""Age at which a record that is being written is one that a killed process left."""
SUFFIX = ".json"
ID = re.compile(r"[A-Za-z0-9_-]{16,64}")
TEMPORARY = re.compile(r"\.[0-9a-f]{16}")
"""The name of a record that is being written."""
Stamp = tuple[int, int, int]
"""Inode, time of change in nanoseconds and size: two versions of a file differ in one of them."""


@dataclass
class LockedFolder:
    """The records' folder while this process holds its lock.

    Attributes:
        total: bytes that all records take.
    """

    descriptor: int
    total: int

    @property
    def changed_at(self) -> int:
        """The time of the folder's last change, in nanoseconds."""
        return os.fstat(self.descriptor).st_mtime_ns

    def write(self, handoff_id: str, data: bytes) -> Stamp:
        """Write a record's file, as a whole or not at all; returns its stamp.

        Raises:
            OSError: it could not be written.
        """
        temporary, name = f".{secrets.token_hex(8)}", handoff_id + SUFFIX
        try:
            with FileIO(os.open(temporary, CREATE, 0o600, dir_fd=self.descriptor), "wb") as stream:
                _write_all(stream, data)
                status = os.fstat(stream.fileno())
            before = self._size(name)
            os.replace(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self.descriptor)
            raise
        self.total += len(data) - before
        return stamp_of(status)

    def remove(self, handoff_id: str) -> None:
        """Remove a record's file, if it exists.

        Raises:
            OSError: it could not be removed.
        """
        size = self._size(handoff_id + SUFFIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(handoff_id + SUFFIX, dir_fd=self.descriptor)
        self.total -= size

    def scan(self) -> dict[str, Stamp]:
        """Return the stamps of all records by id, and count `total` anew."""
        stamps: dict[str, Stamp] = {}
        total = 0
        with os.scandir(self.descriptor) as found:
            for each in found:
                handoff_id = each.name.removesuffix(SUFFIX)
                if handoff_id == each.name or ID.fullmatch(handoff_id) is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = each.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        stamps[handoff_id] = stamp_of(status)
                        total += status.st_size
        self.total = total
        return stamps

    def remove_abandoned(self) -> None:
        """Remove what killed processes were writing; a process that writes now would hold the lock."""
        for name in os.listdir(self.descriptor):
            with contextlib.suppress(OSError):
                age = time.time() - os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mtime
                if TEMPORARY.fullmatch(name) and age > ABANDONED_AFTER_S:
                    os.unlink(name, dir_fd=self.descriptor)

    def _size(self, name: str) -> int:
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0


@contextlib.contextmanager
def locked(path: Path) -> Iterator[LockedFolder]:
    """Lock the records' folder against all other gateways while inside.

    Raises:
        OSError: the folder or its lock file cannot be used.
    """
    with (
        folder(path) as opened,
        FileIO(open_file(RECORDS_TOTAL, within=opened, flags=LOCK), "r+") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        digits = lock.read(32)
        held = LockedFolder(opened, int(digits) if digits.isdigit() else 0)
        before = held.total
        try:
            yield held
        finally:
            if held.total != before or not digits:
                os.pwrite(lock.fileno(), b"%020d" % max(0, held.total), 0)


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the stamp of a version of a file."""
    return status.st_ino, status.st_mtime_ns, status.st_size


def _write_all(stream: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


MAX_RECORD_BYTES = 64 * 1024 * 1024
"""A larger file was not written by a gateway, and is not read."""
SETTLED_AFTER_NS = 50_000_000
"""A folder that changed less long ago may change again without a new time of change, as clocks tick."""
TRANSIENT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EINTR, errno.EAGAIN})
"""Errors that say nothing about the file: it cannot be read now, but may be whole."""
Others = Callable[[], list[Footprint]]
"""Returns the usage of all other handoffs over the store."""
Edit = Callable[[Handoff, Others], None]
"""Changes a record in place while no other gateway changes any."""


class RecordDeleted(Exception):
    """A pending record was deleted by another gateway, before it was written whole."""


@dataclass
class News:
    """The changes of other gateways since the last look.

    Attributes:
        changed: the records that they wrote, as they are now.
        gone: ids of the records that they removed.
    """

    changed: list[Handoff] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)


class Records(Protocol):
    """The place where the records of handoffs are kept, for all gateways that share them."""

    def create(self, record: Handoff, edit: Edit) -> bool:
        """Apply an edit to a new record and write it, as a whole or not at all; returns whether it was.

        Raises:
            RecordDeleted: another gateway deleted it while it was pending.
        """
        ...

    def update(self, handoff_id: str, edit: Edit) -> Handoff | None:
        """Apply an edit to a saved record and write it.

        Returns:
            The record as it is then; None: it was deleted.

        Raises:
            OSError: it could not be read or written.
            HandoffStoreUnavailable: the shared store failed.
        """
        ...

    def edit_unsaved(self, record: Handoff, edit: Edit) -> None:
        """Apply an edit to a record that is in memory only.

        Raises:
            OSError: the folder cannot be used.
        """
        ...

    def read(self, handoff_id: str) -> Handoff | None:
        """Read a record, which another gateway may have written; None: there is none.

        Raises:
            HandoffStoreUnavailable: the shared store failed, so nobody knows.
        """
        ...

    def reread(self, record: Handoff) -> Handoff | None:
        """Read a saved record again.

        Returns:
            The same object if it did not change, or cannot be read now; None if it was deleted.
        """
        ...

    def exists(self, handoff_id: str) -> bool:
        """Return whether a record exists, even one that only another version can read."""
        ...

    def read_all(self) -> list[Handoff]:
        """Read every record, the oldest first."""
        ...

    def refresh(self) -> News:
        """Return the changes of other gateways since the last call."""
        ...

    def size(self) -> int:
        """Return the bytes that all records take."""
        ...

    def remove(self, record: Handoff) -> None:
        """Remove a record.

        Raises:
            OSError: it could not be removed.
            HandoffStoreUnavailable: the shared store failed.
        """
        ...

    def remove_expired(self, record: Handoff) -> Handoff | None:
        """Remove an expired record, unless another gateway has extended its lifetime.

        Returns:
            The extended record; None: it was removed.

        Raises:
            OSError: it could not be removed.
            HandoffStoreUnavailable: the shared store failed.
        """
        ...


class RecordFolder:
    """The `Records` interface over a folder. A record that cannot be written lives in memory only.

    Args:
        path: the folder, created with mode 0700 when it is missing; None: nothing is stored.

    Raises:
        OSError: the folder or its lock file is a link, a pipe, or another user's.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._log = structlog.get_logger("baton.handoffs")
        self._stamps: dict[str, Stamp] = {}
        self._usage: dict[str, Footprint] = {}
        self._seen: int | None = None
        self._news = News()
        if path is not None:
            make_folder(path)
            with locked(path) as held:
                held.remove_abandoned()

    def create(self, record: Handoff, edit: Edit) -> bool:
        if self._path is None:
            edit(record, list)
            return False
        try:
            with locked(self._path) as held:
                edit(record, lambda: self._others(held, record.id))
                self._write(held, record)
        except OSError as error:
            self._log.warning("handoff_not_kept", reason=error.strerror)
            return False
        return True

    def update(self, handoff_id: str, edit: Edit) -> Handoff | None:
        assert self._path is not None
        with locked(self._path) as held:
            record = self._read(held.descriptor, handoff_id)
            if record is not None:
                edit(record, lambda: self._others(held, handoff_id))
                self._write(held, record)
            return record

    def edit_unsaved(self, record: Handoff, edit: Edit) -> None:
        if self._path is None:
            edit(record, list)
            return
        with locked(self._path) as held:
            edit(record, lambda: self._others(held, record.id))

    def read(self, handoff_id: str) -> Handoff | None:
        """Read a record, which another gateway over the same store may have written; None: there is none."""
        if self._path is None or ID.fullmatch(handoff_id) is None:
            return None
        with contextlib.suppress(OSError), folder(self._path) as opened:
            return self._read(opened, handoff_id)
        return None

    def reread(self, record: Handoff) -> Handoff | None:
        if self._path is None:
            return record
        try:
            with folder(self._path) as opened:
                found = os.stat(record.id + SUFFIX, dir_fd=opened, follow_symlinks=False)
                return record if stamp_of(found) == record.stamp else self._read(opened, record.id)
        except FileNotFoundError:
            return None
        except OSError as error:  # it cannot be read now, but may exist
            self._log.warning("handoff_unreadable", handoff=record.id, reason=error.strerror)
            return record

    def exists(self, handoff_id: str) -> bool:
        if self._path is None:
            return False
        return os.path.lexists(self._path / (handoff_id + SUFFIX))

    def read_all(self) -> list[Handoff]:
        """Read every record, the oldest first; files that are not JSON are removed."""
        self._stamps, self._usage, self._seen, self._news = {}, {}, None, News()
        return sorted(self.refresh().changed, key=lambda record: record.created_at)

    def refresh(self) -> News:
        """List what other gateways changed since the last call; an unchanged folder is not read."""
        if self._path is None:
            return News()
        try:
            with locked(self._path) as held:
                self._refresh(held)
                news, self._news = self._news, News()
                return news
        except OSError as error:
            self._log.warning("handoffs_not_listed", reason=error.strerror)
            return News()

    def size(self) -> int:
        if self._path is None:
            return 0
        with locked(self._path) as held:
            return held.total

    def remove(self, record: Handoff) -> None:
        if self._path is not None:
            with locked(self._path) as held:
                self._remove(held, record.id)

    def remove_expired(self, record: Handoff) -> Handoff | None:
        if self._path is None:
            return None
        with locked(self._path) as held:
            found = self._read(held.descriptor, record.id)
            if found is not None and found.expires_at > record.expires_at:
                return found
            self._remove(held, record.id)
        return None

    def _others(self, held: LockedFolder, handoff_id: str) -> list[Footprint]:
        """Return the usage of all other handoffs over the store."""
        self._refresh(held)
        return [usage for found, usage in self._usage.items() if found != handoff_id]

    def _refresh(self, held: LockedFolder) -> None:
        """Read what others wrote since the last look, and add it to the news."""
        changed_at = held.changed_at
        if changed_at == self._seen:
            return
        settled = time.time_ns() - changed_at > SETTLED_AFTER_NS
        found = held.scan()
        for each in [each for each in self._stamps if each not in found]:
            self._forget(each)
            self._news.gone.append(each)
        for each in [each for each, stamp in found.items() if self._stamps.get(each) != stamp]:
            try:
                record = self._read(held.descriptor, each)
            except OSError as error:
                self._log.warning("handoff_unreadable", handoff=each, reason=error.strerror)
                settled = False  # so that it is read again
                continue
            self._stamps[each] = found[each]
            if record is not None:
                self._usage[each] = record.footprint
                self._news.changed.append(record)
        self._seen = changed_at if settled else None

    def _forget(self, handoff_id: str) -> None:
        self._stamps.pop(handoff_id, None)
        self._usage.pop(handoff_id, None)

    def _write(self, held: LockedFolder, record: Handoff) -> None:
        record.revision += 1
        data = record.model_dump_json(by_alias=True).encode()
        stamp = held.write(record.id, data)
        record.stamp, record.disk_bytes = stamp, len(data)
        self._stamps[record.id], self._usage[record.id] = stamp, record.footprint

    def _remove(self, held: LockedFolder, handoff_id: str) -> None:
        held.remove(handoff_id)
        self._forget(handoff_id)

    def _read(self, opened: int, handoff_id: str) -> Handoff | None:
        """Read a record; None: it does not exist, or is not a record of this version.

        Raises:
            OSError: it cannot be read now, but may exist.
        """
        name = handoff_id + SUFFIX
        try:
            with FileIO(open_file(name, within=opened), "rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_size > MAX_RECORD_BYTES:
                    return None
                data = stream.readall()
        except OSError as error:
            if error.errno in TRANSIENT:
                raise
            return None
        record = self._parse(opened, name, data)
        if record is None or record.id != handoff_id:
            return None
        record.on_disk, record.stamp, record.disk_bytes = True, stamp_of(status), len(data)
        record.measure()
        return record

    def _parse(self, opened: int, name: str, data: bytes) -> Handoff | None:
        try:
            return Handoff.model_validate_json(data)
        except ValidationError as error:
            self._log.warning("handoff_unreadable", file=name)
            if error.errors(include_input=False)[0]["type"] == "json_invalid":  # another version's is JSON
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=opened)
            return None
