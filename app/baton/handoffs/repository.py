"""Records on disk, one small JSON file a handoff, so that handoffs outlive the process.

Several gateways may share the folder. Each of them changes a record only while it holds the lock, and writes
what it has just read: no change of another is lost, and what one has deleted no other brings back.

records/
  ID.json   one handoff
  .*        a record that is being written
  total     locked while records change; holds the bytes that they take in all
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import structlog
from pydantic import ValidationError

from baton.handoffs.record import HandoffRecord, Holding
from baton_kv.folders import CREATE, LOCK, folder, make_folder, open_file
from baton_kv.stores.file import RECORDS_TOTAL

ABANDONED_AFTER_S = 60.0
READ_AT_MOST = 64 * 1024 * 1024
"""Bytes; a file above that was not written here."""
SETTLED_AFTER_NS = 50_000_000
"""A folder that changed less long ago may change again and keep its time, which moves by a kernel's tick."""
SUFFIX = ".json"
ID = re.compile(r"[A-Za-z0-9_-]{16,64}")
TRANSIENT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EINTR, errno.EAGAIN})
"""What says nothing of a file itself: it cannot be read now, and may well be whole."""
ASIDE = re.compile(r"\.[0-9a-f]{16}")
"""The name of a record that is being written."""
Stamp = tuple[int, int, int]
Holdings = Callable[[], list[Holding]]
Edit = Callable[[HandoffRecord, Holdings], None]
"""Changes a record while nobody else does; is told what the other handoffs over the store hold."""


@dataclass
class News:
    """What other gateways did to the records since the last look.

    Attributes:
        changed: the records they wrote, as they are now.
        gone: ids of those they removed.
    """

    changed: list[HandoffRecord] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)


@dataclass
class Held:
    """The folder while it is locked.

    Attributes:
        folder: its descriptor.
        total: bytes that all records take.
    """

    folder: int
    total: int


