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
from io import FileIO
from pathlib import Path

import structlog

from baton.engines.port import PlacedImage
from baton.errors import HandoffImagesLost
from baton.handoffs.record import HandoffRecord, StoredImage
from baton.images.client_image import ClientImage
from baton_kv.folders import CREATE, bytes_in, folder, make_folder, open_file

ABANDONED_AFTER_S = 600.0


class ImageFiles:
    """A folder of images.

    Args:
        path: of the folder, made with mode 0700 when it is missing; None: no image outlives this process.

    Raises:
        OSError: a link, a file or another user's folder is in its place.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._log = structlog.get_logger("baton.handoffs")
        if path is not None:
            make_folder(path)

    def keep(self, record: HandoffRecord) -> bool:
        """Keep the images that a record holds in memory; whether it could, else it still holds them."""
        if self._path is None:
            return False
        try:
            with folder(self._path) as opened:
                for digest, data in record.image_data.items():
                    self._keep(opened, record, digest, data)
        except OSError as error:
            self._log.warning("handoff_images_not_kept", reason=error.strerror)
            with contextlib.suppress(OSError):
                self.remove(record)
            return False
        record.image_data.clear()
        return True

    def read(self, record: HandoffRecord) -> list[PlacedImage]:
        """A record's images, each proved to be the one that was kept.

        Raises:
            HandoffImagesLost: one is not there, or is another.
        """
        held = dict(record.image_data)
        for digest in {image.digest for image in record.images} - held.keys():
            held[digest] = self._read(record, digest)
        return [_placed(image, held[image.digest]) for image in record.images]

    def remove(self, record: HandoffRecord) -> None:
        """Forget a record's images.

        Raises:
            OSError: one could not be removed.
        """
        if self._path is None or not record.images:
            return
        with folder(self._path) as opened:
            for image in record.images:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(_name(record.id, image.digest), dir_fd=opened)

    def size(self) -> int:
        """Bytes that all images take, those of several handoffs once."""
        return bytes_in(self._path) if self._path is not None else 0

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> None:
        """Remove the images of handoffs that are not wanted, and what killed writers left behind."""
        if self._path is None:
            return
        with folder(self._path) as opened:
            for name in os.listdir(opened):
                with contextlib.suppress(OSError):  # gone since it was listed, or a folder
                    age = time.time() - os.stat(name, dir_fd=opened, follow_symlinks=False).st_mtime
                    if name.startswith("."):
                        over = age > ABANDONED_AFTER_S
                    else:
                        over = age > older_than_s and not wanted(name.partition(".")[0])
                    if over:
                        os.unlink(name, dir_fd=opened)

    def _keep(self, opened: int, record: HandoffRecord, digest: str, data: bytes) -> None:
        name = _name(record.id, digest)
        if record.parent is not None:
            with contextlib.suppress(OSError):  # there is none, or the file system has one name a file
                before = _name(record.parent, digest)
                os.link(before, name, src_dir_fd=opened, dst_dir_fd=opened, follow_symlinks=False)
                os.utime(name, dir_fd=opened, follow_symlinks=False)  # young again: no orphan
                return
        aside = f".{secrets.token_hex(8)}"
        try:
            with os.fdopen(os.open(aside, CREATE, 0o600, dir_fd=opened), "wb") as stream:
                stream.write(data)
            os.replace(aside, name, src_dir_fd=opened, dst_dir_fd=opened)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(aside, dir_fd=opened)

    def _read(self, record: HandoffRecord, digest: str) -> bytes:
        if self._path is None:
            raise HandoffImagesLost()
        try:
            with (
                folder(self._path) as opened,
                FileIO(open_file(_name(record.id, digest), within=opened), "rb") as stream,
            ):
                data = stream.readall()
        except OSError as error:
            self._log.warning("handoff_image_unreadable", handoff=record.id, reason=error.strerror)
            raise HandoffImagesLost() from None
        if hashlib.sha256(data).hexdigest() != digest:
            self._log.warning("handoff_image_unreadable", handoff=record.id, reason="its digest is wrong")
            raise HandoffImagesLost()
        return data


def _name(handoff_id: str, digest: str) -> str:
    return f"{handoff_id}.{digest}"


def _placed(image: StoredImage, data: bytes) -> PlacedImage:
    client_image = ClientImage(data, image.media_type, image.width, image.height)
    return PlacedImage(client_image, image.digest, image.offset, image.length, tuple(image.target))
