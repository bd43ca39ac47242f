"""Open the shared store of the settings."""

from __future__ import annotations

from pathlib import Path

from baton.config.groups import HandoffSettings
from baton.errors import SettingsError
from baton.handoffs.records.store_proof import pool_secret
from baton.handoffs.shared.clients import SharedAddress
from baton.handoffs.shared.connection import SharedConnection
from baton.handoffs.shared.files import PoolFiles
from baton.handoffs.shared.images import SharedImages
from baton.handoffs.shared.records import SharedRecords
from baton.handoffs.shared.storage import SharedStorage
from baton.telemetry.shared_store_metrics import SharedStoreMetrics
from baton_kv.folders import install_secret
from baton_kv.stores.base import Store


def open_shared(
    settings: HandoffSettings, store: Store, folder: Path, metrics: SharedStoreMetrics
) -> SharedStorage:
    """Return a storage whose handoffs other machines share.

    Args:
        settings: with the address of the shared store.
        store: the store of this machine.
        folder: the folder of that store.
        metrics: where exchanges are counted.

    Raises:
        SettingsError: a file is missing, the local store has another secret, or the shared store refuses this
            gateway. A shared store that does not answer is no reason: it is used once it does.
    """
    address = address_of(settings)
    connection = SharedConnection(address, metrics)
    connection.require_usable()
    try:
        install_secret(folder, address.secret)
    except (OSError, ValueError) as error:
        raise SettingsError(f"handoffs.store: {error}") from None
    budget = int(settings.shared_budget)
    files = PoolFiles(connection, metrics)
    records = SharedRecords(connection, files, budget)
    images = SharedImages(files, budget, settings.shared_fetch_s)
    return SharedStorage(
        store,
        records,
        images,
        connection,
        files,
        budget,
        budget_here=int(settings.budget),
        fetch_s=settings.shared_fetch_s,
    )


def address_of(settings: HandoffSettings) -> SharedAddress:
    """Return the address of the shared store, with what the files of the settings say.

    Raises:
        SettingsError: a file cannot be read, or the secret is too short.
    """
    assert settings.shared is not None
    assert settings.shared_secret_file is not None
    password = settings.shared_password_file
    ca_file = settings.shared_ca_file
    return SharedAddress(
        settings.shared,
        settings.shared_pool,
        pool_secret(settings.shared_secret_file),
        _text("handoffs.shared_password_file", password) if password is not None else None,
        settings.shared_timeout_s,
        str(ca_file) if ca_file is not None else None,
    )


def _text(setting: str, path: Path) -> str:
    try:
        return path.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise SettingsError(f"{setting}: {path}: {reason}") from None
