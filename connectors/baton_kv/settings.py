"""The connector's settings: vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

AVP_SETTINGS = {
    "avp_store_dir": "name the folder as `store`, `file:/ABSOLUTE/FOLDER`",
    "avp_store_ttl": "entries go by `budget`; behind the gateway `handoffs.ttl_s` limits their time",
    "avp_latent_steps": "steps are asked for by each request; see plugins/baton_latent/README.md",
    "avp_target_model": "handing over to another model is not supported yet",
    "avp_source_model": "handing over from another model is not supported yet",
}
"""Settings of AVP's connector, and what there is instead."""


class ConnectorSettings(BaseModel):
    """What `kv_connector_extra_config` may say; anything else is refused at the engine's start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _not_avp(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name in AVP_SETTINGS:
                raise ValueError(f"{name} is a setting of AVP: {AVP_SETTINGS[name]}")
        return given

    store: str = Field(description="Where entries are kept: file:/ABSOLUTE/FOLDER.")
    budget: ByteSize | None = Field(None, description="Bytes all entries may take; the oldest go first.")
    fsync: bool = Field(False, description="Wait for the device before an entry is visible.")
    verify: bool = Field(
        True,
        description="Prove every chunk before it is used; without it only an entry's description is proved.",
    )
