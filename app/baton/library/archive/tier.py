"""The archive as a tier over this machine's, and how it is opened."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from baton.config.groups import HandoffSettings
from baton.errors import HandoffImagesLost, HandoffPinsFull, HandoffStoreUnavailable, SettingsError
from baton.images.placed_image import PlacedImage
from baton.library.archive.archiver import Archiver
from baton.library.archive.bucket import UNAVAILABLE, Bucket, BucketAddress, Conflict, NotChanged
from baton.library.archive.copies import Archive, ArchiveFiles, Damaged, Pace, placed
from baton.library.archive.documents import PROOF, Document, Names, Tampered
from baton.library.archive.records import ArchiveRecords, Version
from baton.library.handoff import PINNED_SHARE, SAVERS, Handoff, Place
from baton.library.here.records import Edit, Others, pool_secret
from baton.library.tiers import Here
from baton.telemetry.metrics import ArchiveMetrics, AuditResult
from baton_kv.folders import install_secret
from baton_kv.stores.base import StoreError

# Put the archive behind a machine's tier: the last place where a handoff is looked for.
#
# With a pool, that one says what a handoff's label, pin and lifetime are, and the archive follows in
# the background. Without one the archive does: a change is made there first, and other machines see it some
# seconds later.


LOOK_AGAIN_S = 5.0
"""Without a shared store, what other machines change in the archive is seen after so long, at most."""
MAX_SEEN = 10_000

log = structlog.get_logger("baton.handoffs")


class Seen:
    """What this gateway knows of archived handoffs: their versions, and whose files are damaged."""

    def __init__(self) -> None:
        self.versions: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._damaged: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, handoff_id: str, tag: str) -> None:
        """Note the version of a handoff's document."""
        with self._lock:
            self.versions[handoff_id] = tag, time.monotonic()
            while len(self.versions) > MAX_SEEN:
                self.versions.popitem(last=False)

    def forget(self, handoff_id: str) -> None:
        """Forget the version of a handoff's document, so that the next look reads it."""
        with self._lock:
            self.versions.pop(handoff_id, None)

    def version(self, handoff_id: str) -> tuple[str | None, float]:
        """Return the version that is known, and how many seconds ago it was current."""
        tag, at = self.versions.get(handoff_id, (None, float("-inf")))
        return tag, time.monotonic() - at

    def note_damaged(self, handoff_id: str) -> None:
        """Note that a handoff's KV cannot be fetched, now or later."""
        with self._lock:
            self._damaged[handoff_id] = None
            while len(self._damaged) > MAX_SEEN:
                self._damaged.popitem(last=False)

    def is_damaged(self, handoff_id: str) -> bool:
        """Return whether a handoff's KV cannot be fetched."""
        return handoff_id in self._damaged


