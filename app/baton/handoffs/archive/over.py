"""Hand everything on to another storage, so that one over it says only what it does differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.records.repository import Edit, News
from baton.handoffs.records.storage import HandoffStorage
from baton.images.placed_image import PlacedImage


@dataclass(frozen=True)
class StorageOver(HandoffStorage):
    """A `HandoffStorage` that does what another one does.

    Attributes:
        inner: the other one.
    """

    inner: HandoffStorage

    @property
    def shared(self) -> bool:
        return self.inner.shared

    def proof(self, challenge: str) -> str | None:
        return self.inner.proof(challenge)

    def close(self) -> None:
        self.inner.close()

    def announce(self, record: HandoffRecord) -> None:
        self.inner.announce(record)

    def keep_pending(self, ids: Sequence[str]) -> list[str]:
        return self.inner.keep_pending(ids)

    def share(self, record: HandoffRecord) -> bool:
        return self.inner.share(record)

    def is_here(self, record: HandoffRecord) -> bool:
        return self.inner.is_here(record)

    def drop_copy(self, record: HandoffRecord) -> None:
        self.inner.drop_copy(record)

    def fetch(self, record: HandoffRecord, within_s: float) -> int:
        return self.inner.fetch(record, within_s)

    def source_of(self, record: HandoffRecord) -> str:
        return self.inner.source_of(record)

    def stored_bytes(self, records: Sequence[HandoffRecord]) -> list[int]:
        return self.inner.stored_bytes(records)

    def find(self, handoff_id: str, tenant: str) -> HandoffRecord | None:
        return self.inner.find(handoff_id, tenant)

    def reread(self, record: HandoffRecord) -> HandoffRecord | None:
        return self.inner.reread(record)

    def refresh(self) -> News:
        return self.inner.refresh()

    def create(self, record: HandoffRecord, edit: Edit) -> bool:
        return self.inner.create(record, edit)

    def change(self, record: HandoffRecord, edit: Edit) -> HandoffRecord | None:
        return self.inner.change(record, edit)

    def kv_bytes(self, record: HandoffRecord) -> int:
        return self.inner.kv_bytes(record)

    def pinned_kv(self, record: HandoffRecord) -> dict[str, int]:
        return self.inner.pinned_kv(record)

    def all_bytes(self) -> int:
        return self.inner.all_bytes()

    def pin(self, record: HandoffRecord, pin: bool) -> bool:
        return self.inner.pin(record, pin)

    def read_images(self, record: HandoffRecord) -> list[PlacedImage]:
        return self.inner.read_images(record)

    def non_kv_bytes(self) -> int:
        return self.inner.non_kv_bytes()

    def save_images(self, record: HandoffRecord) -> None:
        self.inner.save_images(record)

    def quarantine(self, record: HandoffRecord) -> None:
        self.inner.quarantine(record)

    def remove(self, record: HandoffRecord) -> None:
        self.inner.remove(record)

    def delete(self, record: HandoffRecord) -> None:
        self.inner.delete(record)

    def remove_expired(self, record: HandoffRecord) -> HandoffRecord | None:
        return self.inner.remove_expired(record)

    def sweep_orphans(self) -> None:
        self.inner.sweep_orphans()
