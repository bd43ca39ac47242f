"""Ask questions about a picture's facts, in several wordings, and check answers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from training.look_tiny.facts import COLOURS, FEATURES, NUMBERS, PLACES, SHAPES, Facts, description

OF_THE_SHAPE: Final = (
    "What colour is the {shape}?",
    "What color is the {shape}?",
    "Which colour does the {shape} have?",
    "Tell me the colour of the {shape}.",
)
OF_THE_ONE: Final = (
    "What colour is it?",
    "What color is the shape?",
    "Which colour is the shape in the picture?",
)
SHAPE_OF_COLOUR: Final = (
    "What shape is the {colour} one?",
    "Which shape is {colour}?",
    "What is the shape of the {colour} thing?",
)
SHAPE_OF_ONE: Final = ("What shape is it?", "Which shape do you see?", "What shape is in the picture?")
PLACE: Final = ("Where is the {shape}?", "In which part of the picture is the {shape}?")
COUNT: Final = ("How many shapes are there?", "How many shapes do you see?", "Count the shapes.")
IS_A: Final = ("Is there a {shape}?", "Is there a {shape} in the picture?", "Do you see a {shape}?")
HAS: Final = {
    "water": (
        "Is there water in this scene?",
        "Is there water in the picture?",
        "Do you see water?",
        "Is there any water here?",
    ),
    "fields": (
        "Are there fields in this scene?",
        "Do you see fields?",
        "Are there any fields in the picture?",
    ),
    "road": ("Is there a road in this scene?", "Do you see a road?", "Is there a road in the picture?"),
    "clouds": (
        "Are there clouds in this scene?",
        "Do you see clouds?",
        "Are there any clouds in the picture?",
    ),
}
# Verb, with its article, without it.
THERE: Final = {
    "water": ("is", "water", "water"),
    "fields": ("are", "fields", "fields"),
    "road": ("is", "a road", "road"),
    "clouds": ("are", "clouds", "clouds"),
}
DESCRIBE: Final = ("Describe the picture.", "What do you see?", "Describe this image in one sentence.")

# Expected share of right guesses by someone who knows the possible answers but not the picture.
CHANCE: Final = {
    "colour": 1 / len(COLOURS),
    "shape": 1 / len(SHAPES),
    "place": 1 / len(PLACES),
    "count": 1 / len(NUMBERS),
    "shape there": 1 / 2,
    **dict.fromkeys(FEATURES, 1 / 2),
}
# The words that decide whether an answer of a kind is right.
ABOUT: Final[dict[str, tuple[str, ...]]] = {
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "place": PLACES,
    "count": NUMBERS,
    **dict.fromkeys(("shape there", *FEATURES), ("yes", "no")),
}


@dataclass(frozen=True)
class Question:
    """A question and its answer.

    Attributes:
        kind: a key of `CHANCE`, or `description`.
        text: the question's wording.
        answer: the one right answer.
    """

    kind: str
    text: str
    answer: str


def is_right(asked: Question, answer: str) -> bool:
    """Return whether an answer means the same as the right one, however it is worded.

    Of the words its kind of question is about (colours, shapes, places, numbers; yes and no) it has those of
    the right answer and no others. A description must be the right one word for word.
    """
    said, right = (text.strip().rstrip(".").lower() for text in (answer, asked.answer))
    if asked.kind not in ABOUT:
        return said == right
    return _named(said, ABOUT[asked.kind]) == _named(right, ABOUT[asked.kind])


def _named(text: str, words: tuple[str, ...]) -> set[str]:
    return {word for word in words if re.search(rf"\b{word}\b", text)}


def questions(facts: Facts, rng: np.random.Generator) -> list[Question]:
    """Return one question of every kind and subject with a unique answer, in random order and wording."""
    asked = _of_scene(facts, rng) if facts.scene else _of_shapes(facts, rng)
    asked.append(Question("description", _one(rng, DESCRIBE), description(facts)))
    return [asked[int(place)] for place in rng.permutation(len(asked))]


def with_areas(asked: Question, facts: Facts, rng: np.random.Generator) -> Question:
    """Prepend a line of areas, as a follow-up question to a map carries it, to a question about a scene."""
    water = float(rng.uniform(1, 60)) if "water" in facts.features else 0.0
    hectares = float(rng.uniform(50, 3000))
    shares = (("land", 100 - water), ("water", water))
    parts = [f"{name} {share:.1f} % ({hectares * share / 100:,.0f} ha)" for name, share in shares]
    return replace(asked, text=f"Areas: {', '.join(parts)}.\n{asked.text}")


def _of_scene(facts: Facts, rng: np.random.Generator) -> list[Question]:
    return [
        Question(name, _one(rng, HAS[name]), _there(THERE[name], name in facts.features)) for name in FEATURES
    ]


def _of_shapes(facts: Facts, rng: np.random.Generator) -> list[Question]:
    shapes = Counter(thing.shape for thing in facts.things)
    colours = Counter(thing.colour for thing in facts.things)
    number = len(facts.things)
    said = "There is one shape." if number == 1 else f"There are {NUMBERS[number - 1]} shapes."
    asked = [Question("count", _one(rng, COUNT), said)]
    for thing in facts.things:
        named = {"shape": thing.shape, "colour": thing.colour}
        if shapes[thing.shape] == 1:
            is_ = f"The {thing.shape} is"
            asked.append(_filled(rng, "colour", OF_THE_SHAPE, f"{is_} {thing.colour}.", named))
            asked.append(_filled(rng, "place", PLACE, f"{is_} in the {thing.place}.", named))
        if colours[thing.colour] == 1:
            answer = f"The {thing.colour} shape is a {thing.shape}."
            asked.append(_filled(rng, "shape", SHAPE_OF_COLOUR, answer, named))
    if number == 1:
        one = facts.things[0]
        asked.append(_filled(rng, "colour", OF_THE_ONE, f"The {one.shape} is {one.colour}.", {}))
        asked.append(_filled(rng, "shape", SHAPE_OF_ONE, f"The {one.colour} shape is a {one.shape}.", {}))
    there = bool(rng.random() < 0.5)
    candidates = [shape for shape in SHAPES if (shape in shapes) == there]
    if candidates:
        shape = _one(rng, candidates)
        answer = _there(("is", f"a {shape}", shape), there)
        asked.append(_filled(rng, "shape there", IS_A, answer, {"shape": shape}))
    return asked


def _filled(
    rng: np.random.Generator, kind: str, wordings: tuple[str, ...], answer: str, names: dict[str, str]
) -> Question:
    return Question(kind, _one(rng, wordings).format(**names), answer)


def _there(words: tuple[str, str, str], true: bool) -> str:
    is_, some, none = words
    return f"Yes, there {is_} {some}." if true else f"No, there {is_} no {none}."


def _one(rng: np.random.Generator, of: tuple[str, ...] | list[str]) -> str:
    return of[int(rng.integers(len(of)))]
