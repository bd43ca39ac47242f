"""Keep the records of handoffs in the shared store, where all gateways of a pool read and change them.

A record is one hash: what never changes (`body`), what may (`changes`), and its revision. A change is written
only over the revision that it was made from, and only if the record still exists; so no change is lost, and
none brings a deleted handoff back. Each change has a number, by which others find what is new to them.

Times are those of the store's clock, so gateways whose clocks differ agree on when a handoff expires.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import structlog
from pydantic import ValidationError

from baton.errors import HandoffStoreUnavailable
from baton.handoffs.records.record import HandoffRecord, Usage
from baton.handoffs.records.record_folder import ID
from baton.handoffs.records.repository import Edit, News, RecordDeleted
from baton.handoffs.shared.clients import Client
from baton.handoffs.shared.connection import SharedConnection
from baton.handoffs.shared.files import PoolFiles
from baton.handoffs.shared.scripts import CHANGE_RECORD, KEEP_PENDING, REMOVE_RECORD, WRITE_RECORD

CHANGING = {"label", "pin", "bytes", "ttl_s", "expires_at", "revision", "audit", "state", "archived"}
"""Fields of a record that may change after it was saved."""
PENDING_MS = 15_000
"""A pending record whose gateway does not report for so long goes away."""
TRIES = 100
"""Most times that a change is made again because another gateway was first."""
READ_AT_ONCE = 64
WRITTEN, CHANGED, DELETED = 1, 2, -1
CHANGED_WHILE_PENDING = ("label", "pin", "ttl_s", "expires_at", "revision")


def image_entry(record: HandoffRecord) -> str:
    """Return the key of the entry that holds a handoff's images."""
    return f"{record.key}:m"


