"""Copy the files of handoffs between this machine's store and the shared one.

A file of KV is what one entry of the local store holds itself; an entry that continues others needs theirs
too. In the shared store each file is one hash of 1 MiB chunks, `POOL:f:{SCOPE/NAME}`, beside its size and the
size of its chunks: one key with one lifetime, written aside and renamed into place whole. Which entry needs
which files, and what may be evicted, is in the index; see `scripts`.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.errors import HandoffStoreUnavailable
from baton.library.here.entries import Deadline, FetchCutOff, LocalFile
from baton.library.valkey.connection import Client, ValkeyConnection, number
from baton.library.valkey.scripts import (
    BEGIN_FILE,
    DROP,
    ENTRY_BYTES,
    FILE_HEAD,
    PIN,
    PLACE_FILE,
    RESERVE,
    USE_ENTRY,
)
from baton.telemetry.metrics import SharedStoreMetrics
from baton_kv.stores.base import MAX_SHARED, EntryMissing, StoreError, StoreFull

CHUNK_BYTES = 1024 * 1024
CHUNKS_AT_ONCE = 4
"""Chunks that are written in one exchange; they are read one by one, which a processor's caches favour."""
BATCHES = 2
"""Exchanges of one file that are under way at once."""
THREADS = 8
WRITING_MS = 60_000
"""What is written aside goes by itself so long after its last chunk."""
PUSH_WITHIN_S = 120.0
"""An entry that is not written by then is given up, so that a slow store does not hold threads for long."""
MAX_FILE_BYTES = 1 << 40
MAX_NAMES_BYTES = 256 * (MAX_SHARED + 1)


@dataclass(frozen=True)
class Room:
    """The room that an entry takes in the shared store, and for how long.

    Attributes:
        budget: bytes that all handoffs may take.
        lifetime_ms: milliseconds that the entry lives.
        evictable: whether it may be evicted while it is not pinned.
        automatic: whether it is evicted before others.
    """

    budget: int
    lifetime_ms: int
    evictable: bool = True
    automatic: bool = False


