"""Latent thinking with HuggingFace's own models, one step after the other: what vLLM is held against.

Nothing here is shared with the plugin: the two projections are written out once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@dataclass
class Thought:
    """What came of a context.

    Attributes:
        keys, values: a layer's each, `[KV heads, tokens, head size]`.
        hidden: `[tokens, hidden]`, of the last layer, normalised as the head takes it.
        tokens: what follows, greedily.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    hidden: torch.Tensor
    tokens: list[int]


class Reference:
    """A model in fp32 that thinks at every placeholder."""

    def __init__(self, folder: str, placeholder: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.placeholder = placeholder
        embedding = self._model.get_input_embeddings().weight.detach()
        self._scale = float(getattr(self._model.get_input_embeddings(), "scalar_embed_scale", 1.0))
        self._embedding = embedding * self._scale
        self._head = self._model.get_output_embeddings().weight.detach()
        self._length = self._embedding.norm(dim=1).mean()
        self._map = None
        if not self._model.config.tie_word_embeddings:
            gram = self._head.T @ self._head + 1e-5 * torch.eye(self._head.shape[1])
            self._map = torch.linalg.solve(gram, self._head.T @ self._embedding)

    @torch.inference_mode()
    def think(self, context: list[int], generate: int) -> Thought:
        """Compute a context, and so many tokens more."""
        past: Any = None
        hidden: list[torch.Tensor] = []
        tokens: list[int] = []
        for thinks, run in groupby(context, lambda token: token == self.placeholder):
            said = list(run)
            if not thinks:
                past, states = self._step(past, input_ids=torch.tensor([said]))
                hidden.extend(states)
                continue
            for _ in said:
                past, states = self._step(past, inputs_embeds=self._project(hidden[-1])[None, None])
                hidden.extend(states)
        for _ in range(generate):
            logits = hidden[-1] @ self._head.T
            logits[self.placeholder] = -torch.inf
            tokens.append(int(logits.argmax()))
            past, states = self._step(past, input_ids=torch.tensor([[tokens[-1]]]))
            hidden.extend(states)
        layers = past.layers
        return Thought(
            [layer.keys[0] for layer in layers],
            [layer.values[0] for layer in layers],
            torch.stack(hidden),
            tokens,
        )

    def _step(self, past: Any, **inputs: torch.Tensor) -> tuple[Any, torch.Tensor]:
        found = self._model(**inputs, past_key_values=past, use_cache=True, output_hidden_states=True)
        return found.past_key_values, found.hidden_states[-1][0]

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._map is None:
            vector = (hidden @ self._head.T).softmax(-1) @ self._embedding
        else:
            vector = hidden @ self._map
        return vector * self._length / vector.norm()
