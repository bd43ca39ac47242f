"""Files sent as they are: put aside while they come in, never held in memory, gone with their request."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from baton.errors import InvalidRequest, PluginBusy

PIECE = 1024 * 1024


class Spool:
    """One file on its way in. It has no name: it is gone when it is closed, also by a killed process.

    Args:
        folder: on the device that has room for it; None: the system's folder for such files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    @property
    def path(self) -> Path:
        """Where this process can open it, as often as it wants, until it is closed."""
        assert self._file is not None
        return Path(f"/proc/self/fd/{self._file.fileno()}")

    async def fill(self, chunks: AsyncIterator[bytes]) -> None:
        """Write what comes.

        Raises:
            InvalidRequest: nothing came.
            PluginBusy: there is no room for it.
        """
        try:
            file = await asyncio.to_thread(_nameless, self._folder)
            self._file = file
            size = await self._write(file, chunks)
        except OSError:
            self.close()
            raise PluginBusy("There is no room for files of this size right now; try again later.") from None
        except BaseException:
            self.close()
            raise
        if size == 0:
            self.close()
            raise InvalidRequest("The request has no body: send the file's bytes.")

    async def _write(self, file: IO[bytes], chunks: AsyncIterator[bytes]) -> int:
        held = bytearray()
        size = 0
        async for chunk in chunks:
            held += chunk
            size += len(chunk)
            if len(held) >= PIECE:
                await asyncio.to_thread(file.write, bytes(held))
                held.clear()
        await asyncio.to_thread(file.write, bytes(held))
        await asyncio.to_thread(file.flush)
        return size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _nameless(folder: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder)
