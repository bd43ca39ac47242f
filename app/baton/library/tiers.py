"""Read, write and remove all that a handoff has: record, images, KV, in every tier. All calls block.

`Here` is this machine's tier. It may have a pool: the store that several machines share, which then holds
the records and images, and copies of the KV. A further tier, as the archive, is a `Tier` over `Here`: it says
what it does differently, and has the rest in its `here`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog

from baton.errors import HandoffPinsFull, HandoffStoreUnavailable
from baton.images.placed_image import PlacedImage
from baton.library.handoff import PINNED_SHARE, Handoff, Place, is_handoff_key, scope_of
from baton.library.here.images import Images, ImageStore
from baton.library.here.records import Edit, RecordFolder, Records, proof_of
from baton_kv.folders import store_secret
from baton_kv.stores.base import Store, StoreError
from baton_kv.stores.file import FileStore

if TYPE_CHECKING:
    from baton.library.valkey.pool import ValkeyPool  # valkey, which others do without

ORPHANED_AFTER_S = 600.0
"""An entry without a record is removed this long after its last use."""

log = structlog.get_logger("baton.handoffs")


class Tier(Protocol):
    """What the library asks of where handoffs are kept: `Here`, or a tier over it that has it as `here`.

    A further place is a class of this protocol in a folder of its own, as `archive/tier.py`, opened in
    `server.handoffs_of`.
    """

    @property
    def here(self) -> Here:
        """This machine's tier, which alone does what no other tier changes."""
        ...

    def close(self) -> None:
        """Close what was opened."""
        ...

    def begin(self, records: Sequence[Handoff]) -> None:
        """Go on with what an earlier run of this gateway has not done for its records."""
        ...

    def find(self, handoff_id: str, tenant: str) -> Handoff | None:
        """Read a record that another gateway, or an earlier run, may have written.

        Raises:
            HandoffStoreUnavailable: a tier failed that may know it.
        """
        ...

    def reread(self, record: Handoff) -> Handoff | None:
        """Read a saved record again; the same object if it did not change, None if it was deleted."""
        ...

    def create(self, record: Handoff, edit: Edit) -> bool:
        """Apply an edit to a new record and save it; returns whether that could be done.

        Raises:
            RecordDeleted: another gateway deleted it while it was pending.
        """
        ...

    def change(self, record: Handoff, edit: Edit) -> Handoff | None:
        """Apply an edit to a record, where it is saved too; returns it then, None if it was deleted."""
        ...

    def sizes(self, records: Sequence[Handoff]) -> list[int]:
        """Return the sizes of several handoffs' KV, wherever it is; 0: it is not stored."""
        ...

    def places(self, records: Sequence[Handoff]) -> list[Place | None]:
        """Return the nearest place where each of several handoffs' KV lies; None: it is not stored."""
        ...

    def source_of(self, record: Handoff) -> str:
        """Return where a handoff's KV would be fetched from: the rates of the sources differ."""
        ...

    def fetch(self, record: Handoff, within_s: float) -> int:
        """Copy a handoff's KV to this machine; returns the bytes that were copied.

        Raises:
            FetchCutOff: it took too long.
            StoreError: it cannot be copied.
            HandoffStoreUnavailable: a tier failed.
        """
        ...

    def read_images(self, record: Handoff) -> list[PlacedImage]:
        """Return the images of a handoff's context, in order.

        Raises:
            HandoffImagesLost: an image is missing or has changed.
        """
        ...

    def quarantine(self, record: Handoff) -> None:
        """Move a handoff's KV away, with what it shares with others, so that no request finds it any more."""
        ...

    def delete(self, record: Handoff) -> None:
        """Remove a handoff for good, wherever it is.

        Raises:
            HandoffStoreUnavailable: a tier failed; it is not deleted.
        """
        ...

    def remove_expired(self, record: Handoff) -> Handoff | None:
        """Remove an expired handoff, or return it as another gateway has extended its life."""
        ...


