"""Copy whole handoffs between this machine and the archive. All calls block.

Files are written first, then the document that names them.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial

import structlog

from baton.errors import HandoffImagesLost
from baton.handoffs.archive.bucket import Bucket, Conflict
from baton.handoffs.archive.documents import ArchivedFile, Document, Names
from baton.handoffs.archive.files import ArchiveFiles, LocalFile, reading
from baton.handoffs.archive.records import ArchiveRecords, Version
from baton.handoffs.records.image_store import placed_image
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.records.storage import HandoffStorage, counting
from baton.images.placed_image import PlacedImage
from baton.telemetry.archive_metrics import ArchiveMetrics
from baton_kv.format import seal_of, shared_keys
from baton_kv.stores.base import Reader, SharedFiles, Store

TRIES = 20
"""Most times that a change is made again because another gateway was first."""


class Outcome(Enum):
    """What became of a handoff that was to be written."""

    WRITTEN = "written"
    CHANGED = "it was changed on this machine meanwhile"
    DELETED = "it was deleted in the archive"


Commit = Callable[[Callable[[], object]], bool]
"""Calls what writes the document, unless the handoff was changed here meanwhile; returns whether it did."""


@dataclass(frozen=True)
class Archive:
    """The archive's documents and files.

    Attributes:
        bucket: where they are.
        names: what objects are called.
        records: the documents.
        files: the files.
        metrics: where handoffs are counted.
        fetch_s: seconds in which a handoff must have been fetched.
    """

    bucket: Bucket
    names: Names
    records: ArchiveRecords
    files: ArchiveFiles
    metrics: ArchiveMetrics
    fetch_s: float

    def write(self, inner: HandoffStorage, record: HandoffRecord, commit: Commit) -> Outcome:
        """Bring the archive up to date with a handoff of this machine.

        Args:
            inner: this machine's storage, and perhaps the shared store's.
            record: the handoff as it is there.
            commit: the last step.

        Raises:
            StoreError: a file cannot be read, took too long, or the gateway ends.
            HandoffStoreUnavailable: the archive failed.
            Conflict: others change it all the time.
        """
        written: list[str] = []
        for _ in range(TRIES):
            handoff, there = self.records.current(record.tenant, record.id)
            if there is not None and there.deleted:
                self.records.release(handoff, written)
                return Outcome.DELETED
            document = self._pushed(inner, record, there)
            written = document.objects
            if there is not None and there.document.model_dump_json() == document.model_dump_json():
                return Outcome.WRITTEN if commit(lambda: None) else Outcome.CHANGED
            tag = there.tag if there is not None else None
            with contextlib.suppress(Conflict):
                if not commit(partial(self.records.write, document, tag)):
                    return Outcome.CHANGED
                self._push_again_what_went(inner, document)
                self.metrics.handoff("written")
                return Outcome.WRITTEN
        raise Conflict()

    def _pushed(self, inner: HandoffStorage, record: HandoffRecord, there: Version | None) -> Document:
        """Write the files of a handoff that this machine has, and return the document to write then."""
        before = there.document if there is not None else Document(record=None)
        told = before.record
        stands = told is not None and record.archived and not inner.shared  # changed in the archive first
        newest = told if stands or (told is not None and told.revision > record.revision) else record
        files, images = before.files, before.images
        with ExitStack() as stack:
            local = self._local_files(inner.store, record, stack) if not files else []
            pictures = self._local_images(inner, record) if record.images and not images else []
            if local or pictures:
                self.records.need(record, [each.name for each in (*local, *pictures)])
                files = files or tuple(self.files.push(each) for each in local)
                images = images or tuple(self.files.push(each) for each in pictures)
        assert newest is not None
        size = newest.bytes or (sum(each.size for each in files))
        return Document(
            record=newest.model_copy(update={"archived": True, "bytes": size if files else 0}),
            files=files,
            images=images,
        )

    def _push_again_what_went(self, inner: HandoffStorage, document: Document) -> None:
        """Write files once more that another gateway deleted before it saw that they are needed."""
        gone = {each.name for each in (*document.files, *document.images) if not self.files.is_there(each)}
        record = document.record
        if not gone or record is None:
            return
        with ExitStack() as stack:
            local = [*self._local_files(inner.store, record, stack), *self._local_images(inner, record)]
            for each in local:
                if each.name in gone:
                    self.files.push(each)

    def _local_files(self, store: Store, record: HandoffRecord, stack: ExitStack) -> list[LocalFile]:
        """Open the files of an entry of this machine, its own last; none if it is not here."""
        if not store.exists(record.key):
            return []
        own = stack.enter_context(store.open(record.key))
        keys = [*shared_keys(own), record.key]
        parts = [stack.enter_context(store.open(record.key, part)) for part in range(len(keys) - 1)]
        return [
            LocalFile(
                key, self.names.file(record.tenant, seal_of(reader)), len(reader), partial(_read_into, reader)
            )
            for key, reader in zip(keys, [*parts, own], strict=True)
        ]

    def _local_images(self, inner: HandoffStorage, record: HandoffRecord) -> list[LocalFile]:
        if not record.images:
            return []
        placed = {each.digest: each.image.data for each in inner.read_images(record)}
        return [
            LocalFile(digest, self.names.image(record.tenant, digest), len(data), reading(data))
            for digest, data in placed.items()
        ]

    def fetch(self, store: Store, files: Sequence[ArchivedFile], within_s: float) -> int:
        """Copy an entry's files to this machine; returns the bytes that were copied.

        Args:
            store: this machine's.
            files: the entry's, its own last.
            within_s: seconds that it may take.

        Raises:
            Damaged: a file is missing, or is not what was written.
            FetchCutOff: it took too long.
            StoreError: it does not fit.
            HandoffStoreUnavailable: the archive failed.
        """
        until, size = time.monotonic() + min(within_s, self.fetch_s), 0
        keys = [each.key for each in files]
        for index, file in enumerate(files):
            if store.exists(file.key):
                continue
            shared = SharedFiles(tuple(keys[:index]), keys[index - 1]) if index else SharedFiles()
            with contextlib.closing(self.files.chunks(file, until)) as chunks, counting(size):
                size += store.put(file.key, chunks, size=file.size, shared=shared)
        return size

    def images(self, document: Document) -> dict[str, bytes]:
        """Return the images of a handoff by digest.

        Raises:
            Damaged: one is missing, or is not what was written.
            StoreError: it took too long.
            HandoffStoreUnavailable: the archive failed.
        """
        until = time.monotonic() + self.fetch_s
        return {each.key: b"".join(self.files.chunks(each, until)) for each in document.images}

    def change(
        self, record: HandoffRecord, edit: Callable[[HandoffRecord], HandoffRecord | None]
    ) -> HandoffRecord | None:
        """Change an archived handoff; returns the record as it is then, None: it was deleted.

        Args:
            record: the handoff as it is known.
            edit: returns the record to write, given the one that is there; None: there is none any more.

        Raises:
            HandoffStoreUnavailable: the archive failed.
            Conflict: others change it all the time, or its document is damaged.
        """
        for _ in range(TRIES):
            _, there = self.records.current(record.tenant, record.id)
            if there is not None and there.damaged:
                break
            if there is None or there.document.record is None:
                return None
            changed = edit(there.document.record)
            if changed is None:
                return None
            written = changed.model_copy(update={"archived": True, "bytes": there.document.record.bytes})
            with contextlib.suppress(Conflict):
                self.records.write(there.document.model_copy(update={"record": written}), there.tag)
                return changed
        raise Conflict()

    def delete(self, record: HandoffRecord) -> tuple[str, list[str]]:
        """Delete a handoff for good.

        Returns:
            What it is called in the bucket, and its files, which `records.release` removes.

        Raises:
            HandoffStoreUnavailable: the archive failed.
        """
        handoff, there = self.records.current(record.tenant, record.id)
        document = there.document if there is not None else None
        if there is None or not there.deleted:
            self.records.bury(handoff, document)
            self.metrics.handoff("deleted")
        return handoff, document.objects if document is not None else []

    def without_kv(self, record: HandoffRecord) -> tuple[str, list[str]]:
        """Take a handoff's KV out of the archive; returns as `delete`.

        Raises:
            HandoffStoreUnavailable: the archive failed.
            Conflict: others change it all the time.
        """
        for _ in range(TRIES):
            handoff, there = self.records.current(record.tenant, record.id)
            if there is None or there.document.record is None or not there.document.files:
                return handoff, []
            kept = there.document.record.model_copy(update={"bytes": 0})
            with contextlib.suppress(Conflict):
                self.records.write(there.document.model_copy(update={"record": kept, "files": ()}), there.tag)
                return handoff, [each.name for each in there.document.files]
        raise Conflict()


def placed(record: HandoffRecord, found: dict[str, bytes]) -> list[PlacedImage]:
    """Return a handoff's images with their bytes, each verified against its digest.

    Raises:
        HandoffImagesLost: an image is missing or has changed.
    """
    for image in record.images:
        if hashlib.sha256(found.get(image.digest, b"")).hexdigest() != image.digest:
            structlog.get_logger("baton.handoffs").warning("handoff_image_unreadable", handoff=record.id)
            raise HandoffImagesLost()
    return [placed_image(image, found[image.digest]) for image in record.images]


def _read_into(reader: Reader, start: int, view: memoryview) -> int:
    return reader.read_into(start, [view])
