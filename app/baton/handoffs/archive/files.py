"""Copy files of KV and images between this machine and the archive."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from baton.handoffs.archive.bucket import PART_BYTES, Bucket
from baton.handoffs.archive.documents import ArchivedFile, Names
from baton.handoffs.records.storage import FetchCutOff
from baton.telemetry.archive_metrics import ArchiveMetrics
from baton_kv.stores.base import EntryMissing, StoreError

PARTS_AHEAD = 4
"""Parts of a file that are read at once."""
PIECE_BYTES = 1024 * 1024
LEAST_RATE = 1024 * 1024
"""An upload may take as long as it would at so many bytes a second, `PATIENCE_S`, and what the pace costs."""
PATIENCE_S = 60.0
ReadInto = Callable[[int, memoryview], int]
"""Fills a buffer from an offset of a file on; returns the number of bytes read."""


class Damaged(StoreError):
    """A file in the archive is missing, or is not what a gateway wrote."""


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine.

    Attributes:
        key: key of the entry whose own it is, or an image's digest.
        name: name of its object in the archive.
        size: in bytes.
        read_into: reads it.
    """

    key: str
    name: str
    size: int
    read_into: ReadInto


class Pace:
    """Lets several threads together write so many bytes a second, and no more.

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
    """Writes and reads files of the archive. All calls block.

    Args:
        bucket: where they are.
        names: makes their digests.
        metrics: where bytes are counted.
        pace: how fast files are written.
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

    def push(self, file: LocalFile) -> ArchivedFile:
        """Write a file, unless it is there.

        Raises:
            StoreError: it cannot be read, took too long, or the gateway ends.
            HandoffStoreUnavailable: the archive failed.
        """
        digest = self._names.hasher()
        there = self._bucket.head(file.name)
        if there is not None and there[0] == file.size and there[1] < self._renewed_s:
            for piece in _pieces(file):
                digest.update(piece)
        else:
            self._bucket.upload(file.name, self._paced(file, digest))
            self._metrics.moved("push", file.size)
        return ArchivedFile(key=file.key, name=file.name, size=file.size, digest=digest.hexdigest())

    def is_there(self, file: ArchivedFile) -> bool:
        """Return whether a file is in the archive.

        Raises:
            HandoffStoreUnavailable: the archive failed.
        """
        found = self._bucket.head(file.name)
        return found is not None and found[0] == file.size

    def chunks(self, file: ArchivedFile, until: float) -> Generator[bytes]:
        """Return an iterator over a file's bytes, which fails at its end if they are not what was written.

        Args:
            file: the file.
            until: monotonic time by which all must have been read.

        Raises:
            Damaged: by the iterator: there is no such file, or it is another.
            FetchCutOff: by the iterator: it took too long.
            HandoffStoreUnavailable: by the iterator: the archive failed.
        """
        digest, size = self._names.hasher(), 0
        with contextlib.closing(self._parts(file, until)) as parts:
            for part in parts:
                digest.update(part)
                size += len(part)
                yield part
        if size != file.size or digest.hexdigest() != file.digest:
            self._metrics.not_used("tampered")
            raise Damaged("a file in the archive is not what was written there")
        self._metrics.moved("fetch", size)

    def _parts(self, file: ArchivedFile, until: float) -> Generator[bytes]:
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
                part = _result(waiting.popleft(), until, got)
                got += len(part)
                yield part
        finally:
            for each in waiting:
                each.cancel()

    def _paced(self, file: LocalFile, digest: blake3) -> Iterator[bytes]:
        until = time.monotonic() + PATIENCE_S + file.size / LEAST_RATE
        for piece in _pieces(file):
            if time.monotonic() > until:
                raise StoreError("writing to the archive took too long")
            until += self._pace.wait(len(piece))
            digest.update(piece)
            yield piece


def _result(part: Future[bytes], until: float, got: int) -> bytes:
    try:
        return part.result(timeout=max(0.0, until - time.monotonic()))
    except (TimeoutError, CancelledError):
        raise FetchCutOff("fetching from the archive took too long", got) from None
    except FileNotFoundError as error:
        raise Damaged(f"the archive has no file {error}") from None


def _pieces(file: LocalFile) -> Iterator[bytes]:
    for start in range(0, file.size, PIECE_BYTES):
        buffer = bytearray(min(PIECE_BYTES, file.size - start))
        if file.read_into(start, memoryview(buffer)) != len(buffer):
            raise EntryMissing(f"{file.key} ends too early")
        yield bytes(buffer)


def reading(data: bytes) -> ReadInto:
    """Return what reads bytes in memory."""

    def read_into(start: int, view: memoryview) -> int:
        part: Any = memoryview(data)[start : start + len(view)]
        view[: len(part)] = part
        return len(part)

    return read_into
