"""Register the vision models in vLLM's model registry; no other module touches it."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from vllm import ModelRegistry

from baton_vision.contract import ARCHITECTURES

logger = logging.getLogger("vllm.baton_vision")

CLASSES = {
    "BatonLlavaForConditionalGeneration": "baton_vision.llava:BatonLlavaForConditionalGeneration",
    "BatonFuyuForCausalLM": "baton_vision.fuyu:BatonFuyuForCausalLM",
}
"""Import path of each class; vLLM imports it when a configuration names it."""


def register_models() -> None:
    """Register the models; a second call changes nothing. vLLM uses one only if a configuration names it.

    An official name is registered for our class only if vLLM has no class that can run: its LLaVA needs
    torchvision, and it no longer has Fuyu.
    """
    names = {ours: ours for ours in ARCHITECTURES.values()}
    names |= {official: ours for official, ours in ARCHITECTURES.items() if not _vllm_serves(official)}
    fresh = [name for name in names if not _is_ours(name)]
    for name in fresh:
        ModelRegistry.register_model(name, CLASSES[names[name]])
    if fresh:
        logger.info("baton_vision registered: %s", ", ".join(fresh))


def _vllm_serves(architecture: str) -> bool:
    # Without importing: torchvision takes a second, vLLM's module several.
    return architecture in ModelRegistry.models and find_spec("torchvision") is not None


def _is_ours(name: str) -> bool:
    module: str = getattr(ModelRegistry.models.get(name), "module_name", "")
    return module.startswith("baton_vision.")
