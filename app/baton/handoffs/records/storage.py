"""Read, write and remove everything a handoff has on disk: record, images, KV. All calls block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from baton.handoffs.records.image_store import Images
from baton.handoffs.records.record import HandoffRecord, is_handoff_key, scope_of
from baton.handoffs.records.repository import Edit, News, Records
from baton.handoffs.records.store_proof import proof_of
from baton.images.placed_image import PlacedImage
from baton_kv.folders import store_secret
from baton_kv.stores.base import Store, StoreError
from baton_kv.stores.file import FileStore

ORPHANED_AFTER_S = 600.0
"""An entry without a record is removed this long after its last use."""

log = structlog.get_logger("baton.handoffs")


class FetchCutOff(StoreError):
    """Copying KV to this machine took too long.

    Args:
        message: from where.
        got: bytes that had come by then.
    """

    def __init__(self, message: str, got: int) -> None:
        super().__init__(message)
        self.got = got


@contextlib.contextmanager
def counting(before: int) -> Iterator[None]:
    """Add what was copied before to the bytes of a fetch that is cut off inside."""
    try:
        yield
    except FetchCutOff as error:
        error.got += before
        raise


@dataclass(frozen=True)
class HandoffStorage:
    """Joins records, images and KV, so that a handoff is removed as a whole.

    Attributes:
        kv: the KV, which the connector writes; the gateway only looks, pins and deletes. None: nowhere.
        records: the records.
        images: the images of the contexts.
    """

    kv: Store | None
    records: Records
    images: Images

    @property
    def store(self) -> Store:
        """The store of the KV.

        Raises:
            StoreError: nothing is stored, as no engine supports handoffs.
        """
        if self.kv is None:
            raise StoreError("no engine of this gateway supports handoffs")
        return self.kv

    @property
    def shared(self) -> bool:
        """Whether handoffs are in a shared store too, for gateways that do not share this folder."""
        return False

    @property
    def remote(self) -> bool:
        """Whether a handoff may be somewhere else than on this machine: in a shared store or an archive."""
        return self.shared

    def proof(self, challenge: str) -> str | None:
        """Return what only gateways over this store can answer a challenge with; None: it is of no other use.

        Raises:
            StoreError: the store cannot be read.
            HandoffStoreUnavailable: the shared store failed.
        """
        if not isinstance(self.kv, FileStore):
            return None
        return proof_of(self.secret(self.kv.root), b"", challenge)

    @staticmethod
    def secret(root: Path) -> bytes:
        """Return the secret of the store in a folder.

        Raises:
            StoreError: it cannot be read.
        """
        try:
            return store_secret(root)
        except (OSError, ValueError) as error:
            raise StoreError(f"secret: {error}") from None

    def close(self) -> None:
        """Close the connections to a shared store."""

    def announce(self, record: HandoffRecord) -> None:
        """Let gateways of other machines know of a pending handoff."""

    def keep_pending(self, _ids: Sequence[str]) -> list[str]:
        """Report that handoffs are still pending; returns those that another machine deleted meanwhile."""
        return []

    def share(self, _record: HandoffRecord) -> bool:
        """Copy a handoff's KV to where other machines find it; returns whether it is there."""
        return True

    def is_here(self, _record: HandoffRecord) -> bool:
        """Return whether engines of this machine find a handoff's KV, if it is stored at all."""
        return True

    def drop_copy(self, _record: HandoffRecord) -> None:
        """Move KV away that is here, where the record says that there is none: it led to another answer."""

    def fetch(self, _record: HandoffRecord, _within_s: float) -> int:
        """Copy a handoff's KV to this machine; returns the bytes that were copied.

        Raises:
            FetchCutOff: it took too long.
            StoreError: it cannot be copied.
            HandoffStoreUnavailable: the shared store failed.
        """
        return 0

    def source_of(self, _record: HandoffRecord) -> str:
        """Return where a handoff's KV would be fetched from: the rates of the sources differ."""
        return "shared"

    def begin_archiving(self, _records: Sequence[HandoffRecord]) -> None:
        """Archive what an earlier run of this gateway has not."""

    def stored_bytes(self, records: Sequence[HandoffRecord]) -> list[int]:
        """Return the sizes of several handoffs' KV, here or elsewhere; 0: it is not stored."""
        return [self.kv_bytes(record) for record in records]

    def find(self, handoff_id: str, _tenant: str) -> HandoffRecord | None:
        """Read a record that another gateway over the same store, or an earlier run, may have written.

        Args:
            handoff_id: its id.
            _tenant: who asks; an archive is asked for their handoffs alone.

        Raises:
            HandoffStoreUnavailable: the shared store or the archive failed.
        """
        return self.records.read(handoff_id)

    def reread(self, record: HandoffRecord) -> HandoffRecord | None:
        """Read a saved record again.

        Returns:
            The same object if it did not change on disk; None if it was deleted.
        """
        return self.records.reread(record)

    def refresh(self) -> News:
        """Return what other gateways over the store changed since the last call."""
        return self.records.refresh()

    def create(self, record: HandoffRecord, edit: Edit) -> bool:
        """Apply an edit to a new record and save it.

        Returns:
            Whether it was saved; if not, it exists in memory only.

        Raises:
            RecordDeleted: another gateway deleted it while it was pending.
        """
        try:
            self._make_room(record.disk_bytes)
        except StoreError as error:
            log.warning("handoff_not_kept", reason=str(error))
            self.records.edit_unsaved(record, edit)
            return False
        return self.records.create(record, edit)

    def _make_room(self, size: int) -> None:
        if self.kv is not None:
            self.kv.make_room(size)

    def change(self, record: HandoffRecord, edit: Edit) -> HandoffRecord | None:
        """Apply an edit to a record, on disk too if it is saved there.

        Returns:
            The record as it is then; None: another gateway deleted it.
        """
        try:
            if record.on_disk:
                return self.records.update(record.id, edit)
            self.records.edit_unsaved(record, edit)
        except OSError as error:
            log.warning("handoff_not_kept", reason=error.strerror)
            edit(record, list)
        return record

    def kv_bytes(self, record: HandoffRecord) -> int:
        """Return the size of a handoff's KV here, with what it shares with others; 0: it is not here."""
        return 0 if self.kv is None else self.kv.bytes_of(record.key)

    def pinned_kv(self, record: HandoffRecord) -> dict[str, int]:
        """Return the bytes of KV that pins protect, by scope, if this handoff were pinned too.

        KV that several handoffs share counts once. If the store cannot be listed, no pin fits.
        """
        try:
            return {} if self.kv is None else self.kv.pinned(also=record.key)
        except StoreError as error:
            log.warning("handoffs_not_listed", reason=str(error))
            return {scope_of(record.tenant): sys.maxsize}  # nothing fits

    def all_bytes(self) -> int:
        """Return the bytes of all entries in the store.

        Raises:
            StoreError: the store cannot be read.
        """
        return 0 if self.kv is None else self.kv.size()

    def pin(self, record: HandoffRecord, pin: bool) -> bool:
        """Pin a handoff's KV or unpin it; returns whether it is pinned then."""
        try:
            if self.kv is not None:
                self.kv.pin(record.key, pin)
        except StoreError as error:
            log.warning("handoff_not_pinned", reason=str(error))
            return not pin
        return pin

    def read_images(self, record: HandoffRecord) -> list[PlacedImage]:
        """Return the images of a handoff's context, in order.

        Raises:
            HandoffImagesLost: an image is missing or has changed.
        """
        return self.images.read(record)

    def non_kv_bytes(self) -> int:
        """Return the bytes of all records and images.

        Raises:
            StoreError: their folders cannot be read.
        """
        try:
            return self.images.size() + self.records.size()
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None

    def save_images(self, record: HandoffRecord) -> None:
        """Write a handoff's images to disk; without space for them the handoff ends with this process."""
        try:
            self._make_room(record.image_bytes)
        except StoreError as error:
            log.warning("handoff_images_not_kept", reason=str(error))
            return
        self.images.save(record)

    def quarantine(self, record: HandoffRecord) -> None:
        """Move a handoff's KV away, with what it shares with others, so that no request finds it any more."""
        if self.kv is None:
            return
        shared = 0
        while self.kv.exists(record.key, shared):
            shared += 1
        for part in range(shared - 1, -1, -1):
            self.kv.quarantine(record.key, part)
        self.kv.quarantine(record.key)

    def remove(self, record: HandoffRecord) -> None:
        """Remove a handoff's record, images and KV."""
        try:
            self.records.remove(record)
            self.images.remove(record)
            if self.kv is not None:
                self.kv.delete(record.key)
        except (OSError, StoreError) as error:
            log.warning("handoff_not_removed", reason=type(error).__name__)

    def delete(self, record: HandoffRecord) -> None:
        """Remove a handoff for good, wherever it is.

        Raises:
            HandoffStoreUnavailable: the shared store or the archive failed.
        """
        self.remove(record)

    def remove_expired(self, record: HandoffRecord) -> HandoffRecord | None:
        """Remove an expired handoff, unless another gateway has extended its lifetime.

        Returns:
            The extended record; None: the handoff was removed.
        """
        try:
            left = self.records.remove_expired(record)
        except OSError as error:
            log.warning("handoff_not_removed", reason=type(error).__name__)
            return None
        if left is None:
            self.remove(record)
        return left

    def sweep_orphans(self) -> None:
        """Remove KV and images that have no record."""
        if self.kv is not None:
            self.kv.sweep(
                wanted=lambda key: not is_handoff_key(key) or self._is_saved(key.partition("/")[2]),
                older_than_s=ORPHANED_AFTER_S,
            )
        self.images.sweep(wanted=self._is_saved, older_than_s=ORPHANED_AFTER_S)

    def _is_saved(self, handoff_id: str) -> bool:
        return self.records.exists(handoff_id)
