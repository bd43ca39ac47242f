"""Keep records and images of handoffs in the shared store, each image once for all handoffs of a tenant."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog
from pydantic import ValidationError

from baton.errors import HandoffImagesLost, HandoffStoreUnavailable
from baton.images.image import PlacedImage
from baton.library.handoff import UNSAVED, Footprint, Handoff, Lease
from baton.library.here.entries import Deadline, LocalFile
from baton.library.here.images import placed_image
from baton.library.here.records import ID, MAX_RECORD_BYTES, Edit, News, RecordDeleted
from baton.library.valkey.connection import ValkeyConnection, number
from baton.library.valkey.files import Room, ValkeyFiles
from baton.library.valkey.scripts import (
    CHANGE_RECORD,
    KEEP_PENDING,
    NEWS,
    READ_RECORDS,
    REMOVE_RECORD,
    WAS_REMOVED,
    WRITE_RECORD,
)
from baton_kv.stores.base import StoreError

# Keep the records of handoffs in the shared store, where all gateways of a pool read and change them.
#
# A record is one hash: what never changes (`body`), what may (`changes`), and its revision. A change is
# written only over the revision that it was made from, and only if the record still exists; so no change is
# lost, and none brings a deleted handoff back. Each change has a number, by which others find what is new to
# them.
#
# A record's `seal` is a digest of its id, revision, body and changes, under the pool's secret. Who can write
# to the store but has no secret can delete a record or put an older revision of it back, and no more: a
# record without its seal is left out.
#
# Times are those of the store's clock, so gateways whose clocks differ agree on when a handoff expires.


CHANGING = set(Lease.model_fields)
PENDING_MS = 15_000
"""A pending record whose gateway does not report for so long goes away."""
FETCH_S = "handoffs.shared_fetch_s"
TRIES = 100
"""Most times that a change is made again because another gateway was first."""
READ_AT_ONCE = 64
WRITTEN, CHANGED, DELETED = 1, 2, -1
SAME = 1
"""What stands for a record that has the revision that is known here."""


def image_entry(record: Handoff) -> str:
    """Return the key of the entry that holds a handoff's images."""
    return f"{record.key}:m"


