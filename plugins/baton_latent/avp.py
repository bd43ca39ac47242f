"""What who comes from AVP has in the environment, and what there is instead."""

from __future__ import annotations

import logging
from collections.abc import Mapping

VARIABLES: Mapping[str, str] = {
    "AVP_KV_STORE_DIR": "name the folder as `store` of the connector, or as `handoffs.store`",
    "AVP_LATENT_STEPS": "steps are asked for by each request, and by default there are none",
    "AVP_OVERRIDE_QWEN2": "an engine thinks because `latent = true` or its `hf_overrides` say so",
    "AVP_SOURCE_MODEL": "handing over from another model is not supported yet",
    "AVP_TARGET_MODEL": "handing over to another model is not supported yet",
}

logger = logging.getLogger("vllm.baton_latent")


def warn_of_avp(environment: Mapping[str, str]) -> None:
    """Say of each of AVP's variables that is set that it changes nothing here, and what would."""
    for name, instead in VARIABLES.items():
        if environment.get(name):
            logger.warning("baton_latent: %s is AVP's and changes nothing here: %s", name, instead)
