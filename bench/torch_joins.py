"""Joins of contexts in plain torch, for `bench/joins.py`: exact, moved, and moved without rotating the keys.

What is measured with it is what the engine does: tests/connector/test_moves.py holds the engine against a
page of torch like this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


@dataclass(frozen=True)
class Way:
    """How parts are put together.

    Attributes:
        name: its name in the tables.
        moves: whether KV is used at all.
        rotates: whether keys are rotated to their new positions.
        head: tokens of each part that are computed.
        tail: tokens at the end of each part that are computed, as those that an agent sampled last.
    """

    name: str
    moves: bool = True
    rotates: bool = True
    head: int = 0
    tail: int = 1


class Model:
    """SmolLM2, or another Llama, in float32."""

    def __init__(self, folder: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        found: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return found

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(tokens))

    @torch.inference_mode()
    def alone(self, context: Sequence[int]) -> DynamicCache:
        """Return the KV of a context that is computed alone."""
        cache = DynamicCache()
        self._model(torch.tensor([list(context)]), past_key_values=cache)
        return cache

    @torch.inference_mode()
    def joined(
        self, shared: Sequence[int], parts: Sequence[Sequence[int]], kept: Sequence[DynamicCache], way: Way
    ) -> DynamicCache:
        """Return the KV of parts behind a shared beginning, one after another.

        Args:
            shared: token ids that all parts were computed behind; may be empty.
            parts: token ids of each part.
            kept: the KV of the shared beginning and each part, from `alone`.
            way: how they are put together.
        """
        whole = [*shared, *(token for part in parts for token in part)]
        if not way.moves:
            return self.alone(whole)
        cache, at = _copy(kept[0]), len(shared) + len(parts[0])
        for part, theirs in zip(parts[1:], kept[1:], strict=True):
            start = len(shared) + way.head
            self._compute(cache, whole, at + way.head)
            self._move(cache, theirs, start, len(part) - way.head - way.tail, way)
            at += len(part)
            self._compute(cache, whole, at)
        return cache

    @torch.inference_mode()
    def continued(self, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
        """Return the log probabilities `[tokens, vocabulary]` after each token that follows a context.

        The cache is as it was afterwards.
        """
        before = cache.get_seq_length()
        found = self._logits(cache, tokens).log_softmax(-1)
        cache.crop(before)
        return found

    @torch.inference_mode()
    def answer(self, cache: DynamicCache, tokens: Sequence[int], count: int) -> list[int]:
        """Return the likeliest `count` tokens after some that follow a context."""
        before, found, fed = cache.get_seq_length(), list[int](), list(tokens)
        for _ in range(count):
            fed = [int(self._logits(cache, fed)[-1].argmax())]
            found += fed
        cache.crop(before)
        return found

    def _compute(self, cache: DynamicCache, tokens: Sequence[int], stop: int) -> None:
        begin = cache.get_seq_length()
        if stop > begin:
            self._logits(cache, tokens[begin:stop])

    def _logits(self, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
        """Compute tokens that follow a context; returns their logits `[tokens, vocabulary]`."""
        before = cache.get_seq_length()
        positions = torch.arange(before, before + len(tokens))[None]
        given = torch.tensor([list(tokens)])
        found: torch.Tensor = self._model(given, position_ids=positions, past_key_values=cache).logits[0]
        return found

    def _move(self, cache: DynamicCache, theirs: DynamicCache, start: int, count: int, way: Way) -> None:
        distance = torch.tensor([[cache.get_seq_length() - start]])
        for number, layer in enumerate(theirs.layers):
            keys, values = (kept[:, :, start : start + count] for kept in (layer.keys, layer.values))
            if way.rotates:
                cos, sin = self._model.model.rotary_emb(keys, distance)
                half = keys.shape[-1] // 2
                keys = keys * cos + torch.cat([-keys[..., half:], keys[..., :half]], dim=-1) * sin
            cache.update(keys, values, number)


def _copy(cache: DynamicCache) -> DynamicCache:
    found = DynamicCache()
    for number, layer in enumerate(cache.layers):
        found.update(layer.keys.clone(), layer.values.clone(), number)
    return found
