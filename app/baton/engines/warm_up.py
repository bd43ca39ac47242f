"""What an engine is asked before its first client: once each thing it can do."""

from __future__ import annotations

from collections.abc import Container

from baton.engines.port import Json, Operation

WARM_UPS: tuple[tuple[Operation, Json], ...] = (
    (Operation.COMPLETIONS, {"prompt": [0], "max_tokens": 2, "logprobs": 1}),
    (Operation.EMBEDDINGS, {"input": [0]}),
    (Operation.CLASSIFY, {"input": [0]}),
)
PREFILL = 128
"""Tokens computed once more where handoffs are on, to know how fast this engine does it."""


def prefill(most: int, vocabulary: int, reserved: Container[int | None]) -> list[int]:
    """A prompt of every-day token ids.

    Args:
        most: tokens that it may have.
        vocabulary: how many token ids there are; of a small one they come again.
        reserved: those that a prompt may not have.
    """
    ids = (1 + index % (vocabulary - 1) for index in range(min(PREFILL, most)))
    return [token for token in ids if token not in reserved]