@dataclass(frozen=True)
class Archived:
    """The `Tier` behind this machine's, in which pinned and long-lived handoffs outlive it.

    Attributes:
        archiver: writes to it in the background.
        pinned_most: bytes of KV that may be pinned on this machine; the archive has what is fetched above it.
        seen: what is known of its handoffs.
    """

    here: Here
    archive: Archive
    archiver: Archiver
    pinned_most: int
    seen: Seen = field(default_factory=Seen)

    @property
    def changes_archive_first(self) -> bool:
        """Whether archived handoffs are changed in the archive first: no pool says what they are."""
        return self.here.pool is None

    def close(self) -> None:
        self.archiver.close()
        self.here.close()

    def begin(self, records: Sequence[Handoff]) -> None:
        for record in records:
            if not record.archived and self.archiver.wants(record):
                self.archiver.write_later(record)

    def create(self, record: Handoff, edit: Edit) -> bool:
        saved = self.here.create(record, edit)
        if saved and self.archiver.wants(record):
            self.archiver.write_later(record)
        return saved

    def change(self, record: Handoff, edit: Edit) -> Handoff | None:
        with self.archiver.guard(record.id):
            there = record.archived and self.changes_archive_first
            changed = None if there else self.here.change(record, edit)
        if there or (changed is not None and changed.archived and self.changes_archive_first):
            return self._change_archived(record, edit)
        if changed is not None and changed.on_disk and (changed.archived or self.archiver.wants(changed)):
            self.archiver.write_later(record)
        return changed

    def _change_archived(self, record: Handoff, edit: Edit) -> Handoff | None:
        """Change the archive's record, and this machine's to what is then there."""

        def over(there: Handoff) -> Handoff | None:
            def merged(mine: Handoff, others: Others) -> None:
                _take_over(mine, there)
                edit(mine, others)

            return self.here.change(record, merged) or self._change_evicted(record, there, merged)

        try:
            changed = self.archive.change(record, over)
        except Conflict:
            self.archiver.write_later(record)  # which writes a damaged document once more
            raise HandoffStoreUnavailable(UNAVAILABLE) from None
        except HandoffStoreUnavailable:
            self.seen.forget(record.id)  # this machine's record is set to the archive's with the next look
            raise
        if changed is None:
            self.here.remove(record)
        else:
            self.archiver.write_later(record)  # its KV may have been saved since
        return changed

    def _change_evicted(self, record: Handoff, there: Handoff, edit: Edit) -> Handoff:
        """Write the archive's record here again, which this machine has just evicted, and change it."""
        again = there.model_copy(update={"revision": max(there.revision, record.revision)})
        again.prepare()
        again.on_disk = self.here.create(again, _as_it_is)
        if (changed := self.here.change(again, edit)) is None:
            raise HandoffStoreUnavailable(UNAVAILABLE)  # evicted again: the client may try once more
        return changed

    def find(self, handoff_id: str, tenant: str) -> Handoff | None:
        failed: HandoffStoreUnavailable | None = None
        try:
            if (found := self.here.find(handoff_id, tenant)) is not None:
                return found
        except HandoffStoreUnavailable as error:
            failed = error
        if (there := self.archive.records.look_up(handoff_id, tenant)) is not None:
            return self._restored(there)
        if failed is not None:
            raise failed
        return None

    def _restored(self, there: Version) -> Handoff | None:
        """Write a record of the archive to this machine, or to the shared store; None: it was deleted now."""
        record = there.document.record
        assert record is not None
        record.archived = True
        record.prepare()
        self.seen.note(record.id, there.tag)
        record.on_disk = self.here.create(record, _as_it_is)
        self.archive.metrics.handoff("found")
        try:
            now = self.archive.records.read(self._name(record), unless=there.tag)
        except NotChanged:
            return record
        except Tampered:
            now = None
        except HandoffStoreUnavailable:
            self.here.remove(record)  # nobody knows whether it was deleted meanwhile
            raise
        if now is not None and now.document.record is not None:
            return record  # changed meanwhile: that is seen with the next look
        self.here.remove(record)
        return None

    def reread(self, record: Handoff) -> Handoff | None:
        if record.archived and not record.on_disk:  # this machine had no room for it
            return self._up_to_date(record)
        found = self.here.reread(record)
        if not (found or record).archived:
            return found
        if found is None:  # evicted here, or by the shared store; or deleted
            there = self.archive.records.look_up(record.id, record.tenant)
            return self._restored(there) if there is not None else None
        return self._up_to_date(found) if self.changes_archive_first else found

    def _up_to_date(self, record: Handoff) -> Handoff | None:
        """Return a record with what other machines changed in the archive; None: it was deleted there."""
        tag, age = self.seen.version(record.id)
        if age < LOOK_AGAIN_S:
            return record
        try:
            there = self.archive.records.read(self._name(record), unless=tag)
        except NotChanged:
            assert tag is not None
            self.seen.note(record.id, tag)
            return record
        except (Tampered, HandoffStoreUnavailable):  # it cannot be read now, but may exist
            return record
        if there is None or there.document.record is None:
            self.here.remove(record)
            return None
        told = there.document.record
        self.seen.note(record.id, there.tag)
        pinned = record.pin
        changed = self.here.change(record, lambda mine, _others: _take_over(mine, told))
        if self.here.is_here(record):
            if _is_wrong(told):
                self.here.quarantine(record)
            elif told.pin != pinned:
                self._pin(record, told.pin)
        return changed if changed is not None else self._restored(there)  # it was evicted here meanwhile

    def source_of(self, record: Handoff) -> str:
        if not self.changes_archive_first and any(self.here.sizes([record])):
            return "shared"
        return "archive"

    def fetch(self, record: Handoff, within_s: float) -> int:
        began, failed = time.monotonic(), None
        try:
            size = self.here.fetch(record, within_s)
        except (StoreError, HandoffStoreUnavailable) as error:
            size, failed = 0, error
        if size or self.here.is_here(record):
            return size
        if not record.archived or (document := self._document(record)) is None or not document.files:
            if failed is not None:
                raise failed
            return 0
        try:
            size = self.archive.fetch(self.here.store, document.files, within_s - (time.monotonic() - began))
        except Damaged:
            self.seen.note_damaged(record.id)
            raise
        self._settle(record)
        return size

    def _settle(self, record: Handoff) -> None:
        """Pin KV that was fetched from the archive, and let the shared store have it again."""
        if not self.changes_archive_first:
            self.archiver.begin(f"share {record.id}", partial(_once, self.here.share, record))
        if record.pin:
            self._pin(record, True)

    def _pin(self, record: Handoff, pin: bool) -> None:
        """Pin KV of this machine as the record says and there is room, or unpin it."""
        if (
            pin
            and self.changes_archive_first
            and sum(self.here.pinned_kv(record).values()) > self.pinned_most
        ):
            log.info("handoff_not_pinned", handoff=record.id, reason="as much is pinned as may be")
            return
        try:
            self.here.pin(record, pin)
        except (HandoffPinsFull, HandoffStoreUnavailable) as error:
            log.warning("handoff_not_pinned", handoff=record.id, reason=error.message)

    def sizes(self, records: Sequence[Handoff]) -> list[int]:
        found = self.here.sizes(records)
        return [
            size or (record.bytes if record.archived and not self.seen.is_damaged(record.id) else 0)
            for record, size in zip(records, found, strict=True)
        ]

    def places(self, records: Sequence[Handoff]) -> list[Place | None]:
        return [
            place
            or ("archive" if each.archived and each.bytes and not self.seen.is_damaged(each.id) else None)
            for each, place in zip(records, self.here.places(records), strict=True)
        ]

    def read_images(self, record: Handoff) -> list[PlacedImage]:
        try:
            return self.here.read_images(record)
        except HandoffImagesLost:
            document = self._document(record) if record.archived else None
            if document is None or not document.images:
                raise
        try:
            found = self.archive.images(document)
        except StoreError as error:
            log.warning("handoff_image_unreadable", handoff=record.id, reason=str(error))
            raise HandoffImagesLost() from None
        images = placed(record, found)
        copy = Handoff.model_validate(record.model_dump())
        copy.image_data.update(found)
        self.here.save_images(copy)
        return images

    def quarantine(self, record: Handoff) -> None:
        self.here.quarantine(record)
        self.seen.note_damaged(record.id)
        if record.archived or self.archiver.is_waiting(record.id):
            self.archiver.take_kv_out_later(record)

    def delete(self, record: Handoff) -> None:
        concerned = record.archived or self.archiver.wants(record) or self.archiver.is_waiting(record.id)
        if not concerned or record.automatic:
            self.here.delete(record)
            return
        handoff, objects = self.archive.delete(record)
        self.here.delete(record)
        release = partial(_once, self.archive.records.release, handoff, objects)
        self.archiver.begin(record.id, release)  # in the place of a write that waits

    def remove_expired(self, record: Handoff) -> Handoff | None:
        if record.archived and self.changes_archive_first:
            try:
                there = self.archive.records.look_up(record.id, record.tenant)
            except HandoffStoreUnavailable:
                there = None
            told = there.document.record if there is not None else None
            if told is not None and told.expires_at > record.expires_at:
                return self.here.change(record, lambda mine, _others: _take_over(mine, told))
        return self.here.remove_expired(record)

    def _document(self, record: Handoff) -> Document | None:
        """Return the archive's document of a handoff, unless it was deleted or tampered with."""
        _, found = self.archive.records.current(record.tenant, record.id)
        return found.document if found is not None else None

    def _name(self, record: Handoff) -> str:
        return self.archive.names.handoff(record.tenant, record.id)


