"""Read the files of entries for another tier, and copy those of another tier to this machine's store."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton_kv.format import shared_keys
from baton_kv.stores.base import Reader, SharedFiles, Store, StoreError


class Deadline(NamedTuple):
    """The time by which a fetch must have ended.

    Attributes:
        setting: what sets its limit.
        limit_s: seconds that it may take.
        at: monotonic time of its end.
    """

    setting: str
    limit_s: float
    at: float

    @classmethod
    def within(cls, setting: str, limit_s: float, left_s: float = math.inf) -> Deadline:
        """Begin now; where less time is left than the limit, end then."""
        return cls(setting, limit_s, time.monotonic() + min(limit_s, left_s))

    @property
    def left_s(self) -> float:
        """Seconds until then; 0: it has passed."""
        return max(0.0, self.at - time.monotonic())


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine that goes to another tier.

    Attributes:
        key: key of the entry whose own it is, or another name of its own.
        read_into: fills a buffer from an offset of the file on; returns the number of bytes read.
    """

    key: str
    size: int
    read_into: Callable[[int, memoryview], int]

    @staticmethod
    def of(key: str, reader: Reader) -> LocalFile:
        """Take a file of the store, as long as it is open."""
        return LocalFile(key, len(reader), lambda start, view: reader.read_into(start, [view]))

    @staticmethod
    def holding(key: str, data: bytes) -> LocalFile:
        """Make a file of bytes in memory."""

        def read_into(start: int, view: memoryview) -> int:
            part = data[start : start + len(view)]
            view[: len(part)] = part
            return len(part)

        return LocalFile(key, len(data), read_into)


class FetchCutOff(StoreError):
    """Copying KV to this machine took longer than a setting allows.

    Args:
        got: bytes that had come by then.
    """

    def __init__(self, deadline: Deadline, got: int) -> None:
        limit = f"{deadline.limit_s:g} s, which {deadline.setting} allows"
        super().__init__(f"fetching took longer than {limit}; {got} bytes had come")
        self.got = got


def copy_entry(store: Store, keys: Sequence[str], read: Callable[[int], tuple[int, Generator[bytes]]]) -> int:
    """Copy an entry's files to a store that has not all of them; returns the bytes that were copied.

    Args:
        keys: of the entries whose own they are, its own last.
        read: returns the size of one of them, by index, and an iterator over its bytes.
    """
    copied = 0
    for index, key in enumerate(keys):
        if store.exists(key):
            continue
        size, chunks = read(index)
        shared = SharedFiles(tuple(keys[:index]), keys[index - 1]) if index else SharedFiles()
        try:
            with contextlib.closing(chunks):
                copied += store.put(key, chunks, size=size, shared=shared)
        except FetchCutOff as error:
            error.got += copied
            raise
    return copied


@contextlib.contextmanager
def opened(store: Store, key: str) -> Iterator[list[tuple[str, Reader]]]:
    """Open the files that an entry needs, by the keys of the entries whose own they are, its own last."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(store.open(key))
        keys = shared_keys(own)
        parts = [stack.enter_context(store.open(key, part)) for part in range(len(keys))]
        yield list(zip([*keys, key], [*parts, own], strict=True))