class ValkeyFiles:
    """Writes, reads and removes files of the shared store.

    All calls block, and raise `HandoffStoreUnavailable` where the server fails.
    """

    def __init__(self, connection: ValkeyConnection, metrics: SharedStoreMetrics) -> None:
        self._connection = connection
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="shared-store")

    def close(self) -> None:
        """Begin no more exchanges of files; those under way end by their deadlines."""
        self._threads.shutdown(wait=False)

    def push(self, entry: str, files: Sequence[LocalFile], room: Room) -> None:
        """Write an entry's files, as a whole or not at all. Files that are there already are not written.

        Raises:
            StoreFull: it does not fit, or was evicted before it was complete.
            StoreError: a file could not be read.
        """
        sizes = [part for file in files for part in (file.key, file.size)]
        head = [entry, int(room.evictable), int(room.automatic), room.budget, room.lifetime_ms]
        self._free(self._connection.run("reserve", RESERVE, [*head, *sizes]))
        until = time.monotonic() + PUSH_WITHIN_S
        try:
            for file in files:
                self.write(file, room.lifetime_ms, until)
            self._require_counted(files)
        except BaseException:
            with contextlib.suppress(
                HandoffStoreUnavailable
            ):  # its place in the index goes with its lifetime
                self.drop([entry])
            raise

    def use(self, entry: str, *, automatic: bool) -> list[str]:
        """Mark an entry as used now, and return the names of its files, its own last; empty: there is none.

        Args:
            automatic: whether it is evicted before others all the same.

        Raises:
            StoreError: they are no names of files of one tenant.
        """
        line = self._connection.run("look", USE_ENTRY, [entry, MAX_NAMES_BYTES, int(automatic)])
        names = [str(name) for name in (line or b"").decode(errors="replace").split()]
        scope = entry.partition("/")[0]
        if len(names) > MAX_SHARED + 1 or any(name.partition("/")[0] != scope for name in names):
            raise StoreError("the shared store's index is damaged")
        return names

    def sizes(self, entries: Sequence[str]) -> list[int]:
        """Return the bytes of the files that each entry needs; 0: there is no such entry."""
        if not entries:
            return []
        return list(map(int, self._connection.run("look", ENTRY_BYTES, [MAX_NAMES_BYTES, *entries])))

    def chunks(self, name: str, deadline: Deadline, most: int) -> tuple[int, Generator[bytes]]:
        """Return the size of a file, and an iterator over its chunks.

        Args:
            deadline: by then all must have been read.
            most: bytes that it may have.

        Raises:
            EntryMissing: there is no such file.
            StoreError: what is there is not a file, or is larger.
            FetchCutOff: by the iterator: it took too long.
        """
        key = self._connection.file_key(name)
        told = self._connection.ask("look", lambda client: client.eval(FILE_HEAD, 1, key, most, CHUNK_BYTES))
        if not told:
            raise EntryMissing(name)
        size, chunk, longest, first = told
        if not (0 < size < MAX_FILE_BYTES and CHUNK_BYTES <= chunk <= 64 * CHUNK_BYTES):
            raise StoreError("the shared store holds something else than a file")
        if size > most:
            raise StoreError(f"a file in the shared store has {size} bytes, more than its record says")
        if longest > chunk:
            raise StoreError("a chunk in the shared store is too long")
        return size, self._read(name, size, chunk, first, deadline)

    def pin(self, entry: str, pinned: bool, most: int) -> int:
        """Protect an entry from eviction, or no longer.

        Args:
            most: bytes that may be protected in all; a tenant may protect its share of them.

        Returns:
            1: done; 0: too much would be protected; -1: there is no such entry.
        """
        return int(self._connection.run("pin", PIN, [entry, int(pinned), most]))

    def drop(self, entries: Sequence[str]) -> None:
        """Remove entries, and the files that no other one needs."""
        self.unlink(self._connection.run("drop", DROP, list(entries))[1:])

    def unlink(self, names: Sequence[bytes]) -> None:
        """Remove the bytes of files that the index has freed."""
        if not names:
            return
        keys = [self._connection.file_key(name.decode(errors="replace")) for name in names]

        def fill(pipe: Client) -> None:
            for key in keys:
                pipe.unlink(key)

        with contextlib.suppress(HandoffStoreUnavailable):  # they go with their lifetime
            self._connection.batch("unlink", fill)

    def extend(self, names: Sequence[bytes], lifetime_ms: int) -> None:
        """Extend the life of files to so long, at least."""
        keys = [self._connection.file_key(name.decode(errors="replace")) for name in names]

        def fill(pipe: Client) -> None:
            for key in keys:
                pipe.pexpire(key, lifetime_ms, gt=True)

        if keys:
            self._connection.batch("extend", fill)

    def total(self) -> int:
        """Return the bytes of all files and records that are counted."""
        key = self._connection.own_key("held")
        return sum(map(number, self._connection.ask("look", lambda client: client.hvals(key))))

    def _free(self, answer: Sequence[object]) -> None:
        """Remove what a reservation has freed."""
        self.unlink([each for each in answer[1:] if isinstance(each, bytes)])
        if answer[0] != 1:
            raise StoreFull("the shared store is full")

    def write(self, file: LocalFile, lifetime_ms: int, until: float) -> None:
        """Write one file, if it is not there; nobody counts it or looks for room.

        Args:
            until: monotonic time by which it must be written.

        Raises:
            StoreError: the file could not be read, or took too long.
        """
        connection, key = self._connection, self._connection.file_key(file.key)
        if connection.ask("look", lambda client: client.exists(key)):
            connection.ask("extend", lambda client: client.pexpire(key, lifetime_ms, gt=True))
            return
        aside = f"{key}:{secrets.token_hex(8)}"
        fields = 2 + -(-file.size // CHUNK_BYTES)
        try:
            self._write_chunks(aside, file, until)
            whole = connection.ask(
                "push", lambda client: client.eval(PLACE_FILE, 2, aside, key, fields, lifetime_ms)
            )
        except BaseException:
            with contextlib.suppress(HandoffStoreUnavailable):
                connection.ask("unlink", lambda client: client.unlink(aside))
            raise
        if not whole:
            raise StoreError(f"a part of {file.key} expired while it was written")
        self._metrics.moved("push", file.size)

    def _write_chunks(self, aside: str, file: LocalFile, until: float) -> None:
        """Write a file's chunks; while some are on their way, the next ones are read."""
        head = [file.size, CHUNK_BYTES, WRITING_MS]
        self._connection.ask("push", lambda client: client.eval(BEGIN_FILE, 1, aside, *head))
        sent: deque[Future[Any]] = deque()
        try:
            for start in range(0, file.size, CHUNK_BYTES * CHUNKS_AT_ONCE):
                if len(sent) == BATCHES:
                    sent.popleft().result()
                if time.monotonic() > until:
                    raise StoreError(f"pushing to the shared store took longer than {PUSH_WITHIN_S:g} s")
                data = memoryview(bytearray(min(CHUNK_BYTES * CHUNKS_AT_ONCE, file.size - start)))
                if file.read_into(start, data) != len(data):
                    raise StoreError(f"{file.key} ends too early")
                add = partial(_add_chunks, aside, start, data)
                sent.append(self._begin(self._connection.batch, "push", add))
            for each in sent:
                each.result()
        finally:
            wait(sent)

    def _begin(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin an exchange beside the caller's other work."""
        try:
            return self._threads.submit(work, *arguments)
        except RuntimeError:  # closed
            raise HandoffStoreUnavailable() from None

    def _require_counted(self, files: Sequence[LocalFile]) -> None:
        """Remove files again that were evicted while they were written.

        Who evicts removes the row of the index first and the bytes then, so one of the two sees it.
        """
        key = self._connection.own_key("size")
        names = [file.key for file in files]
        rows = self._connection.ask("look", lambda client: client.hmget(key, names))
        lost = [name.encode() for name, row in zip(names, rows, strict=True) if row is None]
        if lost:
            self.unlink(lost)
            raise StoreFull("the shared store is full")

    def _read(
        self, name: str, size: int, chunk: int, first: bytes | None, deadline: Deadline
    ) -> Generator[bytes]:
        """Yield a file's chunks, perhaps with the first; while the caller has one, the next is fetched."""
        key, count = self._connection.file_key(name), -(-size // chunk)
        coming: deque[Future[Any]] = deque()
        if first is not None:
            coming.append(Future())
            coming[0].set_result(first)
        for index in range(count):
            if not deadline.left_s:
                raise FetchCutOff(deadline, index * chunk)
            for ahead in range(index + len(coming), min(index + BATCHES, count)):
                get = partial(_get, key, str(ahead))
                coming.append(self._begin(self._connection.ask, "fetch", get))
            part = coming.popleft().result()
            if part is None:
                raise EntryMissing(name)  # expired, evicted or deleted meanwhile
            if len(part) != min(chunk, size - index * chunk):
                raise StoreError("a chunk in the shared store has another length")
            yield part
        self._metrics.moved("fetch", size)


def _add_chunks(aside: str, start: int, view: memoryview, pipe: Client) -> None:
    for at in range(0, len(view), CHUNK_BYTES):
        pipe.hset(aside, str((start + at) // CHUNK_BYTES), view[at : at + CHUNK_BYTES])
    pipe.pexpire(aside, WRITING_MS)  # also where it had expired, and is begun anew by these


def _get(key: str, field: str, client: Client) -> Any:
    return client.hget(key, field)
