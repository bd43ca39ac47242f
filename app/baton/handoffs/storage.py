"""What a handoff has outside this process: its record, its images, its KV. Everything here blocks."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from baton.engines.port import PlacedImage
from baton.handoffs.image_files import ImageFiles
from baton.handoffs.record import HandoffRecord, is_ours
from baton.handoffs.repository import Edit, News, RecordFiles
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

    def reread(self, record: HandoffRecord) -> HandoffRecord | None:
        """A kept record as it is now: the same object if nobody changed it, None if it is gone."""
        return self.files.reread(record)

    def refresh(self) -> News:
        """What other gateways over the store did since the last look."""
        return self.files.refresh()

    def create(self, record: HandoffRecord, edit: Edit) -> bool:
        """Keep a record as `edit` leaves it; whether it is kept."""
        try:
            self.store.make_room(record.disk_bytes)
        except StoreError as error:
            log.warning("handoff_not_kept", reason=str(error))
            self.files.alone(record, edit)
            return False
        return self.files.create(record, edit)

    def change(self, record: HandoffRecord, edit: Edit) -> HandoffRecord | None:
        """Change a record, on disk if it is kept; as it is now, or None: another gateway deleted it."""
        try:
            if record.kept:
                return self.files.update(record.id, edit)
            self.files.alone(record, edit)
        except OSError as error:
            log.warning("handoff_not_kept", reason=error.strerror)
            edit(record, list)
        return record

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

    def read_images(self, record: HandoffRecord) -> list[PlacedImage]:
        """The images of a context, in order.

        Raises:
            HandoffImagesLost: one is not there any more, or not as it was.
        """
        return self.images.read(record)

    def beside_bytes(self) -> int:
        """Bytes of all records and images, which are not KV.

        Raises:
            StoreError: they cannot be looked at.
        """
        try:
            return self.images.size() + self.files.size()
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None

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

    def remove_expired(self, record: HandoffRecord) -> HandoffRecord | None:
        """Remove what is over here, unless another gateway gave it more: then as it is now."""
        try:
            left = self.files.remove_expired(record)
        except OSError as error:
            log.warning("handoff_not_removed", reason=type(error).__name__)
            return None
        if left is None:
            self.remove(record)
        return left

    def sweep_orphans(self) -> None:
        """Take away what has no record."""
        self.store.sweep(
            wanted=lambda key: not is_ours(key) or self._is_kept(key.partition("/")[2]),
            older_than_s=ORPHANED_AFTER_S,
        )
        self.images.sweep(wanted=self._is_kept, older_than_s=ORPHANED_AFTER_S)

    def _is_kept(self, handoff_id: str) -> bool:
        return self.files.exists(handoff_id)
