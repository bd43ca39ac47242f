"""Stage 2 of the training: tune soft prompts, the image tokens from which the text model answers.

This is prompt tuning (Lester et al. 2021, arXiv:2104.08691) with a prompt that depends on a picture's facts.
No pictures are drawn: each fact has parameters of its own, the frozen text model is asked questions about
random facts, and the loss of its answers is backpropagated into those parameters.
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

from training.look_tiny.architecture import IMAGE_TOKENS, TEXT_WIDTH
from training.look_tiny.chats import Chats, ChatTokenizer
from training.look_tiny.facts import COLOURS, FEATURES, NUMBERS, PLACES, SHAPES, Facts
from training.look_tiny.pictures import PROMPTS_START, SEEDS_APART, Sample, make_sample
from training.look_tiny.questions import Question, with_areas
from training.look_tiny.recipe import Log, Recipe, Schedule, ValidationSet
from training.look_tiny.text_model import TextModel, measure_accuracy
from training.look_tiny.word_targets import WordLoss

FILE: Final = "phrases.safetensors"
SPOT: Final = 7  # tokens for one place
LOG_EVERY, TEST_EVERY = 25, 100  # steps
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
    """Return the variance of the tokens among pictures of shapes and among scenes, (2,)."""
    scenes = torch.tensor([facts.scene for facts in seen])
    return torch.stack([tokens[~scenes].var(0).mean(), tokens[scenes].var(0).mean()])


def sorts(seen: Sequence[Facts]) -> Tensor:
    """Return the sort of each picture, int64 (pictures,): 0 for shapes, 1 for a scene."""
    return torch.tensor([int(facts.scene) for facts in seen])


class SoftPrompts(nn.Module):
    """The tuned image tokens for given facts.

    Each is the embedding of its word (see `facts.words`) plus learnt offsets: one for its place among the
    tokens, and one for each fact that it encodes.

    Args:
        words: the word targets of stage 1.
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
        """Return tokens (pictures, image tokens, text width)."""
        return torch.stack([self._of(facts) for facts in seen])

    def _of(self, facts: Facts) -> Tensor:
        said = self.words.table[self.words.target(facts)] + self.place[int(facts.scene)]
        if facts.scene:
            each = [self.feature[:, n, int(name in facts.features)] for n, name in enumerate(FEATURES)]
            return said + torch.stack(each).sum(0)
        things = {thing.place: thing for thing in facts.things}
        rows = [self.count[len(things) - 1][None]]
        for n, place in enumerate(PLACES):
            spot = self.there[int(place in things), n]
            if (thing := things.get(place)) is not None:
                spot = spot + self.colour[:, list(COLOURS).index(thing.colour)]
                spot = spot + self.shape[:, SHAPES.index(thing.shape)]
            rows.append(spot)
        return said + torch.cat(rows)

    def save(self, folder: Path) -> None:
        """Write the parameters to a folder."""
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Read the parameters that `save` wrote."""
        self.load_state_dict(load_file(folder / FILE))


def _free(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, TEXT_WIDTH))


@dataclass(frozen=True)
class PromptTuning:
    """The tuning of soft prompts.

    Attributes:
        text_model: the frozen text model.
        tokenizer: encodes the chats.
        test: pictures to validate on.
        out: folder for checkpoints of the prompts.
    """

    text_model: TextModel
    tokenizer: ChatTokenizer
    test: ValidationSet
    out: Path

    def learn(self, prompts: SoftPrompts, recipe: Recipe, log: Log) -> int:
        """Tune the prompts and return the number of steps."""
        schedule = Schedule(recipe.phrase_rate, recipe.phrase_minutes)
        optimiser = torch.optim.Adam(prompts.parameters(), lr=recipe.phrase_rate, betas=(0.9, 0.98))
        recent: list[float] = []
        noise = NOISE * spreads(prompts(self.test.facts), self.test.facts).detach().sqrt()
        for facts, chats in self._chats(recipe):
            if schedule.done >= 1:
                break
            loss = self.text_model.loss(chats, _blurred(prompts(facts), noise[sorts(facts)]))
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(prompts.parameters(), 1.0)
            optimiser.param_groups[0]["lr"] = schedule.step()
            optimiser.step()
            recent.append(float(loss.detach()))
            if schedule.steps % LOG_EVERY == 0:
                log.write(
                    part="phrases", step=schedule.steps, loss=round(float(np.mean(recent[-LOG_EVERY:])), 4)
                )
            if schedule.steps % TEST_EVERY == 0:
                log.write(
                    part="phrases", step=schedule.steps, right=self.right(prompts(self.test.facts[:TESTED]))
                )
                prompts.save(self.out)
        prompts.save(self.out)
        return schedule.steps

    def right(self, tokens: Tensor) -> dict[str, float]:
        """Return the share of right answers about the first test pictures, given their image tokens."""
        asked = [questions[:QUESTIONS] for questions in self.test.questions[: len(tokens)]]
        return measure_accuracy(self.text_model, self.tokenizer, tokens.detach(), asked)

    def _chats(self, recipe: Recipe) -> Iterator[tuple[list[Facts], Chats]]:
        """Yield batches without end: facts, and a chat of a few questions about each."""
        rng = np.random.default_rng(recipe.seed + 1)
        seed = PROMPTS_START + SEEDS_APART * recipe.seed
        while True:
            samples = [make_sample(seed + n) for n in range(recipe.phrase_batch)]
            seed += len(samples)
            asked = [_asked(sample, rng) for sample in samples]
            last = [bool(rng.random() < PICTURE_LAST) for _ in samples]
            yield [sample.facts for sample in samples], self.tokenizer.chats(asked, picture_last=last)


def _blurred(tokens: Tensor, noise: Tensor) -> Tensor:
    """Add noise of a random strength per picture, since a tower does not output the tokens exactly."""
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
