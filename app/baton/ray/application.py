"""Build the Ray Serve application: the replicas of the gateway, and the page of their metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from baton.admission.api_keys import keyring_for
from baton.errors import SettingsError
from baton.ray.replica import GatewayReplica, MetricsPage, drain_s, settings_of_node


class Arguments(BaseModel):
    """The number of replicas, and what each is given. Everything else is in the gateway's own settings."""

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


GATEWAY = "gateway"
METRICS = "metrics"
HEAD_NODE = "node:__internal_head__"
"""Ray's resource that only the head node has: the page's address stays the same."""
STOPPED_WITHIN_S = 15
"""Seconds that a drained replica gets, after its last request, to stop its engines."""
QUIET = {"enable_access_log": False}
"""The gateway writes the access log itself."""


def app(given: dict[str, Any]) -> serve.Application:
    """Return the application that `serve run baton.ray:app` runs.

    Args:
        given: the `KEY=VALUE` after it, or `args` of a file of Ray Serve's.

    Raises:
        SettingsError: an argument or a setting is wrong, or there are no API keys.
    """
    return application(GatewayReplica, arguments_of(given))


def arguments_of(given: dict[str, Any]) -> Arguments:
    """Check the arguments.

    Raises:
        SettingsError: one is wrong, or unknown.
    """
    try:
        return Arguments.model_validate(given)
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise SettingsError("\n".join(line.removeprefix(": ") for line in lines)) from None


def application(replica: type[GatewayReplica], arguments: Arguments) -> serve.Application:
    """Return an application of these replicas.

    Raises:
        SettingsError: the settings are wrong, or there are no API keys. Each replica would say so too, again
            and again, as Ray Serve retries.
    """
    keyring_for(settings_of_node(arguments.config))
    page = serve.deployment(MetricsPage).options(
        name=METRICS, ray_actor_options={"num_cpus": 0, "resources": {HEAD_NODE: 0.001}}, logging_config=QUIET
    )
    gateways = serve.deployment(serve.ingress()(replica)).options(**_options(arguments))
    return gateways.bind(arguments.config, page.bind(arguments.config))


def _options(arguments: Arguments) -> dict[str, Any]:
    settings = settings_of_node(arguments.config)
    options: dict[str, Any] = {
        "name": GATEWAY,
        # The gateway's own queues refuse what is too much, by tenant; Ray Serve's limit is not to be met.
        "max_ongoing_requests": settings.edge.connections,
        "ray_actor_options": {"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
        "graceful_shutdown_timeout_s": drain_s(settings) + STOPPED_WITHIN_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "logging_config": QUIET,
    }
    if arguments.per_node:
        options["max_replicas_per_node"] = arguments.per_node
    if arguments.max_replicas is None:
        options["num_replicas"] = arguments.replicas
    else:
        options["autoscaling_config"] = _autoscaling(arguments)
    return options


def _autoscaling(arguments: Arguments) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=arguments.replicas,
        max_replicas=arguments.max_replicas,
        upscale_delay_s=arguments.upscale_delay_s,
        downscale_delay_s=arguments.downscale_delay_s,
        metrics_interval_s=2,
        look_back_period_s=10,
        policy=AutoscalingPolicy(
            policy_function="baton.ray.autoscaling:QueuePolicy",
            policy_kwargs={"target_load": arguments.target_load},
        ),
    )
