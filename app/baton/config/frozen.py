"""Define the base class of all settings groups (read-only, no unknown keys), and byte sizes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

KIB = 1024
MIB = 1024 * KIB


class Frozen(BaseModel):
    """A group of settings: read-only, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")
