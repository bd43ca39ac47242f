"""Keep entries in memory: a store for tests, since an engine's processes need one that they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from baton_kv.stores.base import Buffer, BytesReader, EntryMissing, StoreFull


class MemoryStore:
    """The `Store` interface over a dict.

    Args:
        budget: bytes that the entries may take in all; None for no limit.

    Attributes:
        quarantined: keys of the entries that were quarantined.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._entries: dict[str, bytes] = {}
        self._used: dict[str, float] = {}
        self._pinned: set[str] = set()
        self._drafts: dict[str, tuple[bytearray, set[int]]] = {}
        self.lock = threading.Lock()
        self._budget = budget
        self.quarantined: list[str] = []

    def put(self, key: str, parts: Iterable[Buffer], *, size: int = 0) -> int:
        data = b"".join(bytes(part) for part in parts)
        with self.lock:
            self._make_room(len(data), keep=key)
            self._entries.pop(key, None)
            self._entries[key] = data
            self._used[key] = time.monotonic()
        return len(data)

    @contextmanager
    def draft(self, key: str, name: str, *, size: int, rank: int, ranks: int) -> Iterator[MemoryDraft]:
        with self.lock:
            data, finished = self._drafts.setdefault(name, (bytearray(size), set()))
        yield MemoryDraft(self, key, data, finished, rank, ranks)

    def discard(self, name: str) -> None:
        with self.lock:
            self._drafts.pop(name, None)

    def _make_room(self, size: int, *, keep: str) -> None:
        if self._budget is None:
            return
        others = {key: len(data) for key, data in self._entries.items() if key != keep}
        evictable = [key for key in others if key not in self._pinned]
        if size + sum(others.values()) - sum(others[key] for key in evictable) > self._budget:
            raise StoreFull(f"an entry of {size} bytes does not fit the store's budget of {self._budget}")
        total = sum(others.values())
        for key in evictable:
            if total + size <= self._budget:
                return
            total -= len(self._entries.pop(key))

    @contextmanager
    def open(self, key: str) -> Iterator[BytesReader]:
        with self.lock:
            data = self._entries.pop(key, None)
            if data is None:
                raise EntryMissing(key)
            self._entries[key] = data  # the most recently used is evicted last
            self._used[key] = time.monotonic()
        yield BytesReader(data)

    def exists(self, key: str) -> bool:
        return key in self._entries

    def delete(self, key: str) -> bool:
        with self.lock:
            self._pinned.discard(key)
            return self._entries.pop(key, None) is not None

    def quarantine(self, key: str) -> None:
        if self.delete(key):
            self.quarantined.append(key)

    def pin(self, key: str, pinned: bool) -> None:
        with self.lock:
            (self._pinned.add if pinned else self._pinned.discard)(key)

    def keys(self) -> Iterator[str]:
        return iter(list(self._entries))

    def size(self) -> int:
        with self.lock:
            return sum(map(len, self._entries.values()))

    def make_room(self, size: int) -> None:
        with self.lock:
            self._make_room(size, keep="")

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> int:
        oldest = time.monotonic() - older_than_s
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
    """

    def __init__(
        self, store: MemoryStore, key: str, data: bytearray, finished: set[int], rank: int, ranks: int
    ) -> None:
        self._store = store
        self._key = key
        self._data = data
        self._finished = finished
        self._rank = rank
        self._ranks = ranks

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
        self._store.put(self._key, [self._data])
