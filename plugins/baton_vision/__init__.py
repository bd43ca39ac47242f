"""Image-to-text models for vLLM outside its tree: LLaVA-style models and Fuyu.

`register` is vLLM's entry point; nothing heavy is imported until vLLM calls it.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register the models (entry point `vllm.general_plugins`); may be called again."""
    from baton_vision.registration import register_models

    register_models()
