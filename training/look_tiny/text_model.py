"""Run the frozen text model on chats with image tokens: logits, loss, accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from training.look_tiny.architecture import IMAGE_TOKENS
from training.look_tiny.chats import IGNORED, Chats, ChatTokenizer
from training.look_tiny.questions import Question

AT_ONCE: Final = 16  # chats


class TextModel:
    """The frozen text model, fed with image tokens in place of placeholders.

    Args:
        model: transformers' causal language model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def scores(self, chats: Chats, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, labels and weights of the answers' tokens.

        Logits are float32 (answer tokens, vocabulary), labels and weights (answer tokens,).

        Args:
            chats: questions and answers.
            tokens: the image tokens of each chat's picture, (batch, image tokens, text width).
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
        """Return the weighted cross-entropy of the answers."""
        logits, labels, weights = self.scores(chats, tokens)
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        return (each * weights).sum() / weights.sum()


def measure_accuracy(
    text_model: TextModel, tokenizer: ChatTokenizer, tokens: Tensor, asked: Sequence[Sequence[Question]]
) -> dict[str, float]:
    """Return the share of answers that greedy decoding gives exactly, by kind of question.

    Args:
        text_model: the text model.
        tokenizer: encodes the chats.
        tokens: the image tokens of each picture, (pictures, image tokens, text width).
        asked: the questions about each picture.
    """
    rows = [(n, question) for n, questions in enumerate(asked) for question in questions]
    right: dict[str, list[bool]] = {}
    for start in range(0, len(rows), AT_ONCE):
        part = rows[start : start + AT_ONCE]
        chats = tokenizer.chats([[question] for _, question in part], picture_last=[False] * len(part))
        with torch.inference_mode():
            logits, labels, _ = text_model.scores(chats, tokens[[n for n, _ in part]])
        hits = (logits.argmax(-1) == labels).split((chats.labels != IGNORED).sum(1).tolist())
        for (_, question), hit in zip(part, hits, strict=True):
            right.setdefault(question.kind, []).append(bool(hit.all()))
    return {kind: round(float(np.mean(hits)), 3) for kind, hits in sorted(right.items())}
