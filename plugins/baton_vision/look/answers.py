"""What the frozen text model answers when it is shown image tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from baton_vision.look.chats import IGNORED, Chats, Speller
from baton_vision.look.design import IMAGE_TOKENS
from baton_vision.look.questions import Question

AT_ONCE: Final = 16  # chats


class Listener:
    """The frozen text model, hearing image tokens.

    Args:
        model: HuggingFace's.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def scores(self, chats: Chats, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (answer tokens, vocabulary) with their labels and weights.

        Args:
            chats: questions and answers.
            tokens: of each chat's picture, (batch, image tokens, text width).
        """
        embedded = self.model.get_input_embeddings()(chats.ids)
        rows = torch.arange(len(chats.ids))[:, None]
        columns = torch.tensor(chats.places)[:, None] + torch.arange(IMAGE_TOKENS)
        embedded = embedded.index_put((rows, columns), tokens.to(embedded.dtype))
        hidden = self.model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        wanted = chats.labels[:, 1:] != IGNORED
        logits = self.model.lm_head(hidden[:, :-1][wanted]).float()
        return logits, chats.labels[:, 1:][wanted], chats.weights[:, 1:][wanted]

    def loss(self, chats: Chats, tokens: Tensor) -> Tensor:
        """Weighted cross-entropy of the answers."""
        logits, labels, weights = self.scores(chats, tokens)
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        return (each * weights).sum() / weights.sum()


def share_right(
    listener: Listener, speller: Speller, tokens: Tensor, asked: Sequence[Sequence[Question]]
) -> dict[str, float]:
    """Share of right answers, by kind of question: right is what greedy decoding gives whole.

    Args:
        listener: the text model.
        speller: of the chats.
        tokens: of each picture, (pictures, image tokens, text width).
        asked: questions about each of as many pictures.
    """
    rows = [(n, question) for n, questions in enumerate(asked) for question in questions]
    right: dict[str, list[bool]] = {}
    for start in range(0, len(rows), AT_ONCE):
        part = rows[start : start + AT_ONCE]
        chats = speller.chats([[question] for _, question in part], picture_last=[False] * len(part))
        with torch.inference_mode():
            logits, labels, _ = listener.scores(chats, tokens[[n for n, _ in part]])
        hits = (logits.argmax(-1) == labels).split((chats.labels != IGNORED).sum(1).tolist())
        for (_, question), hit in zip(part, hits, strict=True):
            right.setdefault(question.kind, []).append(bool(hit.all()))
    return {kind: round(float(np.mean(hits)), 3) for kind, hits in sorted(right.items())}
