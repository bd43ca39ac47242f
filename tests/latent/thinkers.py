"""Plain vLLM engines that think, and what is asked of an answer: to be HuggingFace's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from latent.reference import Reference, Thought
from support.offline_engines import Answer, OfflineEngine

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

    def require(self, answer: Answer, prompt: list[int], *, written: bool = True) -> None:
        """Hold an answer and the hidden states behind it against the reference's.

        With `written` the keys and values too, where the engine computed all of them.
        """
        thought = self.reference.think(prompt, len(answer["tokens"]))
        assert answer["tokens"] == thought.tokens
        count, found = len(prompt) + len(answer["tokens"]) - 1, self.dump(answer)
        self.require_seeds(found, thought, count)
        if written:
            self.require_written(found, thought, count)

    def require_written(self, found: dict[str, torch.Tensor], thought: Thought, count: int) -> None:
        """Check that the first `count` positions' keys and values are the reference's."""
        for kind, layers in (("keys", thought.keys), ("values", thought.values)):
            wanted = torch.stack(layers).transpose(1, 2)[:, :count]
            apart = (found[kind][:, :count] - wanted).norm(dim=(2, 3)) / wanted.norm(dim=(2, 3))
            assert float(apart.max()) < 1e-3, (
                f"{kind}: {float(apart.max())} at {int(apart.max(0)[0].argmax())}"
            )
            print(f"{count} positions: {kind} within {float(apart.max()):.1e}")

    def require_seeds(self, found: dict[str, torch.Tensor], thought: Thought, count: int) -> None:
        """Check that the first `count` positions' hidden states are the reference's, whoever computed them."""
        alike = torch.nn.functional.cosine_similarity(found["seeds"][:count], thought.hidden[:count])
        assert float(alike.min()) > 0.9999, f"hidden: {float(alike.min())} at {int(alike.argmin())}"
        print(f"{count} positions: cosine {float(alike.min()):.7f}")

    def dump(self, answer: Answer) -> dict[str, torch.Tensor]:
        """Return what the engine wrote for a request, by position."""
        path = self.folder / "dump.pt"
        self.engine.call("dump", answer["id"], str(path))
        written: dict[str, torch.Tensor] = torch.load(path)
        return written
