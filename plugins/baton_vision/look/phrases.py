"""The second part of the training: which image tokens the frozen text model answers from.

No picture is needed for it. A picture is its facts here, and each fact has tokens of its own, which are free:
the text model is asked questions about made-up facts, and the loss of its answers goes back through it into
those tokens. (Prompt tuning, Lester et al. 2021, arXiv:2104.08691, with a prompt that depends on the facts.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from baton_vision.look.answers import Listener, share_right
from baton_vision.look.chats import Chats, Speller
from baton_vision.look.design import IMAGE_TOKENS, TEXT_WIDTH
from baton_vision.look.facts import COLOURS, FEATURES, NUMBERS, PLACES, SHAPES, Facts
from baton_vision.look.first_words import WordLoss
from baton_vision.look.pictures import PHRASES_START, SEEDS_APART, Sample, make_sample
from baton_vision.look.questions import Question, with_areas
from baton_vision.look.recipe import Book, Log, Recipe, Schedule

FILE: Final = "phrases.safetensors"
SPOT: Final = 7  # tokens that tell of one place
SAY_EVERY, TEST_EVERY = 25, 100  # steps
QUESTIONS: Final = 3  # in one chat
HARD: Final = {"shape": 2.0, "shape there": 2.0}  # how much more often these are asked
NOISE: Final = 0.4  # of the tokens, at most: a share of how far those of different pictures lie apart
DESCRIPTIONS: Final = (
    0.12  # share of them that may be asked for: they are long, and cost as much as ten answers
)
AREAS: Final = 0.2  # share of the chats about scenes that begin with a line of areas
PICTURE_LAST: Final = 0.1  # share of the chats in which the picture stands after the question
TESTED: Final = 40  # pictures, three questions each


def spreads(tokens: Tensor, seen: Sequence[Facts]) -> Tensor:
    """How far the tokens of pictures of one sort lie apart, mean square: (2,), of shapes and of scenes."""
    scenes = torch.tensor([facts.scene for facts in seen])
    return torch.stack([tokens[~scenes].var(0).mean(), tokens[scenes].var(0).mean()])


def sorts(seen: Sequence[Facts]) -> Tensor:
    """Which of the two each picture is: 0 for shapes, 1 for a scene."""
    return torch.tensor([int(facts.scene) for facts in seen])


class Phrases(nn.Module):
    """The image tokens of a picture with some facts.

    Each is the embedding of its word (see `facts.words`) and, added to that, what was learnt: for its place
    among the tokens, and for each fact of what it tells of.

    Args:
        words: knows the words.
    """

    def __init__(self, words: WordLoss) -> None:
        super().__init__()
        self.words = words
        self.place = _free(2, IMAGE_TOKENS)
        self.count = _free(len(NUMBERS))
        self.colour = _free(SPOT, len(COLOURS))
        self.shape = _free(SPOT, len(SHAPES))
        self.there = _free(2, len(PLACES), SPOT)
        self.feature = _free(IMAGE_TOKENS, len(FEATURES), 2)

    def forward(self, seen: Sequence[Facts]) -> Tensor:
        """Tokens (pictures, image tokens, text width)."""
        return torch.stack([self._of(facts) for facts in seen])

    def _of(self, facts: Facts) -> Tensor:
        said = self.words.table[self.words.target(facts)] + self.place[int(facts.scene)]
        if facts.scene:
            each = [self.feature[:, n, int(name in facts.features)] for n, name in enumerate(FEATURES)]
            return said + torch.stack(each).sum(0)
        things = {thing.place: thing for thing in facts.things}
        told = [self.count[len(things) - 1][None]]
        for n, place in enumerate(PLACES):
            spot = self.there[int(place in things), n]
            if (thing := things.get(place)) is not None:
                spot = spot + self.colour[:, list(COLOURS).index(thing.colour)]
                spot = spot + self.shape[:, SHAPES.index(thing.shape)]
            told.append(spot)
        return said + torch.cat(told)

    def save(self, folder: Path) -> None:
        """Write what was learnt."""
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Take what `save` wrote."""
        self.load_state_dict(load_file(folder / FILE))


def _free(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, TEXT_WIDTH))


@dataclass(frozen=True)
class Lesson:
    """What this part works with.

    Attributes:
        listener: the text model.
        speller: of the chats.
        test: pictures to be tested on.
        out: folder for the phrases as they come along.
    """

    listener: Listener
    speller: Speller
    test: Book
    out: Path

    def learn(self, phrases: Phrases, recipe: Recipe, log: Log) -> int:
        """Look for the tokens; returns the steps."""
        schedule = Schedule(recipe.phrase_rate, recipe.phrase_minutes)
        optimiser = torch.optim.Adam(phrases.parameters(), lr=recipe.phrase_rate, betas=(0.9, 0.98))
        recent: list[float] = []
        noise = NOISE * spreads(phrases(self.test.facts), self.test.facts).detach().sqrt()
        for facts, chats in self._chats(recipe):
            if schedule.done >= 1:
                break
            loss = self.listener.loss(chats, _blurred(phrases(facts), noise[sorts(facts)]))
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(phrases.parameters(), 1.0)
            optimiser.param_groups[0]["lr"] = schedule.step()
            optimiser.step()
            recent.append(float(loss.detach()))
            if schedule.steps % SAY_EVERY == 0:
                log.say(
                    part="phrases", step=schedule.steps, loss=round(float(np.mean(recent[-SAY_EVERY:])), 4)
                )
            if schedule.steps % TEST_EVERY == 0:
                log.say(
                    part="phrases", step=schedule.steps, right=self.right(phrases(self.test.facts[:TESTED]))
                )
                phrases.save(self.out)
        phrases.save(self.out)
        return schedule.steps

    def right(self, tokens: Tensor) -> dict[str, float]:
        """Share of right answers about the first of the test's pictures, if these are their tokens."""
        asked = [questions[:QUESTIONS] for questions in self.test.questions[: len(tokens)]]
        return share_right(self.listener, self.speller, tokens.detach(), asked)

    def _chats(self, recipe: Recipe) -> Iterator[tuple[list[Facts], Chats]]:
        """Batches without end: facts, and a chat of a few questions about each."""
        rng = np.random.default_rng(recipe.seed + 1)
        seed = PHRASES_START + SEEDS_APART * recipe.seed
        while True:
            samples = [make_sample(seed + n) for n in range(recipe.phrase_batch)]
            seed += len(samples)
            asked = [_asked(sample, rng) for sample in samples]
            last = [bool(rng.random() < PICTURE_LAST) for _ in samples]
            yield [sample.facts for sample in samples], self.speller.chats(asked, picture_last=last)


def _blurred(tokens: Tensor, noise: Tensor) -> Tensor:
    """Tokens as a tower may say them, not quite as they should be: each picture's more or less so."""
    much = noise * torch.rand(len(tokens))
    return tokens + much[:, None, None] * torch.randn_like(tokens)


def _asked(sample: Sample, rng: np.random.Generator) -> list[Question]:
    described = rng.random() < DESCRIPTIONS
    every = [question for question in sample.questions if question.kind != "description" or described]
    weights = np.array([HARD.get(question.kind, 1.0) for question in every])
    count = min(QUESTIONS, len(every))
    chosen = rng.choice(len(every), count, replace=False, p=weights / weights.sum())
    chat = [every[int(place)] for place in chosen]
    if sample.facts.scene and rng.random() < AREAS:
        chat[0] = with_areas(chat[0], sample.facts, rng)
    return chat
