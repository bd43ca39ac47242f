"""Project last hidden states to inputs of the first layer. Imports torch, not vLLM.

Models with an untied head use the least-squares realignment of LatentMAS (arXiv:2511.20639). Models with a
tied head use the expected embedding of their next token, as AVP's model plugin does: `softmax(logits) @
embedding`. Both scale the vector to the mean norm of the embedding's rows.

With tensor parallelism each process holds some rows of embedding and head and all hidden states; sums over
the vocabulary are reduced over the processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROWS_AT_ONCE = 8192
RIDGE = 1e-5
"""Ridge regularisation of the least-squares problem, as in LatentMAS."""
SHORTEST = 1e-6


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of the vocabulary that one process of a tensor-parallel model holds; by default all.

    Attributes:
        first: token id of the first row.
        all_reduce: returns the sum of a tensor over all processes.
    """

    first: int = 0
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor


WHOLE = VocabularyShard()


class TiedProjection:
    """The projection for a tied head: the expected embedding of the next token.

    Args:
        embedding: this process's rows of the embedding, `[rows, hidden]`.
        scale: factor by which the model multiplies its embedding.
        logits: maps hidden states `[tokens, hidden]` to logits `[tokens, vocabulary]` over the whole
            vocabulary.
        shard: which rows of the vocabulary this process holds.
    """

    def __init__(
        self,
        embedding: torch.Tensor,
        scale: float,
        logits: Callable[[torch.Tensor], torch.Tensor],
        shard: VocabularyShard = WHOLE,
    ) -> None:
        self._embedding = embedding
        self._logits = logits
        self._shard = shard
        self.length = mean_length(embedding, shard) * scale

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project hidden states `[steps, hidden]` to inputs `[steps, hidden]` of the same dtype."""
        chances = self._logits(hidden).float().softmax(dim=-1).to(self._embedding.dtype)
        ours = chances.narrow(-1, self._shard.first, len(self._embedding))
        return to_length(self._shard.all_reduce(ours @ self._embedding), self.length)


class UntiedProjection:
    """The projection for an untied head: the least-squares solution W of `head @ W = embedding`.

    Args:
        embedding: this process's rows of the embedding, `[rows, hidden]`.
        head: the same rows of the head, `[rows, hidden]`.
        scale: factor by which the model multiplies its embedding.
        shard: which rows of the vocabulary this process holds.
    """

    def __init__(
        self, embedding: torch.Tensor, head: torch.Tensor, scale: float, shard: VocabularyShard = WHOLE
    ) -> None:
        self._map = realignment(embedding, head, shard)
        self.length = mean_length(embedding, shard) * scale

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project hidden states `[steps, hidden]` to inputs `[steps, hidden]` of the same dtype."""
        return to_length(hidden.float() @ self._map, self.length).to(hidden.dtype)


def realignment(embedding: torch.Tensor, head: torch.Tensor, shard: VocabularyShard = WHOLE) -> torch.Tensor:
    """Return `(Hᵀ H + ridge I)⁻¹ Hᵀ E`, float32 `[hidden, hidden]`, of head H and embedding E.

    The products are accumulated over `ROWS_AT_ONCE` rows to bound memory.
    """
    width = head.shape[1]
    gram = torch.zeros(width, width, dtype=torch.float32, device=head.device)
    right = torch.zeros_like(gram)
    for rows, wanted in zip(head.split(ROWS_AT_ONCE), embedding.split(ROWS_AT_ONCE), strict=True):
        gram += rows.float().T @ rows.float()
        right += rows.float().T @ wanted.float()
    gram, right = shard.all_reduce(gram), shard.all_reduce(right)
    gram.diagonal().add_(RIDGE)
    return torch.linalg.solve(gram, right)


def mean_length(embedding: torch.Tensor, shard: VocabularyShard = WHOLE) -> float:
    """Return the mean Euclidean norm of the rows of `[rows, hidden]`, over all processes."""
    total = sum(float(rows.float().norm(dim=1).sum()) for rows in embedding.split(ROWS_AT_ONCE))
    counted = torch.tensor([total, float(len(embedding))], device=embedding.device)
    total, count = shard.all_reduce(counted)
    return float(total / count)


def to_length(vectors: torch.Tensor, length: float) -> torch.Tensor:
    """Scale every row of `[rows, hidden]` to the Euclidean norm `length`."""
    found = vectors.float().norm(dim=-1, keepdim=True).clamp_min(SHORTEST)
    return (vectors.float() * (length / found)).to(vectors.dtype)
