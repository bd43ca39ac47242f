"""From a store's address to the store."""

from __future__ import annotations

from pathlib import Path

from baton_kv.stores.base import Store, StoreError
from baton_kv.stores.file import FileStore


def open_store(address: str, *, budget: int | None = None, fsync: bool = False) -> Store:
    """The store at an address such as `file:/dev/shm/baton`.

    Args:
        address: `file:` and a folder.
        budget: bytes its entries may take in all.
        fsync: see `FileStore`.

    Raises:
        StoreError: no such kind of store, or the folder cannot be used.
    """
    kind, _, where = address.partition(":")
    if kind == "memory":
        raise StoreError("a memory: store would be three, one a process; use file:/dev/shm/NAME")
    if kind != "file" or not where.startswith("/"):
        raise StoreError(f"{address!r} is no store; known is file:/ABSOLUTE/FOLDER")
    try:
        return FileStore(Path(where), budget=budget, fsync=fsync)
    except OSError as error:
        raise StoreError(f"{address}: {error.strerror}") from None
