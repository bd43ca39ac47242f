"""Stage 1 of the training: train each image token to be the embedding of a word."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from training.look_tiny.architecture import IMAGE_TOKENS
from training.look_tiny.chats import ChatTokenizer
from training.look_tiny.facts import COLOURS, FEATURES, NUMBERS, SHAPES, Facts, words
from training.look_tiny.network import VisionEncoder, normalised, shrunk
from training.look_tiny.pictures import make_sample
from training.look_tiny.recipe import Log, Recipe, Trainer, ValidationSet, save

OTHERS: Final = "scene Yes No some no there The is top middle bottom left right"
VOCABULARY: Final = (
    *(f" {word}" for word in (*COLOURS, *SHAPES, *NUMBERS, *FEATURES)),
    *(f" {word}" for word in OTHERS.split()),
    ".",
)
FILLER: Final = "\n"
FILLER_WEIGHT: Final = 0.2
SHARPNESS: Final = 24.0  # logit of a token that equals one word's embedding
TESTED: Final = 256  # pictures
LOG_EVERY: Final = 50  # steps


class WordLoss:
    """Cross-entropy of image tokens against the words they are to be.

    Args:
        embedding: the text model's embedding table, (vocabulary, text width).
        tokenizer: gives the words' ids.
    """

    def __init__(self, embedding: Tensor, tokenizer: ChatTokenizer) -> None:
        ids = [self._one(tokenizer, word) for word in (*VOCABULARY, FILLER)]
        self.table = embedding[ids].float()
        apart = torch.cdist(self.table, self.table).square()
        self.scale = SHARPNESS / float(apart[apart > 0].mean())
        self.numbers = {word: n for n, word in enumerate((*VOCABULARY, FILLER))}

    @staticmethod
    def _one(tokenizer: ChatTokenizer, word: str) -> int:
        (token,) = tokenizer.ids(word)
        return token

    def target(self, facts: Facts) -> list[int]:
        """Return the index of the word for each image token of a picture."""
        said = words(facts)
        return [self.numbers[word] for word in said] + [self.numbers[FILLER]] * (IMAGE_TOKENS - len(said))

    def scores(self, tokens: Tensor) -> Tensor:
        """Return the logit of each word, float32 (batch, image tokens, words): the nearer, the likelier."""
        return -self.scale * torch.cdist(tokens.float(), self.table.expand(len(tokens), -1, -1)).square()

    def __call__(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy, with the filler at `FILLER_WEIGHT`."""
        weight = torch.ones(len(self.numbers))
        weight[-1] = FILLER_WEIGHT
        return nn.functional.cross_entropy(self.scores(tokens).flatten(0, 1), target.flatten(), weight)


def draw_validation_set(seeds: range, loss: WordLoss, log: Log) -> ValidationSet:
    """Draw the pictures of these seeds as a test set."""
    samples = [make_sample(seed) for seed in seeds]
    log.write(drawn=len(seeds))
    return ValidationSet(
        np.stack([shrunk(sample.picture) for sample in samples]),
        [sample.facts for sample in samples],
        torch.tensor([loss.target(sample.facts) for sample in samples]),
        [sample.questions for sample in samples],
    )


class PictureStream:
    """An endless stream of training pictures, each drawn once, so that none can be memorised.

    Args:
        seed: seed of the first picture.
    """

    def __init__(self, seed: int) -> None:
        self.next = seed

    def batch(self, count: int) -> tuple[Tensor, list[Facts]]:
        """Return normalised pixels, float32 (count, 3, side, side), and the pictures' facts."""
        samples = [make_sample(seed) for seed in range(self.next, self.next + count)]
        self.next += count
        pixels = np.stack([shrunk(sample.picture) for sample in samples])
        return normalised(pixels), [sample.facts for sample in samples]


def learn_words(
    encoder: VisionEncoder,
    stream: PictureStream,
    loss: WordLoss,
    test: ValidationSet,
    recipe: Recipe,
    log: Log,
    out: Path,
) -> int:
    """Run stage 1 and return its number of steps; checkpoints go to `out`."""
    trainer = Trainer(encoder, recipe.word_minutes, recipe)
    recent: list[float] = []
    while trainer.done < 1:
        pixels, facts = stream.batch(recipe.picture_batch)
        with torch.autocast("cpu", torch.bfloat16):
            tokens = encoder(pixels)
        now = loss(tokens, torch.tensor([loss.target(each) for each in facts]))
        trainer.step(now)
        recent.append(float(now.detach()))
        if trainer.steps % LOG_EVERY == 0:
            right = word_accuracy(trainer.average.module, test, loss)
            mean = round(float(np.mean(recent[-LOG_EVERY:])), 4)
            log.write(part="words", step=trainer.steps, loss=mean, right=right)
            save(trainer.average.module, out)
    trainer.keep()
    save(encoder, out)
    return trainer.steps


def word_accuracy(encoder: nn.Module, validation_set: ValidationSet, loss: WordLoss) -> dict[str, float]:
    """Return the share of right words, by kind of word; words that never change are left out."""
    with torch.inference_mode():
        guess = loss.scores(encoder(normalised(validation_set.pixels[:TESTED]))).argmax(-1)
    right: dict[str, list[bool]] = {}
    for facts, target, row in zip(validation_set.facts, validation_set.words, guess, strict=False):
        said = words(facts)
        for n, word in enumerate(said):
            right.setdefault(_kind(word, said[n - 1]), []).append(bool(row[n] == target[n]))
    return {kind: round(float(np.mean(hits)), 3) for kind, hits in sorted(right.items()) if kind}


def _kind(word: str, before: str) -> str:
    """Return the kind of a word (colour, shape, count or a feature's name), or "" for the others."""
    bare = word.strip()
    for kind, names in (("colour", COLOURS), ("shape", SHAPES), ("count", NUMBERS)):
        if bare in names:
            return kind
    return before.strip() if word in (" Yes", " No") else ""
