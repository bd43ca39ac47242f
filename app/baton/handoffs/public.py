"""The handoff object as its owner is shown it. The OpenAPI document and the docs are made of these models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.handoffs.state import HandoffState


class HandoffObject(BaseModel):
    """One handoff. Its token ids are not shown: they can be long."""

    model_config = ConfigDict(title="BatonHandoffObject")

    id: str = Field(description="Its name in requests: `handoff.from`, and the path of its routes.")
    object: Literal["handoff"] = Field("handoff", description="The kind of object.")
    state: HandoffState = Field(description="`pending` until the request that saves it is over.")
    model: str = Field(description="The engine that saved it.")
    tokens: int = Field(description="Tokens of its context.")
    images: int = Field(description="Images of its context.")
    latent_steps: int = Field(description="How many of the tokens stand for latent steps.")
    bytes: int = Field(description="Size of its KV in the store; 0: there is none, and it is prefilled.")
    pin: bool = Field(description="Whether its KV stays when others' is evicted.")
    created_at: int = Field(description="Seconds since the epoch.")
    expires_at: int = Field(description="Seconds since the epoch.")
    parent: str | None = Field(description="The handoff that it goes on from.")
    label: str | None = Field(description="The client's own label.")


class HandoffList(BaseModel):
    """A page of a tenant's handoffs, the newest first."""

    model_config = ConfigDict(title="BatonHandoffList")

    object: Literal["list"] = Field("list", description="The kind of object.")
    data: list[HandoffObject] = Field(description="The handoffs of this page.")
    has_more: bool = Field(description="Whether older ones follow; ask with `after` set to `last_id`.")
    first_id: str | None = Field(description="The first handoff of the page.")
    last_id: str | None = Field(description="The last handoff of the page.")
