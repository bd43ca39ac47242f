"""What vLLM has to know before it can load a vision model. The one place that touches its registry."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from vllm import ModelRegistry

from baton_vision.contract import ARCHITECTURES

logger = logging.getLogger("vllm.baton_vision")

CLASSES = {
    "BatonLlavaForConditionalGeneration": "baton_vision.llava_model:BatonLlavaForConditionalGeneration",
    "BatonFuyuForCausalLM": "baton_vision.fuyu_model:BatonFuyuForCausalLM",
}
"""Where each class is, as vLLM's registry takes it: imported when a configuration names it."""


def register_models() -> None:
    """Register the models; a second call changes nothing. None is used unless it is named.

    An official name leads to ours only where vLLM has no class of its own that can run here: its LLaVA
    imports torchvision, its Fuyu is gone.
    """
    names = {ours: ours for ours in ARCHITECTURES.values()}
    names |= {official: ours for official, ours in ARCHITECTURES.items() if not _vllm_serves(official)}
    fresh = [name for name in names if not _is_ours(name)]
    for name in fresh:
        ModelRegistry.register_model(name, CLASSES[names[name]])
    if fresh:
        logger.info("baton_vision registered: %s", ", ".join(fresh))


def _vllm_serves(architecture: str) -> bool:
    # Asked without an import: torchvision alone takes a second, and vLLM's module many.
    return architecture in ModelRegistry.models and find_spec("torchvision") is not None


def _is_ours(name: str) -> bool:
    module: str = getattr(ModelRegistry.models.get(name), "module_name", "")
    return module.startswith("baton_vision.")
