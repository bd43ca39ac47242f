"""Open the archive of the settings."""

from __future__ import annotations

from pathlib import Path

from baton.config.groups import HandoffSettings
from baton.errors import SettingsError
from baton.handoffs.archive.archiver import Archiver
from baton.handoffs.archive.bucket import Bucket, BucketAddress
from baton.handoffs.archive.copies import Archive
from baton.handoffs.archive.documents import PROOF, Names
from baton.handoffs.archive.files import ArchiveFiles, Pace
from baton.handoffs.archive.records import ArchiveRecords
from baton.handoffs.archive.storage import ArchivedStorage
from baton.handoffs.records.changes import PINNED_SHARE
from baton.handoffs.records.storage import HandoffStorage
from baton.handoffs.records.store_proof import pool_secret
from baton.telemetry.archive_metrics import ArchiveMetrics
from baton_kv.folders import install_secret


def open_archived(
    settings: HandoffSettings, inner: HandoffStorage, folder: Path, metrics: ArchiveMetrics
) -> ArchivedStorage:
    """Return a storage whose pinned and long-lived handoffs are archived.

    Args:
        settings: with the address of the archive.
        inner: the storage of this machine, and perhaps of the shared store.
        folder: the folder of this machine's store.
        metrics: where requests are counted.

    Raises:
        SettingsError: a file is missing, the local store has another secret, or the archive refuses this
            gateway. An archive that does not answer is no reason: it is used once it does.
    """
    archive = archive_of(settings, metrics)
    try:
        install_secret(folder, _secret(settings))
    except (OSError, ValueError) as error:
        raise SettingsError(f"handoffs.store: {error}") from None
    archiver = Archiver(archive, inner, settings.archive_after_s)
    most = int(PINNED_SHARE * settings.whole_budget)
    return ArchivedStorage(inner.store, inner.records, inner.images, inner, archive, archiver, most)


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
