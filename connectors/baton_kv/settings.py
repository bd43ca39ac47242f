"""The connector's settings: vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

from pydantic import BaseModel, ByteSize, ConfigDict, Field


class ConnectorSettings(BaseModel):
    """What `kv_connector_extra_config` may say; anything else is refused at the engine's start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: str = Field(description="Where entries are kept: file:/ABSOLUTE/FOLDER.")
    budget: ByteSize | None = Field(None, description="Bytes all entries may take; the oldest go first.")
    fsync: bool = Field(False, description="Wait for the device before an entry is visible.")
    verify: bool = Field(
        True,
        description="Prove every chunk before it is used; without it only an entry's description is proved.",
    )