def _take_over(mine: Handoff, there: Handoff) -> None:
    """Set what may change of a record to what it is in the archive."""
    mine.take(there, but={*SAVERS, "revision"})  # this machine's KV and file are its own
    if _is_wrong(there):
        mine.bytes = 0
    mine.archived = True


def _is_wrong(record: Handoff) -> bool:
    """Return whether an audit, on any machine, found that a handoff's KV leads to other answers."""
    return record.audit is not None and record.audit.result is AuditResult.MISMATCH


def _once(work: Callable[..., object], *args: object) -> bool:
    """Do a job of the archiver that is not done again."""
    work(*args)
    return True


def _as_it_is(_record: Handoff, _others: Others) -> None:
    """Change nothing."""


def open_archived(settings: HandoffSettings, here: Here, folder: Path, metrics: ArchiveMetrics) -> Archived:
    """Open the archive of the settings behind a machine's tier.

    Raises:
        SettingsError: a file is missing, the local store has another secret, or the archive refuses this
            gateway. An archive that does not answer is no reason: it is used once it does.
    """
    archive = archive_of(settings, metrics)
    try:
        install_secret(folder, _secret(settings))
    except (OSError, ValueError) as error:
        raise SettingsError(f"handoffs.store: {error}") from None
    archiver = Archiver(archive, here, settings.archive_after_s)
    most = int(PINNED_SHARE * settings.whole_budget)
    return Archived(here, archive, archiver, most)


