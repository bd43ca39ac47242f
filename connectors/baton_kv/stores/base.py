"""The interface of a store, and what it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from baton_kv.contract import TransferError, TransferFailure

Buffer = bytes | bytearray | memoryview


class StoreError(TransferError):
    """The store could not do what was asked; nothing half-written is ever visible."""

    failure = TransferFailure.DEVICE


class EntryMissing(StoreError):
    """There is no entry of that key."""

    failure = TransferFailure.MISSING


class StoreFull(StoreError):
    """The entry does not fit the store's budget, or its device."""

    failure = TransferFailure.FULL


class Reader(Protocol):
    """One entry, open for reading."""

    def __len__(self) -> int:
        """Its size in bytes."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`, fewer where the entry ends.

        Raises:
            StoreError: they could not be read.
        """
        ...

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers, one after the other, with what begins at `start`; how many bytes there were.

        Raises:
            StoreError: they could not be read.
        """
        ...


class BytesReader:
    """A `Reader` of bytes in memory."""

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


class Store(Protocol):
    """Immutable entries by key. Safe to use from several threads and processes at once."""

    def put(self, key: str, parts: Iterable[Buffer], *, size: int = 0) -> int:
        """Write an entry whole; it is visible only when every byte is there.

        Args:
            key: its key.
            parts: its bytes, in order.
            size: how many there will be, if that is known: what cannot fit then costs no other entry.

        Returns:
            Its size in bytes.

        Raises:
            StoreFull: there is no room, also after evicting what may go.
            StoreError: it could not be written.
        """
        ...

    def open(self, key: str) -> AbstractContextManager[Reader]:
        """An entry, valid inside the context, also when it is deleted meanwhile.

        Raises:
            EntryMissing: there is none.
            StoreError: it could not be read.
        """
        ...

    def exists(self, key: str) -> bool: ...

    def delete(self, key: str) -> bool:
        """Remove an entry; whether there was one."""
        ...

    def quarantine(self, key: str) -> None:
        """Put an entry that proved wrong where nobody finds it by its key."""
        ...

    def pin(self, key: str, pinned: bool) -> None:
        """Keep an entry, there already or still to come, when others go for the budget; or no longer."""
        ...

    def keys(self) -> Iterator[str]:
        """Every key there is, in no order."""
        ...

    def size(self) -> int:
        """Bytes all entries take, and what else counts with them."""
        ...

    def make_room(self, size: int) -> None:
        """Let entries go until so many bytes more fit the budget.

        Raises:
            StoreFull: they cannot be made to.
            StoreError: the store could not be looked at.
        """
        ...

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> int:
        """Remove the entries that are not wanted and have not been used for so long; how many went."""
        ...
