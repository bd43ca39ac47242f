"""Files sent as they are: put aside while they come in, never held in memory, gone with their request."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from baton.errors import InvalidRequest, PluginBusy, SettingsError

PIECE = 1024 * 1024
PREFIX = "baton-upload-"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Spool:
    """One file on its way in, under a name nobody else gets: what a late reader finds there is nothing.

    Args:
        folder: on the device that has room for it; None: the system's folder for such files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._descriptor: int | None = None
        self.path = Path()

    async def fill(self, chunks: AsyncIterator[bytes]) -> None:
        """Write what comes.

        Raises:
            InvalidRequest: nothing came.
            PluginBusy: there is no room for it.
        """
        try:
            await asyncio.to_thread(self._open)
            size = await self._write(chunks)
        except OSError as error:
            await self.close()
            if error.errno not in NO_ROOM:
                raise
            raise PluginBusy("There is no room for files of this size right now; try again later.") from None
        except BaseException:
            await self.close()
            raise
        if size == 0:
            await self.close()
            raise InvalidRequest("The request has no body: send the file's bytes.")

    def _open(self) -> None:
        while self._descriptor is None:
            descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=self._folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # until it is closed, also by the end of this process
            if os.fstat(descriptor).st_nlink:
                self._descriptor, self.path = descriptor, Path(name)
            else:  # another gateway swept it before it was locked
                os.close(descriptor)

    async def _write(self, chunks: AsyncIterator[bytes]) -> int:
        held = bytearray()
        size = 0
        async for chunk in chunks:
            held += chunk
            size += len(chunk)
            if len(held) >= PIECE:
                await asyncio.to_thread(self._append, bytes(held))
                held.clear()
        await asyncio.to_thread(self._append, bytes(held))
        return size

    def _append(self, data: bytes) -> None:
        assert self._descriptor is not None
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    async def close(self) -> None:
        """Remove the file; a second call does nothing. Freeing a large one takes its time, in a thread."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            removing = asyncio.ensure_future(asyncio.to_thread(_remove, descriptor, self.path))
            await asyncio.shield(removing)


def _remove(descriptor: int, path: Path) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)


def sweep(folder: Path | None) -> None:
    """Remove the files that gateways left behind which were killed: nobody holds their lock."""
    for path in Path(folder or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def require_folder(folder: Path | None) -> None:
    """See to it that files can be put there, and that those of killed gateways are gone.

    Raises:
        SettingsError: it is no folder, or may not be written.
    """
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise SettingsError(f"pooling.spool_dir: {folder} is no folder that can be written")
    sweep(folder)
