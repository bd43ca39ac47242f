"""Define the connector's settings, which vLLM passes as `kv_connector_extra_config`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

AVP_SETTINGS = {
    "avp_store_dir": "set `store` to `file:/ABSOLUTE/FOLDER` instead",
    "avp_store_ttl": "set `budget` to limit bytes; behind the gateway `handoffs.ttl_s` limits the time",
    "avp_latent_steps": "each request asks for its steps; see plugins/baton_latent/README.md",
}
"""Settings of AVP's connector, and what to use instead."""


class ConnectorSettings(BaseModel):
    """The keys of `kv_connector_extra_config`; any other key is refused when the engine starts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _not_avp(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name in AVP_SETTINGS:
                raise ValueError(f"{name} is a setting of AVP: {AVP_SETTINGS[name]}")
        return given

    store: str = Field(description="Folder of the entries, as file:/ABSOLUTE/FOLDER.")
    budget: ByteSize | None = Field(
        None, description="Bytes that all entries may take; the least recently used are evicted first."
    )
    fsync: bool = Field(False, description="Flush an entry to the device before it becomes visible.")
    avp_source_model: str | None = Field(
        None,
        description="AVP's name, which the gateway reads: the engine whose handoffs this one continues by "
        "one vector, unless a request says otherwise.",
    )
    avp_target_model: str | None = Field(
        None,
        description="AVP's name, which the gateway reads: the engine that continues this one's handoffs so.",
    )
    spare_adapter: bool = Field(
        False,
        description="With LoRA on CPUs: never are as many adapters loaded as `max_loras`, as the gateway "
        "sees to. Without it the KV of requests without an adapter is neither saved nor loaded there.",
    )
    unproven_devices: bool = Field(
        False,
        description="Allow NVIDIA GPUs where handoffs on them are not proved: with tensor parallelism, "
        "quantised KV, sliding windows, MLA, running states, groups of different shape, speculative "
        "decoding, images, vLLM's first model runner.",
    )
    verify: bool = Field(
        True,
        description="Verify every chunk before it is used, not only an entry's description and token ids.",
    )
    resident: ByteSize = Field(
        ByteSize(0),
        ge=0,
        description="Bytes of KV that stay in the engine's memory once they were saved or verified there, so "
        "that later loads need not verify them; its ranks have equal shares of them. 0: none do.",
    )
