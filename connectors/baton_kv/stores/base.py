"""Define the interface of a store and its exceptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from baton_kv.contract import TransferError, TransferFailure

Buffer = bytes | bytearray | memoryview
Piece = Buffer | list[memoryview]
"""Bytes, or several buffers, that are written before the next piece is asked for."""
Commit = Callable[[Callable[[], None]], None]
"""Calls, in another thread, the function that places a written entry under its key, and waits for it."""
MAX_SHARED = 128
"""Most files of other entries that an entry shares."""


class StoreError(TransferError):
    """The store could not be read or written; a partly written entry is never visible."""

    failure = TransferFailure.DEVICE


class EntryMissing(StoreError):
    """There is no entry under this key."""

    failure = TransferFailure.MISSING


class SharedMissing(EntryMissing):
    """A file that a new entry shares is no longer there, or cannot be shared on this device."""


class StoreFull(StoreError):
    """The entry does not fit the store's budget or its device."""

    failure = TransferFailure.FULL


@dataclass(frozen=True)
class SharedFiles:
    """The files of other entries that an entry needs beside its own, in order.

    They stay for as long as an entry that shares them, and count once in the store's size.

    Attributes:
        keys: keys of the entries that they were written for, of the same scope; at most `MAX_SHARED`.
        holder: key of an entry that has them all: by sharing them in this order, or the last as its own.
    """

    keys: tuple[str, ...] = ()
    holder: str = ""


NOTHING_SHARED = SharedFiles()


class Reader(Protocol):
    """An entry open for reading."""

    def __len__(self) -> int:
        """Return the entry's size in bytes."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` up to `stop`, fewer at the end of the entry.

        Raises:
            StoreError: the device could not be read.
        """
        ...

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers, one after the other, from offset `start`; return the number of bytes read.

        Raises:
            StoreError: the device could not be read.
        """
        ...


class Draft(Protocol):
    """An entry that several ranks write together; it becomes visible when all have finished."""

    def write_at(self, offset: int, parts: Sequence[Buffer]) -> None:
        """Write bytes, one part after the other, from an offset on.

        Raises:
            StoreFull: the device has no room.
            StoreError: the device could not be written.
        """
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` up to `stop`.

        Raises:
            StoreError: the device could not be read.
        """
        ...

    def finish(self) -> bool:
        """Note that this rank has written its share; return whether it is the one that must seal the entry.

        Exactly one rank is, after all have finished.
        """
        ...

    def place(self) -> None:
        """Make the sealed entry visible under its key.

        Raises:
            SharedMissing: a file that it shares is not there.
            StoreFull: the entry does not fit even if all unpinned entries are evicted.
            StoreError: the device could not be written.
        """
        ...


class Store(Protocol):
    """Immutable entries by key, safe to use from several threads and processes at once."""

    def put(
        self,
        key: str,
        parts: Iterable[Piece],
        *,
        size: int = 0,
        shared: SharedFiles = NOTHING_SHARED,
        commit: Commit | None = None,
    ) -> int:
        """Write an entry; it becomes visible when it is complete.

        Args:
            parts: the entry's bytes, in order.
            size: the expected number of bytes, 0 if unknown. With it, an entry that cannot fit is refused
                before others are evicted.
            shared: the files of other entries that it needs too.
            commit: how a thread of low priority has another one evict entries and make this one visible,
                which holds the store's lock; None: this thread does.

        Returns:
            The bytes written.

        Raises:
            SharedMissing: a file of `shared` is not there; nothing was saved.
            StoreFull: the entry does not fit even if all unpinned entries are evicted.
            StoreError: the device could not be written.
        """
        ...

    def draft(
        self,
        key: str,
        name: str,
        *,
        size: int,
        rank: int,
        ranks: int,
        shared: SharedFiles = NOTHING_SHARED,
    ) -> AbstractContextManager[Draft]:
        """Open an entry that several ranks write together, for the time of the context.

        Args:
            name: name of the draft, 32 hexadecimal digits, the same for all ranks.
            size: the entry's size in bytes.
            rank: number of this rank, from 0.
            shared: as for `put`.

        Raises:
            StoreFull: the entry cannot fit.
            StoreError: the device could not be written.
        """
        ...

    def discard(self, name: str) -> None:
        """Remove a draft that will not be completed, if it is still there."""
        ...

    def open(self, key: str, part: int | None = None) -> AbstractContextManager[Reader]:
        """Open an entry's own file, or the shared file `part`, for the time of the context.

        It stays readable even if it is deleted meanwhile.

        Raises:
            EntryMissing: there is no entry under this key, or no such file.
            StoreError: the device could not be read.
        """
        ...

    def exists(self, key: str, part: int | None = None) -> bool:
        """Return whether there is an entry under this key, or the shared file `part` of it."""
        ...

    def bytes_of(self, key: str) -> int:
        """Return the bytes of an entry's own file and of those that it shares; 0 if there is no entry."""
        ...

    def delete(self, key: str) -> bool:
        """Delete an entry and its pin; return whether there was an entry.

        Files that other entries share stay for those.
        """
        ...

    def quarantine(self, key: str, part: int | None = None) -> None:
        """Move an entry's corrupt file, or its shared file `part`, away, so that no entry finds it."""
        ...

    def pin(self, key: str, pinned: bool) -> None:
        """Protect an entry from eviction, or no longer; the entry need not exist yet."""
        ...

    def pinned(self, *, also: str | None = None) -> dict[str, int]:
        """Return the bytes that pins protect, by scope; a file that several entries share counts once.

        The entry with the key `also` counts as pinned.

        Raises:
            StoreError: the store could not be listed.
        """
        ...

    def keys(self) -> Iterator[str]:
        """Iterate over all keys, in no order."""
        ...

    def size(self) -> int:
        """Return the bytes of all entries and of other files that count towards the budget."""
        ...

    def make_room(self, size: int) -> None:
        """Evict entries until `size` more bytes fit the budget.

        Raises:
            StoreFull: they do not fit even if all unpinned entries are evicted.
            StoreError: the store could not be listed.
        """
        ...

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> int:
        """Delete entries that are not wanted and were not used for so many seconds; return their number."""
        ...
