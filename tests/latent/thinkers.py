"""Plain vLLM engines that think, and what is asked of an answer: to be HuggingFace's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from latent.reference import Reference, Thought
from offline_engines import Answer, OfflineEngine

SAID = 16
"""Tokens generated after each prompt."""


@dataclass
class Thinker:
    """An engine, and the reference of the same weights.

    Attributes:
        placeholder: the token id that stands for a step.
    """

    engine: OfflineEngine
    reference: Reference
    placeholder: int
    folder: Path

    def steps(self, count: int) -> list[int]:
        return [self.placeholder] * count

    def require(self, answer: Answer, prompt: list[int], *, written: bool = True) -> Thought:
        """Hold an answer, and if the engine computed all of it, what it wrote, against the reference.

        Returns:
            What the reference thought.
        """
        thought = self.reference.think(prompt, len(answer["tokens"]))
        assert answer["tokens"] == thought.tokens
        if written:
            self.require_written(answer, thought, len(prompt) + len(answer["tokens"]) - 1)
        return thought

    def require_written(self, answer: Answer, thought: Thought, count: int) -> None:
        """The first `count` positions' keys, values and hidden states are the reference's."""
        found = self.dump(answer)
        for kind, layers in (("keys", thought.keys), ("values", thought.values)):
            wanted = torch.stack(layers).transpose(1, 2)[:, :count]
            apart = (found[kind][:, :count] - wanted).norm(dim=(2, 3)) / wanted.norm(dim=(2, 3))
            assert float(apart.max()) < 1e-3, (
                f"{kind}: {float(apart.max())} at {int(apart.max(0)[0].argmax())}"
            )
        alike = torch.nn.functional.cosine_similarity(found["seeds"][:count], thought.hidden[:count])
        assert float(alike.min()) > 0.9999, f"hidden: {float(alike.min())} at {int(alike.argmin())}"
        print(f"{count} positions: KV within {float(apart.max()):.1e}, cosine {float(alike.min()):.7f}")

    def dump(self, answer: Answer) -> dict[str, torch.Tensor]:
        """What the engine wrote for a request, by position."""
        path = self.folder / "dump.pt"
        self.engine.call("dump", answer["id"], str(path))
        written: dict[str, torch.Tensor] = torch.load(path)
        return written
