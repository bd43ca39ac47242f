"""Keep the images of handoffs in the shared store, each once for all handoffs of a tenant."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial

import structlog

from baton.errors import HandoffImagesLost, HandoffStoreUnavailable
from baton.handoffs.records.image_store import placed_image
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.shared.files import PoolFiles, Room, SharedFile
from baton.handoffs.shared.records import image_entry, lifetime_ms
from baton.images.placed_image import PlacedImage
from baton_kv.stores.base import StoreError


class SharedImages:
    """The images of a pool's handoffs; see `baton.handoffs.records.storage.Images`. All calls block.

    Args:
        files: the files of the shared store.
        budget: bytes that all handoffs may take there.
        fetch_s: seconds in which the images of a handoff must have been fetched.
    """

    def __init__(self, files: PoolFiles, budget: int, fetch_s: float) -> None:
        self._files = files
        self._budget = budget
        self._fetch_s = fetch_s
        self._log = structlog.get_logger("baton.handoffs")

    def save(self, record: HandoffRecord) -> bool:
        files = [
            SharedFile(_name(record, digest), len(data), partial(_read_into, data))
            for digest, data in record.image_data.items()
        ]
        try:
            self._files.push(
                image_entry(record), files, Room(self._budget, lifetime_ms(record), evictable=False)
            )
        except (HandoffStoreUnavailable, StoreError) as error:
            self._log.warning("handoff_images_not_kept", reason=str(error))
            return False
        record.image_data.clear()
        return True

    def read(self, record: HandoffRecord) -> list[PlacedImage]:
        held, until = dict(record.image_data), time.monotonic() + self._fetch_s
        for digest, size in {image.digest: image.bytes for image in record.images}.items():
            if digest not in held:
                held[digest] = self._read(record, digest, size, until)
        return [placed_image(image, held[image.digest]) for image in record.images]

    def remove(self, record: HandoffRecord) -> None:
        """Leave them: they go with the record."""

    def size(self) -> int:
        """Return 0: the records count their images."""
        return 0

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> None:
        """Leave them: what has no record goes by itself."""

    def _read(self, record: HandoffRecord, digest: str, size: int, until: float) -> bytes:
        try:
            _, chunks = self._files.chunks(_name(record, digest), until, size)
            data = b"".join(chunks)
        except StoreError as error:
            self._log.warning("handoff_image_unreadable", handoff=record.id, reason=str(error))
            raise HandoffImagesLost() from None
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            self._log.warning("handoff_image_unreadable", handoff=record.id, reason="its digest is wrong")
            raise HandoffImagesLost()
        return data


def _name(record: HandoffRecord, digest: str) -> str:
    return f"{record.key.partition('/')[0]}/m{digest}"


def _read_into(data: bytes, start: int, view: memoryview) -> int:
    part = data[start : start + len(view)]
    view[: len(part)] = part
    return len(part)
