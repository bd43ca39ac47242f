"""Register the models with latent steps in vLLM's model registry; no other module touches it.

Environment variables of AVP have no effect here: each that is set is warned of, with its replacement.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from vllm import ModelRegistry

from baton_latent.contract import LATENT_ARCHITECTURES

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


def register_models() -> None:
    """Register the models; a second call changes nothing. vLLM uses one only if a configuration names it."""
    fresh = [name for name in LATENT_ARCHITECTURES.values() if name not in ModelRegistry.models]
    for name in fresh:
        ModelRegistry.register_model(name, f"baton_latent.models:{name}")
    if fresh:
        logger.info("baton_latent registered: %s", ", ".join(fresh))
        warn_of_avp(os.environ)
