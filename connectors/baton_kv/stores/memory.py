"""A store in this process's memory: for tests, of no use to an engine, which is three processes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from baton_kv.stores.base import Buffer, BytesReader, EntryMissing, StoreFull


class MemoryStore:
    """The `Store` interface over a dict.

    Args:
        budget: bytes it may hold; None: any number.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._entries: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._budget = budget
        self.quarantined: list[str] = []

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        data = b"".join(bytes(part) for part in parts)
        with self._lock:
            if self._budget is not None and len(data) > self._budget:
                raise StoreFull(f"an entry of {len(data)} bytes does not fit a budget of {self._budget}")
            self._entries.pop(key, None)
            while (
                self._budget is not None and sum(map(len, self._entries.values())) + len(data) > self._budget
            ):
                del self._entries[next(iter(self._entries))]
            self._entries[key] = data
        return len(data)

    @contextmanager
    def open(self, key: str) -> Iterator[BytesReader]:
        with self._lock:
            data = self._entries.pop(key, None)
            if data is None:
                raise EntryMissing(key)
            self._entries[key] = data  # the last one used goes last
        yield BytesReader(data)

    def exists(self, key: str) -> bool:
        return key in self._entries

    def delete(self, key: str) -> bool:
        with self._lock:
            return self._entries.pop(key, None) is not None

    def quarantine(self, key: str) -> None:
        if self.delete(key):
            self.quarantined.append(key)

    def keys(self) -> Iterator[str]:
        return iter(list(self._entries))