def archive_of(settings: HandoffSettings, metrics: ArchiveMetrics) -> Archive:
    """Return the archive, after a look at whether it may be used.

    Raises:
        SettingsError: as `open_archived`.
    """
    names = names_of(settings)
    bucket = Bucket(address_of(settings), metrics)
    bucket.require_usable(PROOF, names.proof())
    pace = Pace(int(settings.archive_rate) if settings.archive_rate is not None else None)
    lives = max(settings.max_life_s, settings.ttl_s)
    files = ArchiveFiles(bucket, names, metrics, pace, renewed_s=lives / 2)
    records = ArchiveRecords(bucket, names, metrics)
    return Archive(bucket, names, records, files, metrics, settings.archive_fetch_s)


def address_of(settings: HandoffSettings) -> BucketAddress:
    """Return the address of the archive, with what the files of the settings say.

    Raises:
        SettingsError: a file cannot be read, or is not what it should be.
    """
    assert settings.archive is not None
    bucket, _, prefix = settings.archive.removeprefix("s3://").rstrip("/").partition("/")
    authorities = settings.archive_ca_file
    return BucketAddress(
        bucket,
        prefix,
        settings.archive_endpoint,
        settings.archive_region,
        _key(settings.archive_key_file) if settings.archive_key_file is not None else None,
        _read("handoffs.archive_ca_file", authorities).encode() if authorities is not None else None,
        settings.archive_timeout_s,
        settings.archive_fetch_s,
    )


def names_of(settings: HandoffSettings) -> Names:
    """Return the names of objects, which are made with the gateways' secret.

    Raises:
        SettingsError: its file cannot be read, or is too short.
    """
    return Names(_secret(settings))


def _secret(settings: HandoffSettings) -> bytes:
    assert settings.shared_secret_file is not None
    return pool_secret(settings.shared_secret_file)


def _key(path: Path) -> tuple[str, str]:
    lines = _read("handoffs.archive_key_file", path).split()
    if len(lines) != 2:
        raise SettingsError(f"handoffs.archive_key_file: {path}: give two lines, the key's id and its secret")
    return lines[0], lines[1]


def _read(setting: str, path: Path) -> str:
    try:
        return path.expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise SettingsError(f"{setting}: {path}: {reason}") from None
