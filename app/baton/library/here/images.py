"""Store each handoff's images as files, because its token ids do not contain the pixels.

Every image of every handoff is a file of its own, `ID.DIGEST`, so removing one handoff takes nothing from
another. A handoff that continues another has the same images: their files are hard links to the same bytes.
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
from typing import Protocol

import structlog

from baton.errors import HandoffImagesLost
from baton.images.image import ClientImage, PlacedImage
from baton.library.handoff import Handoff, StoredImage
from baton_kv.folders import CREATE, bytes_in, folder, make_folder, open_file

ABANDONED_AFTER_S = 600.0
"""Age at which a temporary file is one that a killed process left."""


class Images(Protocol):
    """The place where the images of handoffs are kept."""

    def save(self, record: Handoff) -> bool:
        """Write the images that a record holds in memory, and drop them from it.

        Returns:
            Whether they were written; if not, the record still holds them.
        """
        ...

    def read(self, record: Handoff) -> list[PlacedImage]:
        """Return a record's images, each verified against its digest.

        Raises:
            HandoffImagesLost: an image is missing or has changed.
            HandoffStoreUnavailable: the shared store failed.
        """
        ...

    def remove(self, record: Handoff) -> None:
        """Remove a record's images.

        Raises:
            OSError: an image could not be removed.
        """
        ...

    def size(self) -> int:
        """Return the bytes that all images take; one that several handoffs share counts once."""
        ...

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> None:
        """Remove the images of handoffs that no longer exist, and temporary files of killed processes.

        Args:
            wanted: whether a handoff, by its id, still exists.
            older_than_s: age in seconds below which an image stays.
        """
        ...


class ImageStore:
    """The `Images` interface over a folder.

    Args:
        path: the folder, created with mode 0700 when it is missing; None: images stay in memory only.

    Raises:
        OSError: the path is a link, a file, or a folder of another user.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._log = structlog.get_logger("baton.handoffs")
        if path is not None:
            make_folder(path)

    def save(self, record: Handoff) -> bool:
        if self._path is None:
            return False
        try:
            with folder(self._path) as opened:
                for digest, data in record.image_data.items():
                    self._write(opened, record, digest, data)
        except OSError as error:
            self._log.warning("handoff_images_not_kept", reason=error.strerror)
            with contextlib.suppress(OSError):
                self.remove(record)
            return False
        record.image_data.clear()
        return True

    def read(self, record: Handoff) -> list[PlacedImage]:
        held = dict(record.image_data)
        for digest in {image.digest for image in record.images} - held.keys():
            held[digest] = self._read(record, digest)
        return [placed_image(image, held[image.digest]) for image in record.images]

    def remove(self, record: Handoff) -> None:
        if self._path is None or not record.images:
            return
        with folder(self._path) as opened:
            for image in record.images:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(_name(record.id, image.digest), dir_fd=opened)

    def size(self) -> int:
        return bytes_in(self._path) if self._path is not None else 0

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> None:
        if self._path is None:
            return
        with folder(self._path) as opened:
            for name in os.listdir(opened):
                with contextlib.suppress(OSError):  # removed since it was listed, or a folder
                    age = time.time() - os.stat(name, dir_fd=opened, follow_symlinks=False).st_mtime
                    if name.startswith("."):
                        remove = age > ABANDONED_AFTER_S
                    else:
                        remove = age > older_than_s and not wanted(name.partition(".")[0])
                    if remove:
                        os.unlink(name, dir_fd=opened)

    def _write(self, opened: int, record: Handoff, digest: str, data: bytes) -> None:
        name = _name(record.id, digest)
        if record.parent is not None:
            with contextlib.suppress(OSError):  # the parent has none, or the file system has no hard links
                parents = _name(record.parent, digest)
                os.link(parents, name, src_dir_fd=opened, dst_dir_fd=opened, follow_symlinks=False)
                os.utime(
                    name, dir_fd=opened, follow_symlinks=False
                )  # so that the sweep does not take it for an old orphan
                return
        temporary = f".{secrets.token_hex(8)}"
        try:
            with os.fdopen(os.open(temporary, CREATE, 0o600, dir_fd=opened), "wb") as stream:
                stream.write(data)
            os.replace(temporary, name, src_dir_fd=opened, dst_dir_fd=opened)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=opened)

    def _read(self, record: Handoff, digest: str) -> bytes:
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


def placed_image(image: StoredImage, data: bytes) -> PlacedImage:
    """Put an image of a record together with its bytes, which were verified against its digest."""
    client_image = ClientImage(data, image.media_type, image.width, image.height, image.digest)
    return PlacedImage(client_image, image.offset, image.length, tuple(image.target))
