"""What vLLM has to know before it can load a latent model. The one place that touches its registry."""

from __future__ import annotations

import logging
import os

from vllm import ModelRegistry

from baton_latent.avp import warn_of_avp
from baton_latent.contract import LATENT_ARCHITECTURES

logger = logging.getLogger("vllm.baton_latent")


def register_models() -> None:
    """Register the latent models; a second call changes nothing. None is used unless it is named."""
    fresh = [name for name in LATENT_ARCHITECTURES.values() if name not in ModelRegistry.models]
    for name in fresh:
        ModelRegistry.register_model(name, f"baton_latent.models:{name}")
    if fresh:
        logger.info("baton_latent registered: %s", ", ".join(fresh))
        warn_of_avp(os.environ)
