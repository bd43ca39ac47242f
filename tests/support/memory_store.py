"""Keep entries in memory, for tests of one process: those of an engine need a store that they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton_kv.stores.base import (
    NOTHING_SHARED,
    Buffer,
    Commit,
    EntryMissing,
    Piece,
    SharedFiles,
    SharedMissing,
    StoreFull,
)
from baton_kv.stores.room import to_fit_budget
from baton_kv.stores.tree import Listing, StoredEntry


class BytesReader:
    """A `Reader` over bytes in memory."""

    def __init__(self, data: Buffer) -> None:
        self._data = bytes(data)

    def __len__(self) -> int:
        return len(self._data)

    def read(self, start: int, stop: int) -> bytes:
        return self._data[start:stop]

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> int:
        filled = 0
        for buffer in buffers:
            part = self._data[start + filled : start + filled + len(buffer)]
            buffer[: len(part)] = part
            filled += len(part)
        return filled


@dataclass(eq=False)
class MemoryFile:
    """The bytes of one file, which several entries may need."""

    data: bytes


class MemoryStore:
    """The `Store` interface over a dict.

    Args:
        budget: bytes that the entries may take in all; None for no limit.

    Attributes:
        quarantined: keys of the entries that were quarantined.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._entries: dict[str, MemoryFile] = {}
        self._shared: dict[str, list[MemoryFile]] = {}
        self._used: dict[str, int] = {}
        self._pinned: set[str] = set()
        self._drafts: dict[str, tuple[bytearray, set[int]]] = {}
        self.lock = threading.Lock()
        self._budget = budget
        self.quarantined: list[str] = []

    def put(
        self,
        key: str,
        parts: Iterable[Piece],
        *,
        size: int = 0,
        shared: SharedFiles = NOTHING_SHARED,
        commit: Commit | None = None,
    ) -> int:
        data = b"".join(b"".join(part) if isinstance(part, list) else bytes(part) for part in parts)
        with self.lock:
            written = f"{key}.writing"  # holds the shared files while others are evicted
            self._shared[written] = [self._find(*each, shared) for each in enumerate(shared.keys)]
            try:
                self._make_room(len(data), key=key)
            except StoreFull:
                del self._shared[written]
                raise
            self._entries[key], self._shared[key] = MemoryFile(data), self._shared.pop(written)
            self._used[key] = time.monotonic_ns()
        return len(data)

    def _find(self, index: int, key: str, shared: SharedFiles) -> MemoryFile:
        others = self._shared.get(shared.holder, [])
        found = others[index] if index < len(others) else self._entries.get(key)
        if found is None:
            raise SharedMissing(f"the entry needs {key}, which is not there")
        return found

    @contextmanager
    def draft(
        self,
        key: str,
        name: str,
        *,
        size: int,
        rank: int,
        ranks: int,
        shared: SharedFiles = NOTHING_SHARED,
    ) -> Iterator[MemoryDraft]:
        with self.lock:
            data, finished = self._drafts.setdefault(name, (bytearray(size), set()))
        yield MemoryDraft(self, key, data, finished, rank, ranks, shared)

    def discard(self, name: str) -> None:
        with self.lock:
            self._drafts.pop(name, None)

    def _make_room(self, size: int, *, key: str) -> None:
        if self._budget is None:
            return
        listing = self._listing()
        scope, _, name = key.partition("/")
        replaced = (scope, name) if key else None
        for each in to_fit_budget(listing, size, beside=0, budget=self._budget, replaced=replaced):
            self._remove(f"{each.scope}/{each.name}")

    def _listing(self) -> Listing:
        listing = Listing()
        for key, file in self._entries.items():
            scope, name = key.split("/")
            shared = self._shared.get(key, [])
            for each in (file, *shared):
                listing.sizes[id(each)], listing.scopes[id(each)] = len(each.data), scope
            files = frozenset(map(id, shared))
            entry = StoredEntry(scope, name, id(file), files, self._used[key], key in self._pinned)
            listing.entries.append(entry)
        for key in self._shared.keys() - self._entries.keys():
            for each in self._shared[key]:
                listing.sizes[id(each)], listing.scopes[id(each)] = len(each.data), key.split("/")[0]
                listing.loose[id(each)] += 1
        return listing

    @contextmanager
    def open(self, key: str, part: int | None = None) -> Iterator[BytesReader]:
        with self.lock:
            file = self._file(key, part)
            if file is None:
                raise EntryMissing(key)
            for each, own in self._entries.items():
                if own is file:
                    self._used[each] = time.monotonic_ns()
        yield BytesReader(file.data)

    def _file(self, key: str, part: int | None) -> MemoryFile | None:
        if part is None:
            return self._entries.get(key)
        shared = self._shared.get(key, [])
        return shared[part] if part < len(shared) else None

    def exists(self, key: str, part: int | None = None) -> bool:
        return self._file(key, part) is not None

    def bytes_of(self, key: str) -> int:
        with self.lock:
            if key not in self._entries:
                return 0
            files = [self._entries[key], *self._shared.get(key, ())]
            return sum(len(file.data) for file in files)

    def delete(self, key: str) -> bool:
        with self.lock:
            return self._remove(key)

    def _remove(self, key: str) -> bool:
        self._pinned.discard(key)
        self._shared.pop(key, None)
        return self._entries.pop(key, None) is not None

    def quarantine(self, key: str, part: int | None = None) -> None:
        with self.lock:
            corrupt = self._file(key, part)
            if corrupt is None:
                return
            for files in self._shared.values():
                if corrupt in files:
                    del files[files.index(corrupt) :]
            for each in [each for each, file in self._entries.items() if file is corrupt]:
                self._remove(each)
                self.quarantined.append(each)

    def pin(self, key: str, pinned: bool) -> None:
        with self.lock:
            (self._pinned.add if pinned else self._pinned.discard)(key)

    def pinned(self, *, also: str | None = None) -> dict[str, int]:
        with self.lock:
            return self._listing().pinned(also)

    def keys(self) -> Iterator[str]:
        return iter(list(self._entries))

    def size(self) -> int:
        with self.lock:
            return self._listing().size

    def make_room(self, size: int) -> None:
        with self.lock:
            self._make_room(size, key="")

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> int:
        oldest = time.monotonic_ns() - older_than_s * 1e9
        return sum(self.delete(key) for key in self.keys() if not wanted(key) and self._used[key] <= oldest)


class MemoryDraft:
    """The `Draft` interface over a bytearray.

    Args:
        store: the store that the entry goes into.
        key: key of the entry.
        data: the entry's bytes, shared by all ranks.
        finished: the ranks that have finished, shared by all ranks.
        rank: number of this rank.
        ranks: number of ranks that write.
        shared: the files of other entries that it needs too.
    """

    def __init__(
        self,
        store: MemoryStore,
        key: str,
        data: bytearray,
        finished: set[int],
        rank: int,
        ranks: int,
        shared: SharedFiles,
    ) -> None:
        self._store = store
        self._key = key
        self._data = data
        self._finished = finished
        self._rank = rank
        self._ranks = ranks
        self._shared = shared

    def write_at(self, offset: int, parts: Sequence[Buffer]) -> None:
        for part in parts:
            self._data[offset : offset + len(part)] = part
            offset += len(part)

    def read(self, start: int, stop: int) -> bytes:
        return bytes(self._data[start:stop])

    def finish(self) -> bool:
        with self._store.lock:
            self._finished.add(self._rank)
            return len(self._finished) == self._ranks

    def place(self) -> None:
        self._store.put(self._key, [self._data], shared=self._shared)
