"""Latent thinking in vLLM: a prompt says how often the model thinks before it goes on, silently.

`register` is an entry point; nothing heavy is imported until vLLM calls it.
"""

from __future__ import annotations

from baton_latent.contract import choose_placeholder, latent_overrides, prepare_latent_prompt

__all__ = ["choose_placeholder", "latent_overrides", "prepare_latent_prompt", "register"]


def register() -> None:
    """`vllm.general_plugins`: make the latent models known. May be called again."""
    from baton_latent.registration import register_models

    register_models()