class RecordFiles:
    """A folder of records. Whatever goes wrong here costs a record its life beyond the process, no more.

    Args:
        path: of the folder, made with mode 0700 when it is missing; None: nothing is kept.

    Raises:
        OSError: a link, a pipe or another user's folder is in the folder's place or in that of its lock.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._log = structlog.get_logger("baton.handoffs")
        self._stamps: dict[str, Stamp] = {}
        self._holdings: dict[str, Holding] = {}
        self._seen: int | None = None
        self._news = News()
        if path is not None:
            make_folder(path)
            with self._locked(path) as held:
                _remove_abandoned(held.folder)

    def create(self, record: HandoffRecord, edit: Edit) -> bool:
        """Keep a new record as `edit` leaves it, whole or not at all; whether it is kept."""
        if self._path is None:
            edit(record, list)
            return False
        try:
            with self._locked(self._path) as held:
                edit(record, lambda: self._others(held, record.id))
                self._write(held, record)
        except OSError as error:
            self._log.warning("handoff_not_kept", reason=error.strerror)
            return False
        return True

    def update(self, handoff_id: str, edit: Edit) -> HandoffRecord | None:
        """Change a kept record; as it is now, or None: it was deleted.

        Raises:
            OSError: it could not be read or written.
        """
        assert self._path is not None
        with self._locked(self._path) as held:
            record = self._read(held.folder, handoff_id)
            if record is not None:
                edit(record, lambda: self._others(held, handoff_id))
                self._write(held, record)
            return record

    def alone(self, record: HandoffRecord, edit: Edit) -> None:
        """Change a record that is not on disk, while nobody else changes any.

        Raises:
            OSError: the folder cannot be used.
        """
        if self._path is None:
            edit(record, list)
            return
        with self._locked(self._path) as held:
            edit(record, lambda: self._others(held, record.id))

    def read(self, handoff_id: str) -> HandoffRecord | None:
        """One record, if there is one: another gateway over the same store may have left it."""
        if self._path is None or ID.fullmatch(handoff_id) is None:
            return None
        with contextlib.suppress(OSError), folder(self._path) as opened:
            return self._read(opened, handoff_id)
        return None

    def reread(self, record: HandoffRecord) -> HandoffRecord | None:
        """A kept record as it is now: the same object if nobody changed it, None if it is gone."""
        if self._path is None:
            return record
        try:
            with folder(self._path) as opened:
                found = os.stat(record.id + SUFFIX, dir_fd=opened, follow_symlinks=False)
                return record if _stamp(found) == record.stamp else self._read(opened, record.id)
        except FileNotFoundError:
            return None
        except OSError as error:  # it may well be there
            self._log.warning("handoff_unreadable", handoff=record.id, reason=error.strerror)
            return record

    def exists(self, handoff_id: str) -> bool:
        """Whether there is a record of that id, also one that only another version can read."""
        if self._path is None:
            return False
        return os.path.lexists(self._path / (handoff_id + SUFFIX))

    def read_all(self) -> list[HandoffRecord]:
        """Every record that can be read, the oldest first; one that is no JSON is removed."""
        self._stamps, self._holdings, self._seen, self._news = {}, {}, None, News()
        return sorted(self.refresh().changed, key=lambda record: record.created_at)

    def refresh(self) -> News:
        """What other gateways did since the last look; nothing is read where the folder did not change."""
        if self._path is None:
            return News()
        try:
            with self._locked(self._path) as held:
                self._refresh(held)
                news, self._news = self._news, News()
                return news
        except OSError as error:
            self._log.warning("handoffs_not_listed", reason=error.strerror)
            return News()

    def size(self) -> int:
        """Bytes that all records take."""
        if self._path is None:
            return 0
        with self._locked(self._path) as held:
            return held.total

    def remove(self, record: HandoffRecord) -> None:
        """Forget a record.

        Raises:
            OSError: it could not be removed.
        """
        if self._path is not None:
            with self._locked(self._path) as held:
                self._remove(held, record.id)

    def remove_expired(self, record: HandoffRecord) -> HandoffRecord | None:
        """Forget a record whose time is over, unless another gateway gave it more: then as it is now.

        Raises:
            OSError: it could not be removed.
        """
        if self._path is None:
            return None
        with self._locked(self._path) as held:
            left = self._read(held.folder, record.id)
            if left is not None and left.expires_at > record.expires_at:
                return left
            self._remove(held, record.id)
        return None

    @contextmanager
    def _locked(self, path: Path) -> Iterator[Held]:
        with (
            folder(path) as opened,
            FileIO(open_file(RECORDS_TOTAL, within=opened, flags=LOCK), "r+") as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            digits = lock.read(32)
            held = Held(opened, int(digits) if digits.isdigit() else 0)
            before = held.total
            try:
                yield held
            finally:
                if held.total != before or not digits:
                    os.pwrite(lock.fileno(), b"%020d" % max(0, held.total), 0)

    def _others(self, held: Held, handoff_id: str) -> list[Holding]:
        """What the other handoffs over the store hold."""
        self._refresh(held)
        return [holding for found, holding in self._holdings.items() if found != handoff_id]

    def _refresh(self, held: Held) -> None:
        """Read what others wrote since the last look, into the news."""
        changed_at = os.fstat(held.folder).st_mtime_ns
        if changed_at == self._seen:
            return
        settled = time.time_ns() - changed_at > SETTLED_AFTER_NS
        found, held.total = _listed(held.folder)
        for each in [each for each in self._stamps if each not in found]:
            self._forget(each)
            self._news.gone.append(each)
        for each in [each for each, stamp in found.items() if self._stamps.get(each) != stamp]:
            try:
                record = self._read(held.folder, each)
            except OSError as error:
                self._log.warning("handoff_unreadable", handoff=each, reason=error.strerror)
                settled = False  # it is looked at again
                continue
            self._stamps[each] = found[each]
            if record is not None:
                self._holdings[each] = record.holding
                self._news.changed.append(record)
        self._seen = changed_at if settled else None

    def _forget(self, handoff_id: str) -> None:
        self._stamps.pop(handoff_id, None)
        self._holdings.pop(handoff_id, None)

    def _write(self, held: Held, record: HandoffRecord) -> None:
        aside, name = f".{secrets.token_hex(8)}", record.id + SUFFIX
        record.revision += 1
        data = record.model_dump_json().encode()
        try:
            with FileIO(os.open(aside, CREATE, 0o600, dir_fd=held.folder), "wb") as stream:
                _write_all(stream, data)
                status = os.fstat(stream.fileno())
            before = _size(name, held.folder)
            os.replace(aside, name, src_dir_fd=held.folder, dst_dir_fd=held.folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(aside, dir_fd=held.folder)
            raise
        held.total += len(data) - before
        stamp = _stamp(status)
        record.stamp, record.disk_bytes = stamp, len(data)
        self._stamps[record.id], self._holdings[record.id] = stamp, record.holding

    def _remove(self, held: Held, handoff_id: str) -> None:
        size = _size(handoff_id + SUFFIX, held.folder)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(handoff_id + SUFFIX, dir_fd=held.folder)
        held.total -= size
        self._forget(handoff_id)

    def _read(self, opened: int, handoff_id: str) -> HandoffRecord | None:
        """Read a record; None: it is not there, or cannot be understood.

        Raises:
            OSError: it cannot be read now, and may well be there.
        """
        name = handoff_id + SUFFIX
        try:
            with FileIO(open_file(name, within=opened), "rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_size > READ_AT_MOST:
                    return None
                data = stream.readall()
        except OSError as error:
            if error.errno in TRANSIENT:
                raise
            return None
        try:
            record = HandoffRecord.model_validate_json(data)
        except ValidationError as error:
            self._log.warning("handoff_unreadable", file=name)
            if error.errors(include_input=False)[0]["type"] == "json_invalid":  # not another version's
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=opened)
            return None
        if record.id != handoff_id:
            return None
        record.kept, record.stamp, record.disk_bytes = True, _stamp(status), len(data)
        record.measure()
        return record


def _stamp(status: os.stat_result) -> Stamp:
    """What differs between two writings of a file."""
    return status.st_ino, status.st_mtime_ns, status.st_size


def _listed(opened: int) -> tuple[dict[str, Stamp], int]:
    """The stamps of the records in a folder by id, and the bytes that they take."""
    stamps: dict[str, Stamp] = {}
    total = 0
    with os.scandir(opened) as found:
        for each in found:
            handoff_id = each.name.removesuffix(SUFFIX)
            if handoff_id == each.name or ID.fullmatch(handoff_id) is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = each.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    stamps[handoff_id] = _stamp(status)
                    total += status.st_size
    return stamps, total


def _size(name: str, opened: int) -> int:
    try:
        return os.stat(name, dir_fd=opened, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _write_all(stream: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


def _remove_abandoned(opened: int) -> None:
    """Remove what a killed writer left; whoever writes now holds the lock."""
    for name in os.listdir(opened):
        with contextlib.suppress(OSError):
            age = time.time() - os.stat(name, dir_fd=opened, follow_symlinks=False).st_mtime
            if ASIDE.fullmatch(name) and age > ABANDONED_AFTER_S:
                os.unlink(name, dir_fd=opened)
