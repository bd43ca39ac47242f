"""Copy whole handoffs between this machine and the archive. All calls block.

Files are written first, then the document that names them.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

import structlog
from blake3 import blake3

from baton.errors import HandoffImagesLost
from baton.images.image import PlacedImage
from baton.library.archive.bucket import PART_BYTES, Bucket, Conflict
from baton.library.archive.documents import ArchivedFile, Document, Names
from baton.library.archive.records import ArchiveRecords, Version
from baton.library.handoff import Handoff
from baton.library.here.entries import Deadline, FetchCutOff, LocalFile, copy_entry, opened
from baton.library.here.images import placed_image
from baton.library.tiers import Here
from baton.telemetry.metrics import ArchiveMetrics
from baton_kv.format import seal_of
from baton_kv.stores.base import EntryMissing, Store, StoreError

# Copy files of KV and images between this machine and the archive.


PARTS_AHEAD = 4
"""Parts of a file that are read at once."""
FETCH_S = "handoffs.archive_fetch_s"
PIECE_BYTES = 1024 * 1024
LEAST_RATE = 1024 * 1024
"""An upload may take as long as it would at so many bytes a second, `PATIENCE_S`, and what the pace costs."""
PATIENCE_S = 60.0


class Damaged(StoreError):
    """A file in the archive is missing, or is not what a gateway wrote."""


class LocalFiles(NamedTuple):
    """The files of a handoff that this machine has, of KV and of images, by their names in the archive."""

    kv: dict[str, LocalFile]
    images: dict[str, LocalFile]


class Pace:
    """Limits the bytes a second that several threads together write.

    Args:
        rate: bytes a second; None: no limit.
    """

    def __init__(self, rate: int | None) -> None:
        self.closed = threading.Event()
        self._rate = rate
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, size: int) -> float:
        """Wait until so many bytes may be written; returns the seconds that it took.

        Raises:
            StoreError: the gateway ends.
        """
        with self._lock:
            now = time.monotonic()
            at = max(now, self._next)
            self._next = at + (size / self._rate if self._rate is not None else 0.0)
        if self.closed.wait(at - now) or self.closed.is_set():
            raise StoreError("the gateway ends")
        return at - now


class ArchiveFiles:
    """Writes and reads files of the archive.

    All calls block, and raise `HandoffStoreUnavailable` where the archive fails.

    Args:
        renewed_s: seconds after which a file is written again for a handoff that needs it, so that a rule of
            the bucket may delete what is older than handoffs live.
    """

    def __init__(
        self, bucket: Bucket, names: Names, metrics: ArchiveMetrics, pace: Pace, renewed_s: float
    ) -> None:
        self._bucket = bucket
        self._names = names
        self._metrics = metrics
        self._pace = pace
        self._renewed_s = renewed_s
        self._readers = ThreadPoolExecutor(2 * PARTS_AHEAD, thread_name_prefix="archive-part")

    def close(self) -> None:
        """Read and write no more."""
        self._pace.closed.set()
        self._bucket.close()
        self._readers.shutdown(wait=False, cancel_futures=True)

    def push(self, name: str, file: LocalFile) -> ArchivedFile:
        """Write a file under a name, unless it is there.

        Raises:
            StoreError: it cannot be read, took too long, or the gateway ends.
        """
        digest = self._names.hasher()
        there = self._bucket.head(name)
        if there is not None and there[0] == file.size and there[1] < self._renewed_s:
            for piece in _pieces(file):
                digest.update(piece)
        else:
            self._bucket.upload(name, self._paced(file, digest))
            self._metrics.moved("push", file.size)
        return ArchivedFile(key=file.key, name=name, size=file.size, digest=digest.hexdigest())

    def is_there(self, file: ArchivedFile) -> bool:
        """Return whether a file is in the archive."""
        found = self._bucket.head(file.name)
        return found is not None and found[0] == file.size

    def chunks(self, file: ArchivedFile, deadline: Deadline) -> Generator[bytes]:
        """Return an iterator over a file's bytes, which fails at its end if they are not what was written.

        Raises:
            Damaged: by the iterator: there is no such file, or it is another.
            FetchCutOff: by the iterator: it took too long.
        """
        digest, size = self._names.hasher(), 0
        with contextlib.closing(self._parts(file, deadline)) as parts:
            for part in parts:
                digest.update(part)
                size += len(part)
                yield part
        if size != file.size or digest.hexdigest() != file.digest:
            self._metrics.not_used("tampered")
            raise Damaged("a file in the archive is not what was written there")
        self._metrics.moved("fetch", size)

    def _parts(self, file: ArchivedFile, deadline: Deadline) -> Generator[bytes]:
        """Read a file's parts in order, some of them ahead."""
        waiting: deque[Future[bytes]] = deque()
        starts, got = iter(range(0, file.size, PART_BYTES)), 0
        try:
            while True:
                while len(waiting) < PARTS_AHEAD and (start := next(starts, None)) is not None:
                    stop = min(start + PART_BYTES, file.size)
                    waiting.append(self._readers.submit(self._bucket.part, file.name, start, stop))
                if not waiting:
                    return
                part = _result(waiting.popleft(), deadline, got)
                got += len(part)
                yield part
        finally:
            for each in waiting:
                each.cancel()

    def _paced(self, file: LocalFile, digest: blake3) -> Iterator[bytes]:
        until = time.monotonic() + PATIENCE_S + file.size / LEAST_RATE
        for piece in _pieces(file):
            if time.monotonic() > until:
                raise StoreError(f"writing {file.size} bytes to the archive took longer than 1 MiB/s would")
            until += self._pace.wait(len(piece))
            digest.update(piece)
            yield piece


