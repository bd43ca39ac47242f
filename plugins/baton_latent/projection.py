"""From what a model's last layer says to what its first layer takes: torch alone, no vLLM.

Untied models are realigned as in LatentMAS (arXiv 2511.20639); tied ones take the embedding they expect
next, as AVP's model plugin does. Either way the vector has the mean length of the embedding's rows.

With tensor parallelism each process holds some rows of the embedding and of the head, and every hidden state:
sums over the vocabulary are added up over the processes, and everything else is the same in all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROWS_AT_ONCE = 8192
RIDGE = 1e-5
"""Added to the diagonal before it is solved for, as LatentMAS does."""
SHORTEST = 1e-6


@dataclass(frozen=True)
class Share:
    """What one process of a tensor-parallel model holds of the vocabulary; by default, all of it.

    Attributes:
        first: the token id of its first row.
        add_up: the sum of a tensor over all processes.
    """

    first: int = 0
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor


WHOLE = Share()


class TiedProjection:
    """Of a model whose embedding is also its head: the embedding expected of its own next token.

    Args:
        embedding: `[vocabulary, hidden]`, this process's rows.
        scale: by which the model multiplies its embedding.
        logits: from hidden states `[tokens, hidden]` to `[tokens, vocabulary]`, whole in every process.
        share: which rows these are.
    """

    def __init__(
        self,
        embedding: torch.Tensor,
        scale: float,
        logits: Callable[[torch.Tensor], torch.Tensor],
        share: Share = WHOLE,
    ) -> None:
        self._embedding = embedding
        self._logits = logits
        self._share = share
        self._length = mean_length(embedding, share) * scale

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[steps, hidden]` to inputs `[steps, hidden]` of the same dtype."""
        chances = self._logits(hidden).float().softmax(dim=-1).to(self._embedding.dtype)
        ours = chances.narrow(-1, self._share.first, len(self._embedding))
        return to_length(self._share.add_up(ours @ self._embedding), self._length)


class UntiedProjection:
    """Of a model with a head of its own: the linear map that takes the head's rows to the embedding's.

    It is the least-squares solution W of `head @ W = embedding`.

    Args:
        embedding: `[vocabulary, hidden]`, this process's rows.
        head: `[vocabulary, hidden]`, the same rows of it.
        scale: by which the model multiplies its embedding.
        share: which rows these are.
    """

    def __init__(
        self, embedding: torch.Tensor, head: torch.Tensor, scale: float, share: Share = WHOLE
    ) -> None:
        self._map = realignment(embedding, head, share)
        self._length = mean_length(embedding, share) * scale

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[steps, hidden]` to inputs `[steps, hidden]` of the same dtype."""
        return to_length(hidden.float() @ self._map, self._length).to(hidden.dtype)


def realignment(embedding: torch.Tensor, head: torch.Tensor, share: Share = WHOLE) -> torch.Tensor:
    """`(Hᵀ H + ridge)⁻¹ Hᵀ E`, `[hidden, hidden]` in fp32; summed a few rows at a time."""
    width = head.shape[1]
    gram = torch.zeros(width, width, dtype=torch.float32, device=head.device)
    right = torch.zeros_like(gram)
    for rows, wanted in zip(head.split(ROWS_AT_ONCE), embedding.split(ROWS_AT_ONCE), strict=True):
        gram += rows.float().T @ rows.float()
        right += rows.float().T @ wanted.float()
    gram, right = share.add_up(gram), share.add_up(right)
    gram.diagonal().add_(RIDGE)
    return torch.linalg.solve(gram, right)


def mean_length(embedding: torch.Tensor, share: Share = WHOLE) -> float:
    """The mean Euclidean length of the rows."""
    total = sum(float(rows.float().norm(dim=1).sum()) for rows in embedding.split(ROWS_AT_ONCE))
    counted = torch.tensor([total, float(len(embedding))], device=embedding.device)
    total, count = share.add_up(counted)
    return float(total / count)


def to_length(vectors: torch.Tensor, length: float) -> torch.Tensor:
    """Every row as long as `length`."""
    found = vectors.float().norm(dim=-1, keepdim=True).clamp_min(SHORTEST)
    return (vectors.float() * (length / found)).to(vectors.dtype)
