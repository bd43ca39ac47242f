"""Read, change and delete the documents of archived handoffs.

A change is written only over the version that it was made from, so none is lost. A deleted handoff's document
says so for a day: a gateway that writes a new one finds it, and none brings the handoff back.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import structlog

from baton.errors import HandoffStoreUnavailable
from baton.library.archive.bucket import Bucket
from baton.library.archive.documents import (
    Document,
    Due,
    Names,
    OtherVersion,
    Tampered,
    due_name,
    needed_name,
    needed_prefix,
    parsed,
    record_name,
)
from baton.library.handoff import Handoff
from baton.library.here.records import ID
from baton.telemetry.metrics import ArchiveMetrics

DELETED_FOR_S = 86_400.0
"""A deleted handoff's document says so for this long; no gateway writes one so late."""
UNKNOWN_FOR_S = 2.0
"""An id that the archive does not know is not asked for again so soon."""
MAX_UNKNOWN = 10_000
NEWER = "A gateway of another version of Baton archived this handoff; ask that one."


class Version(NamedTuple):
    """A document and the version that it is.

    Attributes:
        document: what it says; of a damaged one nothing.
        damaged: it is not what a gateway wrote.
    """

    document: Document
    tag: str
    damaged: bool = False

    @property
    def deleted(self) -> bool:
        """True if it says that its handoff was deleted, or has expired."""
        return self.document.record is None and not self.damaged


class ArchiveRecords:
    """The documents of the archive.

    All calls block, and raise `HandoffStoreUnavailable` where the server fails.
    """

    def __init__(self, bucket: Bucket, names: Names, metrics: ArchiveMetrics) -> None:
        self._bucket = bucket
        self._names = names
        self._metrics = metrics
        self._unknown: dict[str, float] = {}
        self._lock = threading.Lock()
        self._log = structlog.get_logger("baton.handoffs")

    def look_up(self, handoff_id: str, tenant: str) -> Version | None:
        """Return a handoff of a tenant, unless it is unknown, deleted, expired or tampered with.

        Raises:
            HandoffStoreUnavailable: the archive failed, or another version of Baton knows the handoff.
        """
        if ID.fullmatch(handoff_id) is None:
            return None
        handoff = self._names.handoff(tenant, handoff_id)
        if self._unknown.get(handoff, 0.0) > time.monotonic():
            return None
        try:
            found = self.read(handoff)
        except OtherVersion:
            raise HandoffStoreUnavailable(NEWER) from None
        except Tampered:
            found = None
        record = found.document.record if found is not None else None
        if record is None or record.id != handoff_id or record.tenant != tenant:
            self._note_unknown(handoff)
            return None
        return found if record.expires_at > time.time() else None

    def read(self, handoff: str, unless: str | None = None) -> Version | None:
        """Read a document, perhaps one of a deleted handoff; None: there is none.

        Args:
            handoff: what the handoff is called in the bucket.

        Raises:
            NotChanged: it still is that version.
            Tampered: it is not what a gateway wrote, or of another version.
        """
        name = record_name(handoff)
        found = self._bucket.get(name, unless)
        if found is None:
            return None
        try:
            return Version(parsed(name, self._names.unseal(name, found.data)), found.version)
        except OtherVersion:
            self._log.warning("archive_of_another_version", object=name)
            raise
        except Tampered:
            self._metrics.not_used("tampered")
            self._log.warning("archive_tampered", object=name)
            raise Tampered(name, found.version) from None

    def write(self, document: Document, over: str | None) -> str:
        """Write a handoff's document; returns the version that it is.

        Its files must be there, and `need` must have been called for them.

        Args:
            over: the version that it was made from; None: there was none.

        Raises:
            Conflict: another version is there.
        """
        record = document.record
        assert record is not None
        handoff = self._names.handoff(record.tenant, record.id)
        self._note_end(handoff, record.expires_at, document)
        with self._lock:
            self._unknown.pop(handoff, None)
        return self._put(handoff, document, over, new=over is None)

    def need(self, record: Handoff, objects: list[str]) -> None:
        """Note, before they are written, which files a handoff will need."""
        handoff = self._names.handoff(record.tenant, record.id)
        due = due_name(handoff, record.expires_at)
        body = Due(objects=tuple(objects)).model_dump_json().encode()
        self._bucket.put(due, self._names.seal(due, body))
        for each in objects:
            self._bucket.put(needed_name(each, handoff), b"")

    def bury(self, handoff: str, document: Document | None, over: str | None = None) -> None:
        """Replace a document by one that says that its handoff was deleted.

        Args:
            handoff: what the handoff is called in the bucket.
            over: the version that it must have; None: any.

        Raises:
            Conflict: it has another version.
        """
        self._note_end(handoff, time.time() + DELETED_FOR_S, document)
        self._put(handoff, Document(record=None, deleted_at=time.time()), over, new=False)

    def release(self, handoff: str, objects: list[str]) -> None:
        """Delete those of a handoff's files that no other handoff needs.

        Between a look at who needs a file and its deletion a gateway may begin to need it: that gateway looks
        again after it wrote its document, and writes the file once more.
        """
        for each in objects:
            self._bucket.delete(needed_name(each, handoff))
            if next(self._bucket.names(needed_prefix(each)), None) is None:
                self._bucket.delete(each)

    def current(self, tenant: str, handoff_id: str) -> tuple[str, Version | None]:
        """Return a handoff's name in the bucket, and its document, which may be damaged.

        Raises:
            HandoffStoreUnavailable: the archive failed, or another version of Baton wrote the document.
        """
        handoff = self._names.handoff(tenant, handoff_id)
        try:
            return handoff, self.read(handoff)
        except OtherVersion:
            raise HandoffStoreUnavailable(NEWER) from None
        except Tampered as error:
            return handoff, Version(Document(record=None), error.tag, damaged=True)

    def _note_end(self, handoff: str, at: float, document: Document | None) -> None:
        objects = tuple(document.objects) if document is not None else ()
        due = due_name(handoff, at)
        self._bucket.put(due, self._names.seal(due, Due(objects=objects).model_dump_json().encode()))

    def _put(self, handoff: str, document: Document, over: str | None, *, new: bool) -> str:
        name = record_name(handoff)
        data = self._names.seal(name, document.model_dump_json(by_alias=True).encode())
        return self._bucket.put(name, data, over, new=new)

    def _note_unknown(self, handoff: str) -> None:
        with self._lock:
            if len(self._unknown) >= MAX_UNKNOWN:
                self._unknown.clear()
            self._unknown[handoff] = time.monotonic() + UNKNOWN_FOR_S
