"""The second part of the training: the frozen text model answers questions about what it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from baton_vision.look.chats import IGNORED, Chats, Speller
from baton_vision.look.design import IMAGE_TOKENS
from baton_vision.look.first_words import Fresh
from baton_vision.look.network import Eyes, jittered, normalised
from baton_vision.look.questions import with_areas
from baton_vision.look.recipe import Book, Log, Recipe, Trainer, save

SAY_EVERY, TEST_EVERY = 25, 100  # steps
QUESTIONS: Final = (2, 4)  # fewest and most in one chat
DESCRIPTIONS: Final = (
    0.3  # share of them that may be asked for: they are long, and cost as much as ten answers
)
AREAS: Final = 0.2  # share of the chats about scenes that begin with a line of areas
PICTURE_LAST: Final = 0.1  # share of the chats in which the picture stands after the question
NO_MORE_WORDS: Final = 0.8  # share of the part after which the first part's loss counts no more
TESTED: Final = 30  # pictures, two questions each


class Listener:
    """The frozen text model, hearing image tokens.

    Args:
        model: HuggingFace's.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def scores(self, chats: Chats, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (answer tokens, vocabulary) with their labels and weights."""
        embedded = self.model.get_input_embeddings()(chats.ids)
        rows = torch.arange(len(chats.ids))[:, None]
        columns = torch.tensor(chats.places)[:, None] + torch.arange(IMAGE_TOKENS)
        embedded = embedded.index_put((rows, columns), tokens.to(embedded.dtype))
        hidden = self.model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        wanted = chats.labels[:, 1:] != IGNORED
        logits = self.model.lm_head(hidden[:, :-1][wanted]).float()
        return logits, chats.labels[:, 1:][wanted], chats.weights[:, 1:][wanted]


@dataclass(frozen=True)
class Lesson:
    """What the second part works with.

    Attributes:
        book: to learn from.
        fresh: more pictures, for the first part's loss, which it knows.
        test: to be tested on.
        listener: the text model.
        speller: of the chats.
        out: folder for the weights as they come along.
    """

    book: Book
    fresh: Fresh
    test: Book
    listener: Listener
    speller: Speller
    out: Path

    def learn(self, eyes: Eyes, recipe: Recipe, log: Log) -> int:
        """The second part; returns its steps."""
        trainer = Trainer(eyes, recipe.answer_rate, recipe.answer_minutes, recipe)
        rng = np.random.default_rng(recipe.seed + 2)
        recent: list[float] = []
        for chosen, chats in self._chats(recipe):
            share = recipe.word_share * max(0.0, 1 - trainer.done / NO_MORE_WORDS)
            recent.append(self._step(trainer, chosen, chats, share, recipe.word_more, rng))
            if trainer.steps % SAY_EVERY == 0:
                mean = round(float(np.mean(recent[-SAY_EVERY:])), 4)
                log.say(part="answers", step=trainer.steps, loss=mean)
            if trainer.steps % TEST_EVERY == 0:
                log.say(step=trainer.steps, right=self.right(trainer.average.module, TESTED))
                save(trainer.average.module, self.out)
            if trainer.done >= 1:
                break
        trainer.keep()
        return trainer.steps

    def _step(
        self,
        trainer: Trainer,
        chosen: npt.NDArray[np.int64],
        chats: Chats,
        word_share: float,
        word_more: int,
        rng: np.random.Generator,
    ) -> float:
        pixels, target = normalised(jittered(self.book.pixels[chosen], rng)), self.book.words[chosen]
        if word_share > 0:
            more, more_target = self.fresh.batch(word_more)
            pixels, target = torch.cat([pixels, more]), torch.cat([target, more_target])
        with torch.autocast("cpu", torch.bfloat16):
            tokens = trainer.eyes(pixels)
        logits, labels, weights = self.listener.scores(chats, tokens[: len(chats.ids)])
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = (each * weights).sum() / weights.sum()
        trainer.step(loss + word_share * self.fresh.loss(tokens, target))
        return float(loss.detach())

    def _chats(self, recipe: Recipe) -> Iterator[tuple[npt.NDArray[np.int64], Chats]]:
        """Batches without end: numbers of the pictures, and a chat of a few questions about each."""
        rng = np.random.default_rng(recipe.seed + 1)
        while True:
            chosen = rng.integers(len(self.book.pixels), size=recipe.answer_batch)
            asked = []
            for number in chosen:
                every = [
                    question
                    for question in self.book.questions[number]
                    if question.kind != "description" or rng.random() < DESCRIPTIONS
                ]
                order = rng.permutation(len(every))[: int(rng.integers(QUESTIONS[0], QUESTIONS[1] + 1))]
                chat = [every[place] for place in order]
                if self.book.facts[number].scene and rng.random() < AREAS:
                    chat[0] = with_areas(chat[0], self.book.facts[number], rng)
                asked.append(chat)
            last = [bool(rng.random() < PICTURE_LAST) for _ in chosen]
            yield chosen, self.speller.chats(asked, picture_last=last)

    def right(self, eyes: nn.Module, pictures: int) -> dict[str, float]:
        """Share of right answers to test questions, by kind: right is what greedy decoding gives whole."""
        asked = [(n, question) for n in range(pictures) for question in self.test.questions[n][:2]]
        right: dict[str, list[bool]] = {}
        for start in range(0, len(asked), 16):
            part = asked[start : start + 16]
            chats = self.speller.chats([[question] for _, question in part], picture_last=[False] * len(part))
            with torch.inference_mode():
                tokens = eyes(normalised(self.test.pixels[[n for n, _ in part]]))
                logits, labels, _ = self.listener.scores(chats, tokens)
            hits = (logits.argmax(-1) == labels).split((chats.labels != IGNORED).sum(1).tolist())
            for (_, question), hit in zip(part, hits, strict=True):
                right.setdefault(question.kind, []).append(bool(hit.all()))
        return {kind: round(float(np.mean(hits)), 3) for kind, hits in sorted(right.items())}
