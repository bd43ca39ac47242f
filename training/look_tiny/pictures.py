"""Draw the picture of a seed with its facts and questions; the ranges of seeds for training and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image

from training.look_tiny.facts import Facts
from training.look_tiny.overhead import draw_overhead
from training.look_tiny.questions import Question, questions
from training.look_tiny.shapes import draw_shapes

# Seeds of training pictures count up from TRAINING_START, those of the facts for soft prompts from
# PROMPTS_START; validation and held-out pictures lie below both, so they were never trained on.
TRAINING_START: Final = 1_000_000
PROMPTS_START: Final = 2_000_000_000
SEEDS_APART: Final = 10_000_000  # more pictures than one training draws
VALIDATION_SEEDS: Final = range(100_000, 100_256)
HELD_OUT_SEEDS: Final = range(200_000, 200_300)
SIDES: Final = (96, 144)  # width of a picture, pixels
PROPORTIONS: Final = (0.8, 1.25)  # of its height to its width
SCENES: Final = 0.35  # share of the pictures that are scenes from above


@dataclass(frozen=True)
class Sample:
    """A picture, its facts, and questions about it in random order."""

    picture: Image.Image
    facts: Facts
    questions: tuple[Question, ...]


def make_sample(seed: int) -> Sample:
    """Draw the picture of a seed (not negative) with its questions."""
    rng = np.random.default_rng([seed, 135])
    width = int(rng.integers(SIDES[0], SIDES[1] + 1))
    height = round(width * rng.uniform(*PROPORTIONS))
    draw = draw_overhead if rng.random() < SCENES else draw_shapes
    picture, facts = draw(rng, width, height)
    return Sample(picture, facts, tuple(questions(facts, rng)))
