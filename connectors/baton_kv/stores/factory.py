"""Open a store by its address."""

from __future__ import annotations

from pathlib import Path

from baton_kv.stores.base import Store, StoreError
from baton_kv.stores.file import FileStore


def open_store(address: str, *, budget: int | None = None, fsync: bool = False) -> Store:
    """Open the store at an address such as `file:/dev/shm/baton`.

    Args:
        address: `file:` and the absolute path of a folder.
        budget: bytes that the entries may take in all; None for no limit.
        fsync: see `FileStore`.

    Raises:
        StoreError: the address is not a file store, or the folder cannot be used.
    """
    kind, _, where = address.partition(":")
    if kind == "memory":
        raise StoreError(
            "a memory: store cannot be shared by the engine's three processes; use file:/dev/shm/NAME"
        )
    if kind != "file" or not where.startswith("/"):
        raise StoreError(f"{address!r} is not the address of a store; use file:/ABSOLUTE/FOLDER")
    try:
        return FileStore(Path(where), budget=budget, fsync=fsync)
    except OSError as error:
        raise StoreError(f"{address}: {error.strerror}") from None
