"""Latent steps for vLLM: forward passes before the answer whose input is a hidden state instead of a token.

A prompt asks for them with placeholder tokens, see `prepare_latent_prompt`. `register` is vLLM's entry point;
nothing heavy is imported until vLLM calls it.
"""

from __future__ import annotations

from baton_latent.contract import choose_placeholder, latent_overrides, prepare_latent_prompt

__all__ = ["choose_placeholder", "latent_overrides", "prepare_latent_prompt", "register"]


def register() -> None:
    """Register the models with latent steps (entry point `vllm.general_plugins`); may be called again."""
    from baton_latent.registration import register_models

    register_models()
