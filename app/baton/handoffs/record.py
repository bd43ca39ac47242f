"""What is known of one handoff, and how it is kept beside its entry."""

from __future__ import annotations

import hashlib
import secrets
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class HandoffState(StrEnum):
    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


class HandoffRecord(BaseModel):
    """One handoff: its token ids are the truth, its KV may or may not still be there.

    Attributes:
        id: what clients call it; 192 random bits, no meaning.
        tenant: whose it is.
        model: the engine that left it behind.
        weights: that engine's; engines of the same weights understand it.
        tokens: every token id of its context, in order.
        state: pending until the request that leaves it behind is over.
        bytes: size of its entry; 0: there is none, and who starts from it prefills.
        created_at: seconds since the epoch.
        expires_at: seconds since the epoch.
        parent: the handoff it started from.
        label: the client's own words.
    """

    model_config = ConfigDict(extra="forbid")

    id: str = Field(default_factory=lambda: secrets.token_urlsafe(24))
    tenant: str
    model: str
    weights: str
    tokens: list[int] = []
    state: HandoffState = HandoffState.PENDING
    bytes: int = 0
    created_at: float
    expires_at: float
    parent: str | None = None
    label: str | None = None

    @property
    def key(self) -> str:
        """The key of its entry."""
        return f"{scope_of(self.tenant)}/{self.id}"

    def public(self) -> dict[str, object]:
        """What its owner is shown; token ids are not, they can be long."""
        return {
            "id": self.id,
            "object": "handoff",
            "state": self.state.value,
            "model": self.model,
            "tokens": len(self.tokens),
            "latent_steps": 0,
            "bytes": self.bytes,
            "created_at": int(self.created_at),
            "expires_at": int(self.expires_at),
            "parent": self.parent,
            "label": self.label,
        }


def scope_of(tenant: str) -> str:
    """A tenant's part of a store's keys."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]
