"""Encode training chats (a picture, questions, answers) as padded token ids with labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.look_tiny.architecture import IMAGE_TOKEN_ID, IMAGE_TOKENS
from training.look_tiny.questions import Question

IGNORED = -100


@dataclass(frozen=True)
class Chats:
    """A batch of chats, padded at the end.

    Attributes:
        ids: token ids, int64 (batch, length).
        labels: int64 (batch, length); `IGNORED` everywhere but at the answers' tokens.
        weights: weight of each label in the loss, float32 (batch, length); tokens of long answers weigh less.
        places: index of each picture's first token, one a chat.
    """

    ids: Tensor
    labels: Tensor
    weights: Tensor
    places: list[int]


class ChatTokenizer:
    """Encodes chats as the chat template would.

    Args:
        folder: folder of the prepared text model.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text; special tokens in it are recognised."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def chats(self, asked: Sequence[Sequence[Question]], *, picture_last: Sequence[bool]) -> Chats:
        """Encode one chat for each list of questions.

        Args:
            asked: the questions of each chat.
            picture_last: whether the picture stands after the first question's text, one a chat.
        """
        rows = [self._chat(each, last) for each, last in zip(asked, picture_last, strict=True)]
        length = max(len(ids) for ids, *_ in rows)
        ids = torch.full((len(rows), length), 2)
        labels = torch.full((len(rows), length), IGNORED)
        weights = torch.zeros(len(rows), length)
        for n, (row, row_labels, row_weights, _) in enumerate(rows):
            ids[n, : len(row)] = torch.tensor(row)
            labels[n, : len(row)] = torch.tensor(row_labels)
            weights[n, : len(row)] = torch.tensor(row_weights)
        return Chats(ids, labels, weights, [place for *_, place in rows])

    def _chat(
        self, asked: Sequence[Question], picture_last: bool
    ) -> tuple[list[int], list[int], list[float], int]:
        ids: list[int] = []
        labels: list[int] = []
        weights: list[float] = []
        place = 0
        for turn, question in enumerate(asked):
            head, text = self.ids("<|im_start|>user\n"), self.ids(question.text)
            if turn == 0:
                image = [IMAGE_TOKEN_ID] * IMAGE_TOKENS
                place = len(head) + (len(text) if picture_last else 0)
                text = text + image if picture_last else image + text
            prompt = head + text + self.ids("<|im_end|>\n<|im_start|>assistant\n")
            answer = self.ids(question.answer + "<|im_end|>")
            after = self.ids("\n")
            ids += prompt + answer + after
            labels += [IGNORED] * len(prompt) + answer + [IGNORED] * len(after)
            weights += [0.0] * len(prompt) + [len(answer) ** -0.5] * len(answer) + [0.0] * len(after)
        return ids, labels, weights, place
