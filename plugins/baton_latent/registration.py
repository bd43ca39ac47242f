"""Register the models with latent steps in vLLM's model registry; no other module touches it."""

from __future__ import annotations

import logging
import os

from vllm import ModelRegistry

from baton_latent.avp import warn_of_avp
from baton_latent.contract import LATENT_ARCHITECTURES

logger = logging.getLogger("vllm.baton_latent")


def register_models() -> None:
    """Register the models; a second call changes nothing. vLLM uses one only if a configuration names it."""
    fresh = [name for name in LATENT_ARCHITECTURES.values() if name not in ModelRegistry.models]
    for name in fresh:
        ModelRegistry.register_model(name, f"baton_latent.models:{name}")
    if fresh:
        logger.info("baton_latent registered: %s", ", ".join(fresh))
        warn_of_avp(os.environ)
