"""Write an uploaded file to a temporary file while it arrives, and remove it with its request."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import structlog

import baton_spool
from baton.admission.fair_threads import in_own_thread
from baton.errors import InvalidRequest, PluginBusy, SettingsError
from baton_spool import FolderRefused, Made, Naming, Removed, Swept, make

log = structlog.get_logger()

PIECE = 1024 * 1024
UPLOADS = Naming("baton-upload-")
RESULTS = Naming("baton-result-", ".zip")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class UploadSpool:
    """The temporary file of one upload.

    Its name is used only once, so a plugin that reads it too late finds no file, not another client's.

    Args:
        folder: where the file is made; None: the system's temporary folder.

    Attributes:
        path: of the file, once `fill` was called.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._made: Made | None = None
        self.path = Path()

    async def fill(self, chunks: AsyncIterator[bytes]) -> None:
        """Write the chunks to the file.

        Raises:
            InvalidRequest: the body is empty.
            PluginBusy: the disk is full.
        """
        try:
            await self._opened()
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

    async def _opened(self) -> None:
        """Make the file, completely also when the request is cancelled, so that `close` removes it."""
        opening = asyncio.ensure_future(in_own_thread(self._open))
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait({opening})
            raise

    def _open(self) -> None:
        self._made = make(self._folder, UPLOADS)
        self.path = self._made.path

    async def _write(self, chunks: AsyncIterator[bytes]) -> int:
        held = bytearray()
        size = 0
        async for chunk in chunks:
            held += chunk
            size += len(chunk)
            if len(held) >= PIECE:
                await in_own_thread(self._append, bytes(held))
                held.clear()
        await in_own_thread(self._append, bytes(held))
        return size

    def _append(self, data: bytes) -> None:
        if self._made is not None:
            with contextlib.suppress(Removed):
                self._made.append(data)

    async def close(self) -> None:
        """Remove the file, in a thread, for freeing a large one takes long; a second call does nothing."""
        made, self._made = self._made, None
        if made is not None:
            await asyncio.shield(asyncio.ensure_future(in_own_thread(made.remove)))


def sweep(folder: Path | None) -> Swept:
    """Remove the files of killed gateways, which nobody holds a lock on."""
    return baton_spool.sweep(folder, UPLOADS, RESULTS)


def require_folder(folder: Path | None) -> None:
    """Check that files can be made in a folder, and remove those of killed gateways.

    Entries that are named like ours and are not this user's files (links, pipes, other users' files) are
    left alone and logged in one line: in a folder that everyone may write, they must not keep a gateway from
    starting.

    Raises:
        SettingsError: the path is no folder, is a link, belongs to another user, is open to all, or cannot
            be written.
    """
    try:
        baton_spool.require_folder(folder)
        swept = sweep(folder)
    except FolderRefused as error:
        raise SettingsError(f"pooling.spool_dir: {error.strerror}") from None
    if swept.removed:
        log.info("spool_swept", removed=swept.removed)
    if swept.foreign:
        log.error("spool_entries_left_alone", count=len(swept.foreign), first=swept.foreign[0])
