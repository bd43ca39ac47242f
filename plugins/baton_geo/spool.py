"""Write a request's raster to a temporary file with a size limit, and remove it after the request.

Files of a killed process are removed by the next one that starts with the same folder.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from baton_geo.errors import DecoderBusy, RasterTooLarge
from baton_geo.raster.decoders import SCENES
from baton_geo.settings import MIB
from baton_spool import FolderRefused, Made, Naming, make, require_folder, sweep

logger = logging.getLogger(__name__)

RASTERS = Naming("baton-geo-", ".raster")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Spooled:
    """A raster in a local file; on exit, or by `close`, a temporary one is removed.

    Attributes:
        temporary: the locked file that a `Spool` wrote; None: the file is the server's, which removes it.
    """

    path: Path
    temporary: Made | None = None

    def fetched(self) -> None:
        """Count what was fetched by ranges: nothing was."""

    def close(self) -> None:
        """Remove the file, if it is temporary; a second call does nothing."""
        if self.temporary is not None:
            self.temporary.remove()

    def __enter__(self) -> Spooled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Room:
    """The bytes that the files of one request may take together; files may be written at the same time.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Take some of it.

        Raises:
            RasterTooLarge: there is not so much left.
        """
        with self._lock:
            if size > self._left:
                raise RasterTooLarge(f"more than {_readable(self._limit)} in all, the most this server takes")
            self._left -= size


class Spool:
    """A temporary file that is being written.

    A context manager: on exit without `finish` the file is removed. If another thread is writing then, its
    next `write` raises `Removed`.

    Args:
        folder: of the file; None: the system's folder for temporary files.
        limit: largest size, bytes.
        room: that it shares with other files; None: it shares none.

    Raises:
        DecoderBusy: the disk is full.
    """

    def __init__(self, folder: Path | None, limit: int, room: Room | None = None) -> None:
        self._limit, self._room = limit, room
        self._size = 0
        self._over = False
        try:
            self._made = make(folder, RASTERS)
        except OSError as error:
            raise disk_error(error) from None

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._over:
            self._over = True
            self._made.remove()

    def expect(self, size: int) -> None:
        """Refuse a file of the announced `size` in bytes before it is read.

        Raises:
            RasterTooLarge: `size` is over the limit.
        """
        if size > self._limit:
            raise RasterTooLarge(f"more than {_readable(self._limit)}, the most this server takes")

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append to the file.

        Raises:
            RasterTooLarge: the file would be over the limit; nothing is written.
            DecoderBusy: the disk is full.
            Removed: the spool was left meanwhile.
        """
        self.expect(self._size + len(data))
        if self._room is not None:
            self._room.take(len(data))
        try:
            self._made.append(data)
        except OSError as error:
            raise disk_error(error) from None
        self._size += len(data)

    def fill(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Append every chunk; raises the errors of `write` and of `chunks`."""
        for chunk in chunks:
            self.write(chunk)

    def finish(self) -> Spooled:
        """Return the file; the caller closes it from now on."""
        self._over = True
        return Spooled(self._made.path, self._made)


def prepare_folder(folder: Path | None) -> None:
    """Check the folder for rasters and scenes, and remove those that killed processes left in it.

    Raises:
        ValueError: `folder` is no folder, a link, of another user, open to all, or not writable.
    """
    try:
        require_folder(folder)
        swept = sweep(folder, RASTERS, SCENES)
    except FolderRefused as error:
        raise ValueError(f"additional_config: baton_geo.spool: {error.strerror}") from None
    if swept.removed:
        logger.info("removed %d rasters and scenes of ended processes", swept.removed)
    if swept.foreign:
        logger.error(
            "%d entries of the spool folder are named like this plugin's files but are not this user's; they "
            "are kept; the first: %s",
            len(swept.foreign),
            swept.foreign[0],
        )


def disk_error(error: OSError) -> Exception:
    """Translate an error of writing: a full disk is a reason to try again."""
    if error.errno in _NO_ROOM:
        return DecoderBusy("the server has no room for the file just now; try again later")
    return error


def _readable(size: int) -> str:
    return f"{size / MIB:.0f} MiB" if size >= MIB else f"{size} bytes"
