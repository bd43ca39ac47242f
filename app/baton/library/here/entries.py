"""Copy the files of entries from another tier to this machine's store, before a deadline."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
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


def read_into(reader: Reader, start: int, view: memoryview) -> int:
    """Fill a buffer from an offset of a file on; returns the number of bytes read."""
    return reader.read_into(start, [view])


def bytes_into(data: bytes, start: int, view: memoryview) -> int:
    """Fill a buffer from an offset of bytes in memory on; returns the number of bytes copied."""
    part = data[start : start + len(view)]
    view[: len(part)] = part
    return len(part)
