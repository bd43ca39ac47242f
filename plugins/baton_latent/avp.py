"""Warn about environment variables of AVP, which have no effect here, and name their replacements."""

from __future__ import annotations

import logging
from collections.abc import Mapping

VARIABLES: Mapping[str, str] = {
    "AVP_KV_STORE_DIR": "set the connector's `store`, or `handoffs.store` behind the gateway",
    "AVP_LATENT_STEPS": "each request asks for its steps; the default is 0",
    "AVP_OVERRIDE_QWEN2": "set `latent = true` for the engine, or its `hf_overrides`",
    "AVP_SOURCE_MODEL": "set `avp_source_model` in the connector's settings, behind the gateway",
    "AVP_TARGET_MODEL": "set `avp_target_model` in the connector's settings, behind the gateway",
}

logger = logging.getLogger("vllm.baton_latent")


def warn_of_avp(environment: Mapping[str, str]) -> None:
    """Log a warning for each AVP variable that is set, with what to set instead."""
    for name, instead in VARIABLES.items():
        if environment.get(name):
            logger.warning(
                "baton_latent: %s is a variable of AVP and changes nothing here: %s", name, instead
            )
