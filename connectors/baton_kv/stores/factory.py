"""Open a store by its address."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

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


def network_file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the network file system that a folder lies on; None: it lies on none.

    Args:
        mounts: Linux's table of mounts; see proc_pid_mountinfo(5).
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    device = os.stat(there).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):  # no Linux
        for line in mounts.read_text(errors="replace").splitlines():
            place, _, kind = line.partition(" - ")
            if place.split(" ")[2:3] == [wanted] and kind.split(" ")[0] in NETWORK:
                return kind.split(" ")[0]
    return None


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
