"""Prove to another gateway that both use one store of handoffs, without telling it the store's secret."""

from __future__ import annotations

import hashlib
import hmac

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
