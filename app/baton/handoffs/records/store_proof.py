"""Read the secret of a pool of gateways, and prove to another one that both use one store."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from baton.errors import SettingsError

LEAST_SECRET = 32
PURPOSE = b"baton: this gateway uses the store"
"""Sets these digests apart from all others that are made with the secret."""


def proof_of(secret: bytes, store_id: bytes, challenge: str) -> str:
    """Return what only gateways over one store can compute.

    Args:
        secret: the store's secret.
        store_id: a random number that is kept in the store.
        challenge: random digits, chosen by the gateway that asks.
    """
    parts = (PURPOSE, store_id, challenge.encode())
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def pool_secret(file: Path) -> bytes:
    """Return the key that `handoffs.shared_secret_file` is: the digest of its bytes, or of its text.

    White space around a text is no part of it, so that an editor's last line feed is none.

    Raises:
        SettingsError: it cannot be read, or is too short.
    """
    try:
        data = file.expanduser().read_bytes()
    except OSError as error:
        raise SettingsError(f"handoffs.shared_secret_file: {file}: {error.strerror}") from None
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:  # random bytes
        secret, length = data, len(data)
    else:
        secret, length = text.encode(), len(text)
    if length < LEAST_SECRET:
        raise SettingsError(f"handoffs.shared_secret_file: give at least {LEAST_SECRET} characters or bytes")
    return hashlib.sha256(secret).digest()