class ValkeyRecords:
    """The records of a pool; see `baton.library.here.records.Records`.

    All calls block, and raise `HandoffStoreUnavailable` where the server fails.

    Args:
        files: the files of KV and images, which go with their records.
        budget: bytes that all handoffs may take in the shared store.
    """

    def __init__(self, connection: ValkeyConnection, files: ValkeyFiles, budget: int) -> None:
        self._connection = connection
        self._files = files
        self._budget = budget
        self._usage: dict[str, Footprint] = {}
        self._revisions: dict[str, int] = {}
        self._seen = 0
        self._store: bytes | None = None
        self._reported = 0
        self._refreshing = threading.Lock()
        self._log = structlog.get_logger("baton.handoffs")

    def announce(self, record: Handoff) -> None:
        """Show other gateways a pending handoff, as long as `keep_pending` is called for it."""
        try:
            record.announced = self._write(record, PENDING_MS, announced=False) == WRITTEN
        except HandoffStoreUnavailable as error:
            record.announced = True  # it may have been written all the same
            self._log.warning("handoff_not_shared", handoff=record.id, reason=error.message)

    def keep_pending(self, ids: Sequence[str]) -> list[str]:
        """Report that handoffs are still pending; returns those that another machine deleted meanwhile."""
        try:
            arguments = [PENDING_MS, self._reported, *ids]
            self._reported, *deleted = self._connection.run("pending", KEEP_PENDING, arguments)
        except HandoffStoreUnavailable:
            return []
        return [each.decode() for each in deleted]

    def create(self, record: Handoff, edit: Edit) -> bool:
        try:
            answer = self._create(record, edit)
        except HandoffStoreUnavailable as error:
            record.announced = True  # it may have been written all the same
            self._log.warning("handoff_not_shared", handoff=record.id, reason=error.message)
            return False
        if answer == DELETED:
            raise RecordDeleted()
        if answer != WRITTEN:
            self._log.warning("handoff_not_shared", handoff=record.id, reason="the shared store is full")
        return answer == WRITTEN

    def _create(self, record: Handoff, edit: Edit) -> int:
        """Write a record whole, with what other gateways changed while it was pending."""
        for _ in range(TRIES):
            edit(record, lambda: self._others(record.id))
            answer = self._write(record, lifetime_ms(record), announced=record.announced)
            if answer != CHANGED:
                return answer
            if (pending := self.read(record.id)) is None:
                continue
            record.take(pending, but=UNSAVED)
        raise HandoffStoreUnavailable()

    def update(self, handoff_id: str, edit: Edit) -> Handoff | None:
        for _ in range(TRIES):
            (row,) = self._rows("record", [(handoff_id, "")])
            record = self._parsed(handoff_id, row)
            if record is None:
                return None
            before = record.revision
            edit(record, lambda: self._others(handoff_id))
            record.revision = before + 1
            lifetime, entries = lifetime_ms(record), [record.key, image_entry(record)]
            changes = json.dumps(self._changes(record))
            seal = self._connection.seal(handoff_id, record.revision, row[0], changes)
            arguments = [handoff_id, before, changes, record.revision, lifetime, seal, *entries]
            answer = self._connection.run("record", CHANGE_RECORD, arguments)
            if answer[0] == WRITTEN:
                self._files.extend(answer[1:], lifetime)
                self._note(record)
                return record
            if answer[0] == DELETED:
                return None
        raise HandoffStoreUnavailable()

    def edit_unsaved(self, record: Handoff, edit: Edit) -> None:
        edit(record, lambda: self._others(record.id))

    def read(self, handoff_id: str) -> Handoff | None:
        if ID.fullmatch(handoff_id) is None:
            return None
        (row,) = self._rows("record", [(handoff_id, "")])
        return self._parsed(handoff_id, row)

    def reread(self, record: Handoff) -> Handoff | None:
        try:
            (row,) = self._rows("record", [(record.id, record.revision)])
            if row is None:
                unwritten = record.announced and not record.on_disk and not record.archived
                return record if unwritten and not self._was_removed(record.id) else None
            return record if row == SAME else self._parsed(record.id, row)
        except HandoffStoreUnavailable:  # it cannot be read now, but may exist
            return record

    def _was_removed(self, handoff_id: str) -> bool:
        """Return whether a record that is missing was removed, and did not expire as nobody reported it."""
        return bool(self._connection.run("record", WAS_REMOVED, [handoff_id, self._reported]))

    def exists(self, handoff_id: str) -> bool:
        key = self._key(handoff_id)
        try:
            return bool(self._connection.ask("record", lambda client: client.exists(key)))
        except HandoffStoreUnavailable:
            return True

    def read_all(self) -> list[Handoff]:
        self._usage, self._revisions, self._seen = {}, {}, 0
        return sorted(self.refresh().changed, key=lambda record: record.created_at)

    def refresh(self) -> News:
        news = News()
        try:
            with self._refreshing:
                self._refresh(news)
        except HandoffStoreUnavailable as error:  # what was read by then is news all the same
            self._log.warning("handoffs_not_listed", reason=error.message)
        return news

    def size(self) -> int:
        return sum(usage.non_kv_bytes for usage in list(self._usage.values()))

    def remove(self, record: Handoff) -> None:
        self._remove(record, "")

    def remove_expired(self, record: Handoff) -> Handoff | None:
        found = self.read(record.id)
        if found is not None and found.expires_at > record.expires_at:
            return found
        if not self._remove(record, str(found.revision) if found is not None else ""):
            return self.read(record.id)
        return None

    def _remove(self, record: Handoff, revision: str) -> bool:
        """Remove a record with all that belongs to it; returns False if it has another revision."""
        arguments = [record.id, revision, record.key, image_entry(record)]
        answer = self._connection.run("record", REMOVE_RECORD, arguments)
        if answer[0] != WRITTEN:
            return False
        self._files.unlink(answer[1:])
        self._forget(record.id)
        return True

    def _refresh(self, news: News) -> None:
        last = self._seen
        store, seq, floor, changed, gone = self._ask_news(last)
        if last and not self._is_continuous(store, seq, floor):
            store, seq, _, changed, _ = self._ask_news(0)
            gone = {each.encode() for each in list(self._usage)} - set(changed)
        news.gone += self._ids(gone)
        for each in news.gone:
            self._forget(each)
        listed = self._ids(changed)
        for first in range(0, len(listed), READ_AT_ONCE):
            some = listed[first : first + READ_AT_ONCE]
            rows = self._rows("refresh", [(each, self._revisions.get(each, "")) for each in some])
            read = [self._parsed(each, row) for each, row in zip(some, rows, strict=True) if row != SAME]
            news.changed += [record for record in read if record is not None]
        self._seen, self._store = seq, store

    def _ids(self, members: Iterable[bytes]) -> list[str]:
        """Return the members of a list of handoffs that are ids."""
        found = []
        for each in members:
            if ID.fullmatch(told := each.decode(errors="replace")) is not None:
                found.append(told)
            else:
                self._connection.not_readable("id", told[:80])
        return found

    def _is_continuous(self, store: bytes | None, seq: int, floor: int) -> bool:
        """Return whether the log of changes continues from the last look; if not, all is read again.

        Not if more was removed since than the store remembers, and not if the store was emptied or is an
        older copy of itself: then it counts its changes from a lower number.
        """
        return store == self._store and floor <= self._seen <= seq

    def _ask_news(self, last: int) -> list[Any]:
        """Ask what was changed and removed after a change.

        Returns:
            The id of the store, the numbers of the last change and of the last removal that is not
            remembered, the ids of the records that were changed, and of those that were removed.
        """
        found: list[Any] = self._connection.run("refresh", NEWS, [last])
        if found[0] is None:
            with contextlib.suppress(HandoffStoreUnavailable):  # it may be full
                found[0] = self._connection.store_id()
        return found

    def _rows(self, operation: str, wanted: Sequence[tuple[str, int | str]]) -> list[Any]:
        """Read the rows of some records.

        Args:
            wanted: an id and the revision that is known of it, for each.

        Returns:
            For each body, changes, revision and seal; `SAME`: it has the known revision, 0: it is too large,
            None: there is none.
        """
        asked = [part for each in wanted for part in each]
        rows: list[Any] = self._connection.run(operation, READ_RECORDS, [MAX_RECORD_BYTES, *asked])
        return rows

    def _write(self, record: Handoff, life: int, *, announced: bool) -> int:
        pending = str(record.revision) if announced else ""
        record.revision += 1
        body = json.loads(record.model_dump_json(by_alias=True, exclude=CHANGING))
        body["created_at"] += self._connection.ahead_s
        whole, changes = json.dumps(body), json.dumps(self._changes(record))
        scope = record.key.partition("/")[0]
        seal = self._connection.seal(record.id, record.revision, whole, changes)
        arguments = [
            record.id,
            scope,
            whole,
            changes,
            record.revision,
            life,
            self._budget,
            pending,
            self._reported,
            seal,
        ]
        answer = self._connection.run("record", WRITE_RECORD, arguments)
        self._files.unlink(answer[1:])
        if answer[0] == WRITTEN:
            record.disk_bytes = len(whole) + len(changes)
            self._note(record)
        return int(answer[0])

    def _changes(self, record: Handoff) -> dict[str, Any]:
        changes: dict[str, Any] = json.loads(record.model_dump_json(include=CHANGING))
        changes["expires_at"] += self._connection.ahead_s
        return changes

    def _parsed(self, handoff_id: str, row: Any) -> Handoff | None:
        """Return the record that a row says; None: there is none, or no gateway of the pool wrote it so."""
        if row is None:
            return None
        if not row or None in row or not self._is_sealed(handoff_id, *row):
            self._connection.not_readable("record", handoff_id)
            return None
        body, changes, revision, _ = row
        try:
            values = json.loads(body) | json.loads(changes)
            for field in ("created_at", "expires_at"):
                values[field] -= self._connection.ahead_s
            record = Handoff.model_validate(values)
        except (ValueError, TypeError, KeyError, ValidationError):  # a gateway of another version
            self._connection.not_readable("record", handoff_id)
            return None
        record.revision = number(revision)
        record.on_disk = record.announced = True
        record.disk_bytes = len(body) + len(changes)
        record.measure()
        self._note(record)
        return record

    def _is_sealed(self, handoff_id: str, body: bytes, changes: bytes, revision: bytes, seal: bytes) -> bool:
        right = self._connection.seal(handoff_id, number(revision), body, changes)
        return hmac.compare_digest(seal, right.encode())

    def _note(self, record: Handoff) -> None:
        record.stamp = (record.revision, 0, record.disk_bytes)
        self._usage[record.id], self._revisions[record.id] = record.footprint, record.revision

    def _forget(self, handoff_id: str) -> None:
        self._usage.pop(handoff_id, None)
        self._revisions.pop(handoff_id, None)

    def _others(self, handoff_id: str) -> list[Footprint]:
        return [usage for found, usage in list(self._usage.items()) if found != handoff_id]

    def _key(self, handoff_id: str) -> str:
        return self._connection.own_key(f"r:{handoff_id}")


