"""Say which log probabilities an engine can give for an audit, and how exact they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

AUDITED_TOKENS = 5
"""Tokens whose log probabilities an audited request notes."""
FLOAT32_ROUNDING_NATS = 0.001
HALF_ROUNDING_NATS = 0.25
"""In bfloat16 and float16 a sum in another order shows; docs/results/handoff-exactness.md has figures."""


def audited_tokens(client: AsyncLLM) -> int:
    """Return how many tokens' raw log probabilities an engine may be asked for, at most `AUDITED_TOKENS`.

    0: its log probabilities depend on each request's temperature and penalties, or it gives none.
    """
    model = client.model_config
    if model.logprobs_mode != "raw_logprobs":
        return 0
    return AUDITED_TOKENS if model.max_logprobs < 0 else min(AUDITED_TOKENS, model.max_logprobs)


def rounding_nats(client: AsyncLLM) -> float:
    """Return by how many nats log probabilities of two computations of one prompt may differ by rounding."""
    return FLOAT32_ROUNDING_NATS if client.model_config.dtype is torch.float32 else HALF_ROUNDING_NATS
