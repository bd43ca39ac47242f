"""The first part of the training: each image token becomes the embedding of a word."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from baton_vision.look.chats import Speller
from baton_vision.look.design import IMAGE_TOKENS
from baton_vision.look.facts import COLOURS, FEATURES, NUMBERS, SHAPES, Facts, words
from baton_vision.look.network import Eyes, normalised, shrunk
from baton_vision.look.pictures import make_sample
from baton_vision.look.recipe import Book, Log, Recipe, Trainer, save

OTHERS: Final = "scene Yes No some no there The is top middle bottom left right"
VOCABULARY: Final = (
    *(f" {word}" for word in (*COLOURS, *SHAPES, *NUMBERS, *FEATURES)),
    *(f" {word}" for word in OTHERS.split()),
    ".",
)
FILLER: Final = "\n"
FILLER_WEIGHT: Final = 0.2
SHARPNESS: Final = 24.0  # how sure a token that is one word's embedding is of that word, in log odds
TESTED: Final = 256  # pictures
SAY_EVERY: Final = 50  # steps


class WordLoss:
    """How far image tokens are from the words they are to be.

    Args:
        embedding: the text model's, (vocabulary, width).
        speller: for the words' ids.
    """

    def __init__(self, embedding: Tensor, speller: Speller) -> None:
        ids = [self._one(speller, word) for word in (*VOCABULARY, FILLER)]
        self.table = embedding[ids].float()
        apart = torch.cdist(self.table, self.table).square()
        self.scale = SHARPNESS / float(apart[apart > 0].mean())
        self.numbers = {word: n for n, word in enumerate((*VOCABULARY, FILLER))}

    @staticmethod
    def _one(speller: Speller, word: str) -> int:
        (token,) = speller.ids(word)
        return token

    def target(self, facts: Facts) -> list[int]:
        """Numbers of the words of a picture, one for each image token."""
        said = words(facts)
        return [self.numbers[word] for word in said] + [self.numbers[FILLER]] * (IMAGE_TOKENS - len(said))

    def scores(self, tokens: Tensor) -> Tensor:
        """Log odds of each word, (batch, tokens, words): the nearer, the likelier."""
        return -self.scale * torch.cdist(tokens.float(), self.table.expand(len(tokens), -1, -1)).square()

    def __call__(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, the filler counting little."""
        weight = torch.ones(len(self.numbers))
        weight[-1] = FILLER_WEIGHT
        return nn.functional.cross_entropy(self.scores(tokens).flatten(0, 1), target.flatten(), weight)


def write_book(seeds: range, loss: WordLoss, log: Log) -> Book:
    """Draw the pictures of some seeds."""
    samples = [make_sample(seed) for seed in seeds]
    log.say(drawn=len(seeds))
    return Book(
        np.stack([shrunk(sample.picture) for sample in samples]),
        [sample.facts for sample in samples],
        torch.tensor([loss.target(sample.facts) for sample in samples]),
        [sample.questions for sample in samples],
    )


class Fresh:
    """Pictures that are drawn when they are wanted, each seen once: nothing to learn by heart.

    Args:
        seed: of the first.
    """

    def __init__(self, seed: int) -> None:
        self.next = seed

    def batch(self, count: int) -> tuple[Tensor, list[Facts]]:
        """Normalised pixels (count, 3, side, side) and what is true of them."""
        samples = [make_sample(seed) for seed in range(self.next, self.next + count)]
        self.next += count
        pixels = np.stack([shrunk(sample.picture) for sample in samples])
        return normalised(pixels), [sample.facts for sample in samples]


def learn_words(
    eyes: Eyes, fresh: Fresh, loss: WordLoss, test: Book, recipe: Recipe, log: Log, out: Path
) -> int:
    """The first part; returns its steps. What is learnt is kept in `out` as it comes along."""
    trainer = Trainer(eyes, recipe.word_minutes, recipe)
    recent: list[float] = []
    while trainer.done < 1:
        pixels, facts = fresh.batch(recipe.picture_batch)
        with torch.autocast("cpu", torch.bfloat16):
            tokens = eyes(pixels)
        now = loss(tokens, torch.tensor([loss.target(each) for each in facts]))
        trainer.step(now)
        recent.append(float(now.detach()))
        if trainer.steps % SAY_EVERY == 0:
            right = word_accuracy(trainer.average.module, test, loss)
            mean = round(float(np.mean(recent[-SAY_EVERY:])), 4)
            log.say(part="words", step=trainer.steps, loss=mean, right=right)
            save(trainer.average.module, out)
    trainer.keep()
    save(eyes, out)
    return trainer.steps


def word_accuracy(eyes: nn.Module, book: Book, loss: WordLoss) -> dict[str, float]:
    """Share of the words that are right, by kind of word; those that never change are left out."""
    with torch.inference_mode():
        guess = loss.scores(eyes(normalised(book.pixels[:TESTED]))).argmax(-1)
    right: dict[str, list[bool]] = {}
    for facts, target, row in zip(book.facts, book.words, guess, strict=False):
        said = words(facts)
        for n, word in enumerate(said):
            right.setdefault(_kind(word, said[n - 1]), []).append(bool(row[n] == target[n]))
    return {kind: round(float(np.mean(hits)), 3) for kind, hits in sorted(right.items()) if kind}


def _kind(word: str, before: str) -> str:
    """What a word tells: a colour, a shape, a number, a feature of a scene; or nothing of interest."""
    bare = word.strip()
    for kind, names in (("colour", COLOURS), ("shape", SHAPES), ("count", NUMBERS)):
        if bare in names:
            return kind
    return before.strip() if word in (" Yes", " No") else ""
