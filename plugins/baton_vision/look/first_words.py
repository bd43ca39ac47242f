"""The first part of the training: each image token becomes the embedding of a word."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from baton_vision.look.chats import Speller
from baton_vision.look.design import IMAGE_TOKENS
from baton_vision.look.facts import COLOURS, FEATURES, NUMBERS, SHAPES, words
from baton_vision.look.network import Eyes, jittered, normalised, shrunk
from baton_vision.look.pictures import Sample, make_sample
from baton_vision.look.recipe import Book, Log, Recipe, Trainer

VOCABULARY: Final = (
    *COLOURS, *SHAPES, *NUMBERS, *FEATURES,
    "shape", "shapes", "overhead", "scene", "yes", "no", "top", "middle", "bottom", "left", "right",
)  # fmt: skip
FILLER: Final = "\n"
FILLER_WEIGHT: Final = 0.05
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
        ids = [self._one(speller, " " + word) for word in VOCABULARY] + speller.ids(FILLER)
        self.table = embedding[ids].float()
        apart = torch.cdist(self.table, self.table).square()
        self.scale = SHARPNESS / float(apart[apart > 0].mean())
        self.numbers = {word: n for n, word in enumerate((*VOCABULARY, FILLER))}

    @staticmethod
    def _one(speller: Speller, word: str) -> int:
        (token,) = speller.ids(word)
        return token

    def target(self, sample: Sample) -> list[int]:
        """Numbers of the words of a picture, one for each image token."""
        said = words(sample.facts)
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
    pixels, facts, target, asked = [], [], [], []
    for seed in seeds:
        sample = make_sample(seed)
        pixels.append(shrunk(sample.picture))
        facts.append(sample.facts)
        target.append(loss.target(sample))
        asked.append(sample.questions)
    log.say(drawn=len(seeds))
    return Book(np.stack(pixels), facts, torch.tensor(target), asked)


def learn_words(eyes: Eyes, book: Book, test: Book, loss: WordLoss, recipe: Recipe, log: Log) -> int:
    """The first part; returns its steps."""
    trainer = Trainer(eyes, recipe.word_rate, recipe.word_minutes, recipe)
    rng = np.random.default_rng(recipe.seed)
    recent: list[float] = []
    while trainer.done < 1:
        chosen = rng.integers(len(book.pixels), size=recipe.word_batch)
        with torch.autocast("cpu", torch.bfloat16):
            tokens = eyes(normalised(jittered(book.pixels[chosen], rng)))
        now = loss(tokens, book.words[chosen])
        trainer.step(now)
        recent.append(float(now.detach()))
        if trainer.steps % SAY_EVERY == 0:
            right = word_accuracy(trainer.average.module, test, loss)
            mean = round(float(np.mean(recent[-SAY_EVERY:])), 4)
            log.say(part="words", step=trainer.steps, loss=mean, right=right)
    trainer.keep()
    return trainer.steps


def word_accuracy(eyes: nn.Module, book: Book, loss: WordLoss) -> float:
    """Share of the words (filler apart) that are right."""
    with torch.inference_mode():
        guess = loss.scores(eyes(normalised(book.pixels[:TESTED]))).argmax(-1)
    target = book.words[:TESTED]
    counts = target != loss.numbers[FILLER]
    return round(float((guess == target)[counts].float().mean()), 4)