@dataclass(frozen=True)
class Here:
    """The `Tier` of this machine.

    Attributes:
        store: the KV, which the connector writes; the gateway only looks, pins and deletes.
        records: the records, in a folder or in the pool.
        images: the images of the contexts, where the records are.
        pool: what other machines share; None: other gateways share this machine's folder alone.
        budget: bytes that may be stored on this machine, if there is a pool.
    """

    store: Store
    records: Records
    images: Images
    pool: ValkeyPool | None = None
    budget: int = 0

    @property
    def here(self) -> Here:
        """This one."""
        return self

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def begin(self, records: Sequence[Handoff]) -> None:
        """Do nothing: here nothing is left undone."""

    def proof(self, challenge: str) -> str | None:
        """Answer a challenge as only gateways over this store can; None: no other gateway uses it.

        Raises:
            StoreError: the store cannot be read.
            HandoffStoreUnavailable: the pool failed.
        """
        if not isinstance(self.store, FileStore):
            return None
        store_id = self.pool.connection.store_id() if self.pool is not None else b""
        return proof_of(self.secret(self.store.root), store_id, challenge)

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

    def find(self, handoff_id: str, _tenant: str) -> Handoff | None:
        return self.records.read(handoff_id)

    def reread(self, record: Handoff) -> Handoff | None:
        return self.records.reread(record)

    def create(self, record: Handoff, edit: Edit) -> bool:
        if self.pool is None and not self._has_room(record.disk_bytes, "handoff_not_kept"):
            self.records.edit_unsaved(record, edit)
            return False
        return self.records.create(record, edit)

    def change(self, record: Handoff, edit: Edit) -> Handoff | None:
        try:
            if record.on_disk:
                return self.records.update(record.id, edit)
            self.records.edit_unsaved(record, edit)
        except OSError as error:
            log.warning("handoff_not_kept", reason=error.strerror)
            edit(record, list)
        return record

    def save_images(self, record: Handoff) -> None:
        """Write a handoff's images; without space for them the handoff ends with this process."""
        if self.pool is not None or self._has_room(record.image_bytes, "handoff_images_not_kept"):
            self.images.save(record)

    def _has_room(self, size: int, otherwise: str) -> bool:
        try:
            self.store.make_room(size)
        except StoreError as error:
            log.warning(otherwise, reason=str(error))
            return False
        return True

    def read_images(self, record: Handoff) -> list[PlacedImage]:
        return self.images.read(record)

    def is_here(self, record: Handoff) -> bool:
        """Return whether a handoff's KV is in this machine's store."""
        return self.store.exists(record.key)

    def kv_bytes(self, record: Handoff) -> int:
        """Return the size of a handoff's KV here, with what it shares with others; 0: it is not here."""
        return self.store.bytes_of(record.key)

    def sizes(self, records: Sequence[Handoff]) -> list[int]:
        found = {record.id: self.kv_bytes(record) for record in records}
        if self.pool is not None:
            missing = [record for record in records if not found[record.id]]
            found |= dict(zip([each.id for each in missing], self.pool.sizes(missing), strict=True))
        return [found[record.id] for record in records]

    def places(self, records: Sequence[Handoff]) -> list[Place | None]:
        found: dict[str, Place] = {each.id: "here" for each in records if each.bytes and self.is_here(each)}
        others = [each for each in records if each.bytes and each.id not in found]
        if self.pool is not None and others:
            try:
                sizes = self.pool.sizes(others)
            except HandoffStoreUnavailable:  # it had them, and may have them again
                sizes = [each.bytes for each in others]
            found |= {each.id: "shared" for each, size in zip(others, sizes, strict=True) if size}
        return [found.get(each.id) for each in records]

    def source_of(self, _record: Handoff) -> str:
        return "shared"

    def fetch(self, record: Handoff, within_s: float) -> int:
        return self.pool.fetch(record, self.store, within_s) if self.pool is not None else 0

    def share(self, record: Handoff) -> None:
        """Copy a handoff's KV to the pool; what fails is logged."""
        if self.pool is None:
            return
        try:
            self.pool.push(record, self.store)
        except (HandoffStoreUnavailable, StoreError) as error:
            log.warning("handoff_not_shared", handoff=record.id, reason=str(error))

    def pin(self, record: Handoff, pin: bool) -> bool:
        """Pin a handoff's KV or unpin it; returns whether it is pinned then.

        Raises:
            HandoffPinsFull: the pool's limit, or this machine's where no other has the KV, is reached.
            HandoffStoreUnavailable: the pool failed.
        """
        if self.pool is not None:
            there = self.pool.pin(record, pin)
            if pin and not self._fits_here(record):
                if not there and self.is_here(record):  # and nowhere else
                    raise HandoffPinsFull()
                return True  # what is here is a copy
        try:
            self.store.pin(record.key, pin)
        except StoreError as error:
            log.warning("handoff_not_pinned", reason=str(error))
            return not pin
        return pin

    def _fits_here(self, record: Handoff) -> bool:
        """Return whether KV is here and may be protected here too: this store is often the smaller one."""
        if not self.is_here(record):
            return False
        pinned = self._pinned_here(record)
        most = PINNED_SHARE * self.budget
        mine = pinned.get(scope_of(record.tenant), 0)
        return sum(pinned.values()) <= most and mine <= most / max(1, len(pinned))

    def pinned_kv(self, record: Handoff) -> dict[str, int]:
        """Return the bytes of KV that pins protect, by scope, if this handoff were pinned too.

        KV that several handoffs share counts once. If the store cannot be listed, no pin fits.
        """
        return self.pool.pinned(record) if self.pool is not None else self._pinned_here(record)

    def _pinned_here(self, record: Handoff) -> dict[str, int]:
        try:
            return self.store.pinned(also=record.key)
        except StoreError as error:
            log.warning("handoffs_not_listed", reason=str(error))
            return {scope_of(record.tenant): sys.maxsize}  # nothing fits

    def non_kv_bytes(self) -> int:
        """Return the bytes of all records and images.

        Raises:
            StoreError: their folders cannot be read.
        """
        try:
            return self.images.size() + self.records.size()
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None

    def quarantine(self, record: Handoff) -> None:
        self.quarantine_here(record)
        if self.pool is not None:
            self.pool.drop(record)

    def quarantine_here(self, record: Handoff) -> None:
        """Move KV away that is here, whatever the pool has."""
        parts = 0
        while self.store.exists(record.key, parts):
            parts += 1
        for part in range(parts - 1, -1, -1):
            self.store.quarantine(record.key, part)
        self.store.quarantine(record.key)

    def drop_copy(self, record: Handoff) -> None:
        """Move KV away that is here, where the record says that there is none: it led to another answer."""
        if self.is_here(record):
            self.quarantine_here(record)

    def remove(self, record: Handoff) -> None:
        """Remove a handoff's record, images and KV; what fails is logged."""
        try:
            self.records.remove(record)
            self.images.remove(record)
            self.store.delete(record.key)
        except (OSError, StoreError) as error:
            log.warning("handoff_not_removed", reason=type(error).__name__)

    def delete(self, record: Handoff) -> None:
        self.remove(record)

    def remove_expired(self, record: Handoff) -> Handoff | None:
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
        self.store.sweep(
            wanted=lambda key: not is_handoff_key(key) or self.records.exists(key.partition("/")[2]),
            older_than_s=ORPHANED_AFTER_S,
        )
        self.images.sweep(wanted=self.records.exists, older_than_s=ORPHANED_AFTER_S)


class EmptyStore(Store):
    """A store without entries, and of which no more is asked."""

    def bytes_of(self, _key: str) -> int:
        return 0

    def size(self) -> int:
        return 0

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> int:
        return 0


def nowhere() -> Here:
    """Return the tier of a gateway none of whose engines supports handoffs: it stores nothing."""
    return Here(EmptyStore(), RecordFolder(None), ImageStore(None))  # type: ignore[abstract]  # no more is asked
