"""Define what `serve run baton.ray:app KEY=VALUE ...` takes."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator


class Arguments(BaseModel):
    """How many replicas run, and what each is given. Everything else is in the gateway's own settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: Path | None = Field(
        None,
        description="The settings file, at the same path on every node. Unset: what `BATON_CONFIG` names.",
    )
    replicas: PositiveInt = Field(1, description="Number of replicas; with `max_replicas`, the fewest.")
    max_replicas: PositiveInt | None = Field(
        None,
        description="Most replicas that Ray Serve starts by the gateways' queues. Unset: no autoscaling.",
    )
    target_load: PositiveFloat = Field(
        0.7, description="Load of a replica that autoscaling aims at; 1: its engine has no free place."
    )
    upscale_delay_s: float = Field(
        10, ge=0, description="Seconds that more replicas must be wanted before they are started."
    )
    downscale_delay_s: float = Field(
        300, ge=0, description="Seconds that fewer replicas must be wanted before one is drained."
    )
    cpus: PositiveFloat = Field(
        1, description="Cores that Ray reserves for a replica; its engines' threads are `cpu_threads`."
    )
    gpus: float = Field(0, ge=0, description="GPUs that Ray reserves for a replica and shows to its engines.")
    per_node: int = Field(0, ge=0, le=100, description="Most replicas on one node; 0: as many as fit.")

    @model_validator(mode="after")
    def _most_is_not_below_fewest(self) -> Arguments:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas: must be at least `replicas`, which is {self.replicas}")
        return self
