"""Build the Ray Serve application: the replicas of the gateway, and the page of their metrics."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from baton.admission.api_keys import keyring_for
from baton.errors import SettingsError
from baton.ray.arguments import Arguments
from baton.ray.metrics import MetricsPage
from baton.ray.replica import GatewayReplica, drain_s, settings_of_node

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