def _result(part: Future[bytes], deadline: Deadline, got: int) -> bytes:
    try:
        return part.result(timeout=deadline.left_s)
    except (TimeoutError, CancelledError):
        raise FetchCutOff(deadline, got) from None
    except FileNotFoundError as error:
        raise Damaged(f"the archive has no file {error}") from None


def _pieces(file: LocalFile) -> Iterator[bytes]:
    for start in range(0, file.size, PIECE_BYTES):
        buffer = bytearray(min(PIECE_BYTES, file.size - start))
        if file.read_into(start, memoryview(buffer)) != len(buffer):
            raise EntryMissing(f"{file.key} ends too early")
        yield bytes(buffer)


TRIES = 20
"""Most times that a change is made again because another gateway was first."""


class Outcome(Enum):
    """The outcome of writing a handoff."""

    WRITTEN = "written"
    CHANGED = "it was changed on this machine meanwhile"
    DELETED = "it was deleted in the archive"


Commit = Callable[[Callable[[], object]], bool]
"""Calls what writes the document, unless the handoff was changed here meanwhile; returns whether it did."""


@dataclass(frozen=True)
class Archive:
    """The archive's documents and files.

    Attributes:
        fetch_s: seconds in which a handoff must have been fetched.
    """

    bucket: Bucket
    names: Names
    records: ArchiveRecords
    files: ArchiveFiles
    metrics: ArchiveMetrics
    fetch_s: float

    def write(self, here: Here, record: Handoff, commit: Commit) -> Outcome:
        """Bring the archive up to date with a handoff of this machine.

        Raises:
            StoreError: a file cannot be read, took too long, or the gateway ends.
            Conflict: others change it all the time.
        """
        written: list[str] = []
        for _ in range(TRIES):
            handoff, there = self.records.current(record.tenant, record.id)
            if there is not None and there.deleted:
                self.records.release(handoff, written)
                return Outcome.DELETED
            document = self._pushed(here, record, there)
            written = document.objects
            if there is not None and there.document.model_dump_json() == document.model_dump_json():
                return Outcome.WRITTEN if commit(lambda: None) else Outcome.CHANGED
            tag = there.tag if there is not None else None
            with contextlib.suppress(Conflict):
                if not commit(partial(self.records.write, document, tag)):
                    return Outcome.CHANGED
                self._push_again_what_went(here, document)
                self.metrics.handoff("written")
                return Outcome.WRITTEN
        raise Conflict()

    def _pushed(self, here: Here, record: Handoff, there: Version | None) -> Document:
        """Write the files of a handoff that this machine has, and return the document to write then."""
        before = there.document if there is not None else Document(record=None)
        told = before.record
        stands = told is not None and record.archived and here.pool is None  # changed in the archive first
        newest = told if stands or (told is not None and told.revision > record.revision) else record
        files, images = before.files, before.images
        with self._local_files(here, record, kv=not files, images=not images) as local:
            if local.kv or local.images:
                self.records.need(record, [*local.kv, *local.images])
                files = files or tuple(self.files.push(*each) for each in local.kv.items())
                images = images or tuple(self.files.push(*each) for each in local.images.items())
        assert newest is not None
        size = newest.bytes or (sum(each.size for each in files))
        return Document(
            record=newest.model_copy(update={"archived": True, "bytes": size if files else 0}),
            files=files,
            images=images,
        )

    def _push_again_what_went(self, here: Here, document: Document) -> None:
        """Write files once more that another gateway deleted before it saw that they are needed."""
        gone = {each.name for each in (*document.files, *document.images) if not self.files.is_there(each)}
        record = document.record
        if not gone or record is None:
            return
        with self._local_files(here, record, kv=True, images=True) as local:
            for name, file in (local.kv | local.images).items():
                if name in gone:
                    self.files.push(name, file)

    @contextlib.contextmanager
    def _local_files(self, here: Here, record: Handoff, *, kv: bool, images: bool) -> Iterator[LocalFiles]:
        """Open the files of KV, its own last, and those of images that are on this machine."""
        with contextlib.ExitStack() as stack:
            files = {}
            if kv and here.store.exists(record.key):
                for key, reader in stack.enter_context(opened(here.store, record.key)):
                    files[self.names.file(record.tenant, seal_of(reader))] = LocalFile.of(key, reader)
            placed = here.read_images(record) if images and record.images else []
            data = {each.image.digest: each.image.data for each in placed}
            named = ((self.names.image(record.tenant, digest), digest) for digest in data)
            yield LocalFiles(files, {name: LocalFile.holding(digest, data[digest]) for name, digest in named})

    def fetch(self, store: Store, files: Sequence[ArchivedFile], within_s: float) -> int:
        """Copy an entry's files to this machine; returns the bytes that were copied.

        Raises:
            Damaged: a file is missing, or is not what was written.
            FetchCutOff: it took too long.
            StoreError: it does not fit.
        """
        deadline = Deadline.within(FETCH_S, self.fetch_s, within_s)
        return copy_entry(
            store,
            [each.key for each in files],
            lambda index: (files[index].size, self.files.chunks(files[index], deadline)),
        )

    def images(self, document: Document) -> dict[str, bytes]:
        """Return the images of a handoff by digest.

        Raises:
            Damaged: one is missing, or is not what was written.
            StoreError: it took too long.
        """
        deadline = Deadline.within(FETCH_S, self.fetch_s)
        return {each.key: b"".join(self.files.chunks(each, deadline)) for each in document.images}

    def change(self, record: Handoff, edit: Callable[[Handoff], Handoff | None]) -> Handoff | None:
        """Change an archived handoff; returns the record as it is then, None: it was deleted.

        Args:
            edit: returns the record to write, given the one that is there; None: there is none any more.

        Raises:
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

    def delete(self, record: Handoff) -> tuple[str, list[str]]:
        """Delete a handoff for good.

        Returns:
            What it is called in the bucket, and its files, which `records.release` removes.
        """
        handoff, there = self.records.current(record.tenant, record.id)
        document = there.document if there is not None else None
        if there is None or not there.deleted:
            self.records.bury(handoff, document)
            self.metrics.handoff("deleted")
        return handoff, document.objects if document is not None else []

    def without_kv(self, record: Handoff) -> tuple[str, list[str]]:
        """Take a handoff's KV out of the archive; returns as `delete`.

        Raises:
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


def placed(record: Handoff, found: dict[str, bytes]) -> list[PlacedImage]:
    """Return a handoff's images with their bytes, each verified against its digest.

    Raises:
        HandoffImagesLost: an image is missing or has changed.
    """
    for image in record.images:
        if hashlib.sha256(found.get(image.digest, b"")).hexdigest() != image.digest:
            structlog.get_logger("baton.handoffs").warning("handoff_image_unreadable", handoff=record.id)
            raise HandoffImagesLost()
    return [placed_image(image, found[image.digest]) for image in record.images]
