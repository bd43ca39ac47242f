"""Define the states of a handoff: pending, ready or failed."""

from __future__ import annotations

from enum import StrEnum


class HandoffState(StrEnum):
    """A state: `pending -> ready` or `pending -> failed`. An expired or deleted handoff has no state."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
