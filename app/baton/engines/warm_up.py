"""The requests that warm an engine up before its first client: one for each kind of operation."""

from __future__ import annotations

from collections.abc import Container

from baton.engines.port import Json, Operation

WARM_UPS: tuple[tuple[Operation, Json], ...] = (
    (Operation.COMPLETIONS, {"prompt": [0], "max_tokens": 2, "logprobs": 1}),
    (Operation.EMBEDDINGS, {"input": [0]}),
    (Operation.CLASSIFY, {"input": [0]}),
)
PREFILL = 128
"""Tokens of one more request where handoffs are on, which measures how fast the engine prefills."""


def prefill(most: int, vocabulary: int, reserved: Container[int | None]) -> list[int]:
    """Return a prompt of `PREFILL` ordinary token ids.

    Args:
        most: maximum length of the prompt in tokens.
        vocabulary: number of token ids the model has; ids repeat where there are few.
        reserved: token ids that a prompt must not hold.
    """
    ids = (1 + index % (vocabulary - 1) for index in range(min(PREFILL, most)))
    return [token for token in ids if token not in reserved]
