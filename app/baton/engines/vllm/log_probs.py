"""Say which log probabilities an engine can give for an audit, and how exact they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.v1.engine.async_llm import AsyncLLM

AUDITED_TOKENS = 5
"""Tokens whose log probabilities an audited request notes."""
FLOAT32_ROUNDING_NATS = 0.001
HALF_ROUNDING_NATS = 1.0
"""In bfloat16 and float16 a sum in another order shows: two computations of one prompt were seen to differ by
up to 0.5 nats."""


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


def likeliest(place: Mapping[int, Logprob], count: int) -> dict[int, float]:
    """Return the log probabilities of the `count` likeliest tokens at one place of an answer, by token id.

    vLLM adds the token that was sampled, which is left out if it is less likely. Empty: an entry is minus
    infinity, as where vLLM pads the rows of a batch.
    """
    found = {
        token: each.logprob for token, each in place.items() if each.rank is not None and each.rank <= count
    }
    return {} if any(math.isinf(value) for value in found.values()) else found