def lifetime_ms(record: Handoff) -> int:
    """Return the milliseconds that a handoff lives from now on."""
    return max(1, int((record.expires_at - time.time()) * 1000))


class ValkeyImages:
    """The images of a pool's handoffs; see `baton.library.here.images.Images`.

    All calls block, and raise `HandoffStoreUnavailable` where the server fails.

    Args:
        budget: bytes that all handoffs may take there.
        fetch_s: seconds in which the images of a handoff must have been fetched.
    """

    def __init__(self, files: ValkeyFiles, budget: int, fetch_s: float) -> None:
        self._files = files
        self._budget = budget
        self._fetch_s = fetch_s
        self._log = structlog.get_logger("baton.handoffs")

    def save(self, record: Handoff) -> bool:
        held = record.image_data.items()
        files = [LocalFile.holding(_name(record, digest), data) for digest, data in held]
        try:
            self._files.push(
                image_entry(record), files, Room(self._budget, lifetime_ms(record), evictable=False)
            )
        except (HandoffStoreUnavailable, StoreError) as error:
            self._log.warning("handoff_images_not_kept", reason=str(error))
            return False
        record.image_data.clear()
        return True

    def read(self, record: Handoff) -> list[PlacedImage]:
        held, deadline = dict(record.image_data), Deadline.within(FETCH_S, self._fetch_s)
        for digest, size in {image.digest: image.bytes for image in record.images}.items():
            if digest not in held:
                held[digest] = self._read(record, digest, size, deadline)
        return [placed_image(image, held[image.digest]) for image in record.images]

    def remove(self, record: Handoff) -> None:
        """Leave them: they go with the record."""

    def size(self) -> int:
        """Return 0: the records count their images."""
        return 0

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> None:
        """Leave them: what has no record goes by itself."""

    def _read(self, record: Handoff, digest: str, size: int, deadline: Deadline) -> bytes:
        try:
            _, chunks = self._files.chunks(_name(record, digest), deadline, size)
            data = b"".join(chunks)
        except StoreError as error:
            self._log.warning("handoff_image_unreadable", handoff=record.id, reason=str(error))
            raise HandoffImagesLost() from None
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            self._log.warning("handoff_image_unreadable", handoff=record.id, reason="its digest is wrong")
            raise HandoffImagesLost()
        return data


def _name(record: Handoff, digest: str) -> str:
    return f"{record.key.partition('/')[0]}/m{digest}"
