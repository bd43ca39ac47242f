"""Open a store by its address."""

from __future__ import annotations

from pathlib import Path

from baton_kv.folders import MOUNTS, file_system_of
from baton_kv.stores.base import Store, StoreError
from baton_kv.stores.file import FileStore

NETWORK = frozenset(
    (
        *("afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "smb3"),
        *("smbfs", "wekafs", "fuse.beegfs", "fuse.ceph-fuse", "fuse.gcsfuse", "fuse.glusterfs"),
        *("fuse.juicefs", "fuse.mount-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
    )
)
"""File systems that another machine may keep waiting, as Linux names them."""


def network_file_system(folder: Path, mounts: Path = MOUNTS) -> str | None:
    """Return the type of the network file system that a folder lies on; None: it lies on none."""
    return next((kind for kind in file_system_of(folder, mounts) if kind in NETWORK), None)


def open_store(address: str, *, budget: int | None = None, fsync: bool = False) -> Store:
    """Open the store at an address, `file:` and the absolute path of a folder; see `FileStore`.

    Raises:
        StoreError: the address is not a file store, or the folder cannot be used or lies on another machine.
    """
    kind, _, where = address.partition(":")
    if kind == "memory":
        raise StoreError(
            "a memory: store cannot be shared by the engine's three processes; use file:/dev/shm/NAME"
        )
    if kind != "file" or not where.startswith("/"):
        raise StoreError(f"{address!r} is not the address of a store; use file:/ABSOLUTE/FOLDER")
    if (found := network_file_system(Path(where))) is not None:
        raise StoreError(
            f"{address} lies on a network file system ({found}). Requests look entries up there, and the "
            "engine would wait for another machine: use a local folder, as file:/dev/shm/NAME"
        )
    try:
        return FileStore(Path(where), budget=budget, fsync=fsync)
    except OSError as error:
        raise StoreError(f"{address}: {error.strerror}") from None
