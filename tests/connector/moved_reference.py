"""A page of torch that joins contexts by moving KV, for comparison: transformers' model, exact angles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


@dataclass(frozen=True)
class Piece:
    """Tokens of a context that are put elsewhere.

    Attributes:
        context: token ids of the context, which is computed alone.
        start: index of the first token in it.
        tokens: number of tokens.
        to: index of the first token in the joined context.
    """

    context: Sequence[int]
    start: int
    tokens: int
    to: int


class Reference:
    """A model in float32."""

    def __init__(self, folder: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def log_probs(self, prompt: Sequence[int], answer: Sequence[int], pieces: Sequence[Piece]) -> list[float]:
        """Return the log probability of each token of an answer behind a joined context.

        Args:
            prompt: token ids of the whole prompt.
            answer: token ids of the answer.
            pieces: what is moved, in order; all other tokens of the prompt are computed, one after the other
                gap, with all before them in sight.
        """
        cache = DynamicCache()
        for piece in pieces:
            self._compute(cache, prompt, piece.to)
            self._move(cache, piece)
        whole = [*prompt, *answer]
        logits = self._compute(cache, whole, len(whole))[-len(answer) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).flatten().tolist()  # type: ignore[no-any-return]  # torch's

    def _compute(self, cache: DynamicCache, tokens: Sequence[int], stop: int) -> torch.Tensor:
        begin = cache.get_seq_length()
        if stop == begin:
            return torch.empty(0)
        ids, positions = torch.tensor([tokens[begin:stop]]), torch.arange(begin, stop)[None]
        return self._model(ids, position_ids=positions, past_key_values=cache).logits[0]  # type: ignore[no-any-return]  # transformers'

    def _move(self, cache: DynamicCache, piece: Piece) -> None:
        alone = DynamicCache()
        self._model(torch.tensor([list(piece.context)]), past_key_values=alone)
        inside = slice(piece.start, piece.start + piece.tokens)
        assert cache.get_seq_length() == piece.to
        for number, layer in enumerate(alone.layers):
            keys = self._turned(layer.keys[:, :, inside], piece.to - piece.start)
            cache.update(keys, layer.values[:, :, inside], number)

    def _turned(self, keys: torch.Tensor, distance: int) -> torch.Tensor:
        """Rotate keys by a distance in positions; rotations add up."""
        cos, sin = self._model.model.rotary_emb(keys, torch.tensor([[distance]]))
        half = keys.shape[-1] // 2
        turned = torch.cat([-keys[..., half:], keys[..., :half]], dim=-1)
        return keys * cos + turned * sin
