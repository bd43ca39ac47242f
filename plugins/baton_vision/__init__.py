"""Image-to-text models for vLLM, out of its tree: LLaVA-style and Fuyu.

`register` is an entry point; nothing heavy is imported until vLLM calls it.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """`vllm.general_plugins`: make the models known. May be called again."""
    from baton_vision.registration import register_models

    register_models()
