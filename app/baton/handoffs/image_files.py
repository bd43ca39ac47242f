"""The images of handoffs on disk: a context's token ids say where images stand, not which.

One file an image of a handoff, `ID.DIGEST`, so that what one handoff loses no other misses. A handoff that
goes on from another has its images too: those are further names of the same bytes, which are there once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from baton.engines.port import Placed
from baton.errors import HandoffImagesLost
from baton.handoffs.record import HandoffRecord, KeptImage
from baton.images.picture import Picture
from baton_kv.folders import bytes_in

ABANDONED_AFTER_S = 600.0


class ImageFiles:
    """A folder of images.

    Args:
        folder: made with mode 0700 when it is missing; None: nothing is kept beyond this process.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._log = structlog.get_logger("baton.handoffs")
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def keep(self, record: HandoffRecord) -> bool:
        """Keep the images that a record holds in memory; whether it could, else it still holds them."""
        if self._folder is None:
            return False
        try:
            for digest, data in record.pictures.items():
                self._keep(record, digest, data)
        except OSError as error:
            self._log.warning("handoff_images_not_kept", reason=error.strerror)
            with contextlib.suppress(OSError):
                self.remove(record)
            return False
        record.pictures.clear()
        return True

    def read(self, record: HandoffRecord) -> list[Placed]:
        """A record's images, each proved to be the one that was kept.

        Raises:
            HandoffImagesLost: one is not there, or is another.
        """
        held = dict(record.pictures)
        for digest in {image.digest for image in record.images} - held.keys():
            held[digest] = self._read(record, digest)
        return [_placed(image, held[image.digest]) for image in record.images]

    def remove(self, record: HandoffRecord) -> None:
        """Forget a record's images.

        Raises:
            OSError: one could not be removed.
        """
        if self._folder is not None:
            for image in record.images:
                self._path(record.id, image.digest).unlink(missing_ok=True)

    def size(self) -> int:
        """Bytes that all images take, those of several handoffs once."""
        return bytes_in(self._folder) if self._folder is not None else 0

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> None:
        """Remove the images of handoffs that are not wanted, and what killed writers left behind."""
        now = time.time()
        for path in self._folder.iterdir() if self._folder is not None else ():
            with contextlib.suppress(FileNotFoundError):
                age = now - path.stat(follow_symlinks=False).st_mtime
                if path.name.startswith("."):
                    over = age > ABANDONED_AFTER_S
                else:
                    over = age > older_than_s and not wanted(path.name.partition(".")[0])
                if over:
                    path.unlink()

    def _keep(self, record: HandoffRecord, digest: str, data: bytes) -> None:
        path = self._path(record.id, digest)
        if record.parent is not None:
            with contextlib.suppress(OSError):  # there is none, or the file system has one name a file
                os.link(self._path(record.parent, digest), path, follow_symlinks=False)
                os.utime(path)  # young again: no orphan
                return
        assert self._folder is not None
        aside = self._folder / f".{secrets.token_hex(8)}"
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
            os.replace(aside, path)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()

    def _read(self, record: HandoffRecord, digest: str) -> bytes:
        if self._folder is None:
            raise HandoffImagesLost()
        try:
            descriptor = os.open(self._path(record.id, digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as stream:
                data = stream.read()
        except OSError as error:
            self._log.warning("handoff_image_unreadable", handoff=record.id, reason=error.strerror)
            raise HandoffImagesLost() from None
        if hashlib.sha256(data).hexdigest() != digest:
            self._log.warning("handoff_image_unreadable", handoff=record.id, reason="its digest is wrong")
            raise HandoffImagesLost()
        return data

    def _path(self, handoff_id: str, digest: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{handoff_id}.{digest}"


def _placed(image: KeptImage, data: bytes) -> Placed:
    picture = Picture(data, image.media_type, image.width, image.height)
    return Placed(picture, image.digest, image.offset, image.length, tuple(image.target))