class SharedRecords:
    """The records of a pool; see `baton.handoffs.records.repository.Records`. All calls block.

    Args:
        connection: to the store.
        files: the files of KV and images, which go with their records.
        budget: bytes that all handoffs may take in the shared store.
    """

    def __init__(self, connection: SharedConnection, files: PoolFiles, budget: int) -> None:
        self._connection = connection
        self._files = files
        self._budget = budget
        self._usage: dict[str, Usage] = {}
        self._revisions: dict[str, int] = {}
        self._seen = 0
        self._store: bytes | None = None
        self._reported = 0
        self._refreshing = threading.Lock()
        self._log = structlog.get_logger("baton.handoffs")

    def announce(self, record: HandoffRecord) -> None:
        """Let other gateways know of a pending handoff, as long as `keep_pending` is called for it."""
        try:
            record.announced = self._write(record, PENDING_MS, announced=False) == WRITTEN
        except HandoffStoreUnavailable as error:
            record.announced = True  # it may have been written all the same
            self._log.warning("handoff_not_shared", handoff=record.id, reason=error.message)

    def keep_pending(self, ids: Sequence[str]) -> list[str]:
        """Report that handoffs are still pending; returns those that were deleted meanwhile.

        Raises:
            HandoffStoreUnavailable: the store failed.
        """
        self._reported, *deleted = self._connection.run(
            "pending", KEEP_PENDING, [PENDING_MS, self._reported, *ids]
        )
        return [each.decode() for each in deleted]

    def create(self, record: HandoffRecord, edit: Edit) -> bool:
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

    def _create(self, record: HandoffRecord, edit: Edit) -> int:
        """Write a record whole, with what other gateways changed while it was pending."""
        for _ in range(TRIES):
            edit(record, lambda: self._others(record.id))
            answer = self._write(record, lifetime_ms(record), announced=record.announced)
            if answer != CHANGED:
                return answer
            if (pending := self.read(record.id)) is None:
                continue
            for name in CHANGED_WHILE_PENDING:
                setattr(record, name, getattr(pending, name))
        raise HandoffStoreUnavailable()

    def update(self, handoff_id: str, edit: Edit) -> HandoffRecord | None:
        for _ in range(TRIES):
            record = self.read(handoff_id)
            if record is None:
                return None
            before = record.revision
            edit(record, lambda: self._others(handoff_id))
            record.revision = before + 1
            lifetime, entries = lifetime_ms(record), [record.key, image_entry(record)]
            changes = json.dumps(self._changes(record))
            arguments = [handoff_id, before, changes, record.revision, lifetime, *entries]
            answer = self._connection.run("record", CHANGE_RECORD, arguments)
            if answer[0] == WRITTEN:
                self._files.extend(answer[1:], lifetime)
                self._note(record)
                return record
            if answer[0] == DELETED:
                return None
        raise HandoffStoreUnavailable()

    def edit_unsaved(self, record: HandoffRecord, edit: Edit) -> None:
        edit(record, lambda: self._others(record.id))

    def read(self, handoff_id: str) -> HandoffRecord | None:
        if ID.fullmatch(handoff_id) is None:
            return None
        key = self._key(handoff_id)
        found = self._connection.ask("record", lambda client: client.hmget(key, ["body", "changes", "rev"]))
        return self._parsed(handoff_id, found)

    def reread(self, record: HandoffRecord) -> HandoffRecord | None:
        key = self._key(record.id)
        try:
            revision = self._connection.ask("record", lambda client: client.hget(key, "rev"))
            if revision is None:
                unwritten = record.announced and not record.on_disk and not record.archived
                return record if unwritten and not self._was_removed(record.id) else None
            return record if int(revision) == record.revision else self.read(record.id)
        except HandoffStoreUnavailable:  # it cannot be read now, but may exist
            return record

    def _was_removed(self, handoff_id: str) -> bool:
        """Return whether a record that is missing was removed, and did not expire as nobody reported it."""
        own = self._connection.own_key

        def fill(pipe: Client) -> None:
            pipe.zscore(own("dead"), handoff_id)
            pipe.get(own("lost"))

        change, lost = self._connection.batch("record", fill)
        return change is not None or int(lost or 0) > self._reported

    def exists(self, handoff_id: str) -> bool:
        key = self._key(handoff_id)
        try:
            return bool(self._connection.ask("record", lambda client: client.exists(key)))
        except HandoffStoreUnavailable:
            return True

    def read_all(self) -> list[HandoffRecord]:
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

    def remove(self, record: HandoffRecord) -> None:
        self._remove(record, "")

    def remove_expired(self, record: HandoffRecord) -> HandoffRecord | None:
        found = self.read(record.id)
        if found is not None and found.expires_at > record.expires_at:
            return found
        if not self._remove(record, str(found.revision) if found is not None else ""):
            return self.read(record.id)
        return None

    def _remove(self, record: HandoffRecord, revision: str) -> bool:
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
        if last and not self._goes_on(store, int(seq or 0), int(floor or 0)):
            store, seq, _, changed, _ = self._ask_news(0)
            gone = {each.encode() for each in list(self._usage)} - set(changed)
        news.gone += [each.decode() for each in gone]
        for each in news.gone:
            self._forget(each)
        listed = [each.decode() for each in changed]
        for first in range(0, len(listed), READ_AT_ONCE):
            news.changed += self._read_new(listed[first : first + READ_AT_ONCE])
        self._seen, self._store = int(seq or 0), store

    def _goes_on(self, store: bytes | None, seq: int, floor: int) -> bool:
        """Return whether the changes since the last look are all that is new.

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
        own = self._connection.own_key

        def fill(pipe: Client) -> None:
            pipe.get(own("id"))
            pipe.get(own("seq"))
            pipe.get(own("floor"))
            pipe.zrangebyscore(own("log"), f"({last}", "+inf")
            pipe.zrangebyscore(own("gone"), f"({last}", "+inf")

        found = self._connection.batch("refresh", fill)
        if found[0] is None:
            with contextlib.suppress(HandoffStoreUnavailable):  # it may be full
                found[0] = self._connection.store_id()
        return found

    def _read_new(self, ids: Sequence[str]) -> list[HandoffRecord]:
        """Read those of some records whose revision is not known here."""
        found = self._connection.batch(
            "refresh", lambda pipe: [pipe.hget(self._key(each), "rev") for each in ids]
        )
        new = [
            each
            for each, revision in zip(ids, found, strict=True)
            if revision is not None and int(revision) != self._revisions.get(each)
        ]
        fields = ["body", "changes", "rev"]
        whole = self._connection.batch(
            "refresh", lambda pipe: [pipe.hmget(self._key(each), fields) for each in new]
        )
        read = [self._parsed(each, found) for each, found in zip(new, whole, strict=True)]
        return [record for record in read if record is not None]

    def _write(self, record: HandoffRecord, life: int, *, announced: bool) -> int:
        pending = str(record.revision) if announced else ""
        record.revision += 1
        body = json.loads(record.model_dump_json(by_alias=True, exclude=CHANGING))
        body["created_at"] += self._connection.ahead_s
        whole, changes = json.dumps(body), json.dumps(self._changes(record))
        scope = record.key.partition("/")[0]
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
        ]
        answer = self._connection.run("record", WRITE_RECORD, arguments)
        self._files.unlink(answer[1:])
        if answer[0] == WRITTEN:
            record.disk_bytes = len(whole) + len(changes)
            self._note(record)
        return int(answer[0])

    def _changes(self, record: HandoffRecord) -> dict[str, Any]:
        changes: dict[str, Any] = json.loads(record.model_dump_json(include=CHANGING))
        changes["expires_at"] += self._connection.ahead_s
        return changes

    def _parsed(self, handoff_id: str, found: Sequence[bytes | None]) -> HandoffRecord | None:
        body, changes, revision = found
        if body is None or changes is None or revision is None:
            return None
        try:
            values = json.loads(body) | json.loads(changes)
            for field in ("created_at", "expires_at"):
                values[field] -= self._connection.ahead_s
            record = HandoffRecord.model_validate(values)
        except (ValueError, TypeError, KeyError, ValidationError):
            self._log.warning("handoff_unreadable", handoff=handoff_id)
            return None
        if record.id != handoff_id:
            return None
        record.revision = int(revision)
        record.on_disk = record.announced = True
        record.disk_bytes = len(body) + len(changes)
        record.measure()
        self._note(record)
        return record

    def _note(self, record: HandoffRecord) -> None:
        record.stamp = (record.revision, 0, record.disk_bytes)
        self._usage[record.id], self._revisions[record.id] = record.usage, record.revision

    def _forget(self, handoff_id: str) -> None:
        self._usage.pop(handoff_id, None)
        self._revisions.pop(handoff_id, None)

    def _others(self, handoff_id: str) -> list[Usage]:
        return [usage for found, usage in list(self._usage.items()) if found != handoff_id]

    def _key(self, handoff_id: str) -> str:
        return self._connection.own_key(f"r:{handoff_id}")


def lifetime_ms(record: HandoffRecord) -> int:
    """Return the milliseconds that a handoff lives from now on."""
    return max(1, int((record.expires_at - time.time()) * 1000))
