"""The handoff object as clients see it. The OpenAPI document and the docs are made from these models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.handoffs.records.state import HandoffState
from baton.telemetry.audit_metrics import AuditResult


class HandoffAudit(BaseModel):
    """The last audit of a handoff: an answer from its KV, computed again without it."""

    model_config = ConfigDict(title="BatonHandoffAudit", json_schema_serialization_defaults_required=True)

    result: AuditResult = Field(
        description="`match`, or `mismatch`: then its KV is in quarantine, and is recomputed."
    )
    difference: float = Field(
        description="Largest difference between the log probabilities of the answer's first token, in nats."
    )
    same_token: bool = Field(description="Whether the likeliest first token was the same.")
    at: int = Field(description="When it was audited, in seconds since the epoch.")


class HandoffObject(BaseModel):
    """A handoff. Its token ids are not shown, because they can be long."""

    model_config = ConfigDict(title="BatonHandoffObject", json_schema_serialization_defaults_required=True)

    id: str = Field(description="Identifies the handoff in `handoff.from` and in the path of its routes.")
    object: Literal["handoff"] = Field("handoff", description="The kind of object.")
    state: HandoffState = Field(description="`pending` until the request that saves it has ended.")
    model: str = Field(description="Name of the engine that saved it.")
    tokens: int = Field(description="Number of tokens in its context.")
    images: int = Field(description="Number of images in its context.")
    latent_steps: int = Field(description="Number of those tokens that stand for latent steps.")
    bytes: int = Field(
        description="Size of its KV in the store, with what it shares with other handoffs; 0: its KV is not "
        "stored, and is recomputed."
    )
    pin: bool = Field(description="Whether its KV is exempt from eviction.")
    created_at: int = Field(description="When it was created, in seconds since the epoch.")
    expires_at: int = Field(description="When it expires, in seconds since the epoch.")
    parent: str | None = Field(
        description="Id of the handoff that it continues, or of the first of those that were joined."
    )
    parents: list[str] = Field(description="Ids of all handoffs that it continues.")
    label: str | None = Field(description="The label that the client gave it.")
    exact: bool = Field(
        description="Whether its KV is what the engine would compute of its tokens; `false` if any of it was "
        "moved to its place, or loaded from a handoff that is not exact."
    )
    translated_from: str | None = Field(
        description="Id of the handoff of another model whose text it holds; `null`: it is no translation."
    )
    archived: bool = Field(
        description="Whether it is in the archive, and so outlives this machine. What is pinned or lives "
        "long is, some moments after it was saved; without an archive always `false`."
    )
    error: str | None = Field(description="Why it is `failed`, if it was joined ahead; else `null`.")
    audit: HandoffAudit | None = Field(
        None, description="Its last audit; `null`: none of the requests that loaded its KV was audited."
    )


class HandoffList(BaseModel):
    """A page of a tenant's handoffs, the newest first."""

    model_config = ConfigDict(title="BatonHandoffList", json_schema_serialization_defaults_required=True)

    object: Literal["list"] = Field("list", description="The kind of object.")
    data: list[HandoffObject] = Field(description="The handoffs of this page.")
    has_more: bool = Field(
        description="Whether older ones follow; request them with `after` set to `last_id`."
    )
    first_id: str | None = Field(description="Id of the first handoff of the page.")
    last_id: str | None = Field(description="Id of the last handoff of the page.")
