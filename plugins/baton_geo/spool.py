"""Rasters on disk while a request is under way: written once, with a cap, and removed whatever happens.

What a killed process leaves is removed by the next one that starts with the same folder.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
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
    """A raster in a local file.

    A context manager: on exit the file is removed, if it is ours.

    Attributes:
        path: of the file.
        size: bytes.
        owned: whether it is removed on exit.
        made: the lock on a file that was written here.
    """

    path: Path
    size: int
    owned: bool = field(default=True)
    made: Made | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_file(cls, path: Path, *, owned: bool = True) -> Spooled:
        """A file already written, e.g. an upload's body.

        Raises:
            OSError: there is none.
            ValueError: it is not a regular file.
        """
        found = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        return cls(path, found.st_size, owned)

    def close(self) -> None:
        """Removes the file; a second call does nothing."""
        if self.made is not None:
            self.made.remove()
        elif self.owned:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Spooled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Abandoned(Exception):
    """The request is gone; the thread that still wrote for it stops here."""


class Spool:
    """A file being written.

    A context manager: on exit without `finish` the file is removed. Another thread may be writing at that
    moment; its next `write` raises `Abandoned`.

    Args:
        folder: where; None: the system's.
        limit: most bytes.

    Raises:
        DecoderBusy: the disk is full.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._lock = threading.Lock()
        self._open = True
        try:
            self._made = make(folder, RASTERS)
        except OSError as error:
            raise _of_disk(error) from None

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._made.remove()

    def expect(self, size: int) -> None:
        """Refuses a file that is said to have `size` bytes, before the first is read.

        Raises:
            RasterTooLarge: that is more than the limit.
        """
        if size > self._limit:
            raise RasterTooLarge(f"more than {_readable(self._limit)}, the most this server takes")

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends.

        Raises:
            RasterTooLarge: over the limit; nothing is written.
            DecoderBusy: the disk is full.
            Abandoned: the file was given up meanwhile.
        """
        with self._lock:
            if not self._open:
                raise Abandoned
            self.expect(self._size + len(data))
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[os.write(self._made.descriptor, rest) :]
            except OSError as error:
                raise _of_disk(error) from None
            self._size += len(data)

    def fill(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Writes one after the other; errors as `write`, and those of `chunks`."""
        for chunk in chunks:
            self.write(chunk)

    def finish(self) -> Spooled:
        """The file, from now on its owner's to remove.

        Raises:
            Abandoned: it was given up already.
        """
        with self._lock:
            if not self._open:
                raise Abandoned
            self._open = False
            return Spooled(self._made.path, self._size, made=self._made)


def prepare_folder(folder: Path | None) -> None:
    """Check the folder for rasters and scenes, and remove those that killed processes left there.

    Args:
        folder: `spool` of the settings.

    Raises:
        ValueError: it is no folder, a link, another user's, open to all, or cannot be written.
    """
    try:
        require_folder(folder)
        swept = sweep(folder, RASTERS, SCENES)
    except FolderRefused as error:
        raise ValueError(f"additional_config: baton_geo.spool: {error.strerror}") from None
    if swept.removed:
        logger.info("%d rasters and scenes of ended processes were removed", swept.removed)
    if swept.foreign:
        logger.error(
            "%d entries of the spool folder have names of ours and are not this user's files; they are left "
            "alone; the first: %s",
            len(swept.foreign),
            swept.foreign[0],
        )


def _of_disk(error: OSError) -> Exception:
    if error.errno in _NO_ROOM:
        return DecoderBusy("the server has no room for the file just now; try again later")
    return error


def _readable(size: int) -> str:
    return f"{size / MIB:.0f} MiB" if size >= MIB else f"{size} bytes"
