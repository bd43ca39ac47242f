"""What a handoff has outside this process: its record, its images, its KV. Everything here blocks."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from baton.engines.port import Placed
from baton.handoffs.files import RecordFiles
from baton.handoffs.image_files import ImageFiles
from baton.handoffs.record import HandoffRecord, is_ours
from baton_kv.stores.base import EntryMissing, Store, StoreError

ORPHANED_AFTER_S = 600.0
"""An entry that has no record this long after its last use belongs to nobody."""

log = structlog.get_logger("baton.handoffs")


@dataclass(frozen=True)
class HandoffStorage:
    """The three of them, so that what goes goes whole.

    Attributes:
        store: the KV, which the connector writes; this side looks, pins and deletes.
        files: the records.
        images: the images of the contexts.
    """

    store: Store
    files: RecordFiles
    images: ImageFiles

    def find(self, handoff_id: str) -> HandoffRecord | None:
        """A record that another gateway over the same store, or an earlier run, may have left."""
        return self.files.read(handoff_id)

    def has(self, handoff_id: str) -> bool:
        return self.files.exists(handoff_id)

    def write(self, record: HandoffRecord) -> bool:
        """Keep a record; whether it is kept."""
        return self.files.write(record)

    def kv_bytes(self, record: HandoffRecord) -> int:
        """0: it is not there, or the store cannot be read."""
        try:
            with self.store.open(record.key) as reader:
                return len(reader)
        except (EntryMissing, StoreError):
            return 0

    def all_bytes(self) -> int:
        """Of every entry in the store.

        Raises:
            StoreError: it cannot be read.
        """
        return self.store.size()

    def pin(self, record: HandoffRecord, pin: bool) -> bool:
        """Pin the KV or unpin it; whether it is pinned then."""
        try:
            self.store.pin(record.key, pin)
        except StoreError as error:
            log.warning("handoff_not_pinned", reason=str(error))
            return not pin
        return pin

    def read_images(self, record: HandoffRecord) -> list[Placed]:
        """The images of a context, in order.

        Raises:
            HandoffImagesLost: one is not there any more, or not as it was.
        """
        return self.images.read(record)

    def image_bytes(self) -> int:
        return self.images.size()

    def keep_images(self, record: HandoffRecord) -> None:
        """Put a context's images on disk. Where there is no room its life ends with this process."""
        try:
            self.store.make_room(record.image_bytes)
        except StoreError as error:
            log.warning("handoff_images_not_kept", reason=str(error))
            return
        self.images.keep(record)

    def remove(self, record: HandoffRecord) -> None:
        try:
            self.files.remove(record)
            self.images.remove(record)
            self.store.delete(record.key)
        except (OSError, StoreError) as error:
            log.warning("handoff_not_removed", reason=type(error).__name__)

    def remove_expired(self, record: HandoffRecord) -> None:
        """Its time is over here; another gateway over the same store may have given it more."""
        left = self.find(record.id)
        if left is None or left.expires_at <= record.expires_at:
            self.remove(record)

    def sweep_orphans(self) -> None:
        """Take away what has no record."""
        self.store.sweep(
            wanted=lambda key: not is_ours(key) or self._is_kept(key.partition("/")[2]),
            older_than_s=ORPHANED_AFTER_S,
        )
        self.images.sweep(wanted=self._is_kept, older_than_s=ORPHANED_AFTER_S)

    def _is_kept(self, handoff_id: str) -> bool:
        return self.find(handoff_id) is not None
