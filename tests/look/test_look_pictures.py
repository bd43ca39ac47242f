"""The pictures of `look-tiny` and the questions about them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from training.look_tiny.architecture import IMAGE_TOKENS
from training.look_tiny.facts import (
    COLOURS,
    FEATURES,
    NUMBERS,
    PLACES,
    SHAPES,
    Facts,
    Thing,
    description,
    words,
)
from training.look_tiny.overhead import draw_overhead
from training.look_tiny.pictures import HELD_OUT_SEEDS, TRAINING_START, VALIDATION_SEEDS, make_sample
from training.look_tiny.questions import CHANCE, Question, is_right, questions
from training.look_tiny.record import pictures_digest
from training.look_tiny.shapes import LEAST_CONTRAST, draw_shapes

THINGS = (Thing("red", "circle", "top left"), Thing("orange", "star", "middle"))


@pytest.fixture(scope="module")
def samples():
    return [make_sample(seed) for seed in range(300)]


def test_a_seed_always_gives_the_same_picture_and_another_seed_another():
    """Pixels and questions are a function of the seed."""
    assert pictures_digest([3, 4]) == pictures_digest([3, 4])
    assert pictures_digest([3, 4]) != pictures_digest([3, 5])


def test_no_held_out_seed_was_trained_on_or_chosen_by():
    """The three ranges of seeds do not meet, however many pictures are trained on."""
    assert max(HELD_OUT_SEEDS) < TRAINING_START
    assert max(VALIDATION_SEEDS) < TRAINING_START
    assert not set(HELD_OUT_SEEDS) & set(VALIDATION_SEEDS)


def test_every_word_occurs(samples):
    """No colour, shape, place, number or feature is missing among some hundred pictures."""
    things = [thing for sample in samples for thing in sample.facts.things]
    assert {thing.colour for thing in things} == set(COLOURS)
    assert {thing.shape for thing in things} == set(SHAPES)
    assert {thing.place for thing in things} == set(PLACES)
    assert {len(sample.facts.things) for sample in samples if not sample.facts.scene} == {1, 2, 3}
    assert len(NUMBERS) == 3
    assert {name for sample in samples for name in sample.facts.features} == set(FEATURES)


def test_answers_are_what_the_picture_says(samples):
    """Each answer follows from the facts by the question's own words."""
    for sample in samples:
        for asked in sample.questions:
            if asked.kind == "count":
                assert NUMBERS[len(sample.facts.things) - 1] in asked.answer
            if asked.kind in FEATURES:
                assert asked.answer.startswith("Yes, " if asked.kind in sample.facts.features else "No, ")
            if asked.kind == "shape there":
                shapes = {thing.shape for thing in sample.facts.things}
                named = next(shape for shape in SHAPES if shape in asked.text)
                assert asked.answer.startswith("Yes, " if named in shapes else "No, ")


def test_no_question_has_two_right_answers():
    """A shape that is there twice is not asked about by its name, nor a colour by its own."""
    twins = Facts(things=(Thing("red", "circle", "top left"), Thing("red", "circle", "middle")))
    kinds = {asked.kind for asked in questions(twins, np.random.default_rng(1))}
    assert kinds == {"count", "shape there", "description"}


@pytest.mark.parametrize(
    ("kind", "right", "answer", "expected"),
    [
        ("colour", "The star is red.", "It is red", True),
        ("colour", "The star is red.", "The star is red and blue.", False),
        ("colour", "The star is red.", "The star is bored.", False),
        ("shape", "The red shape is a star.", "The star shape is a star.", True),
        ("shape", "The red shape is a star.", "The red shape is a cross.", False),
        ("place", "The star is in the top left.", "Top left.", True),
        ("place", "The star is in the top left.", "The star is at the top.", False),
        ("count", "There are two shapes.", "two", True),
        ("count", "There are two shapes.", "There are shapes.", False),
        ("water", "No, there is no water.", "No.", True),
        ("water", "No, there is no water.", "Yes, there is no water.", False),
        ("description", "A red star in the middle.", "a red star in the middle", True),
        ("description", "A red star in the middle.", "A red star.", False),
    ],
)
def test_an_answer_is_right_that_says_the_right_word_and_no_other(
    kind: str, right: str, answer: str, expected: bool
):
    """However it puts it; a description is right word for word."""
    assert is_right(Question(kind, "?", right), answer) is expected


def test_guessing_gains_little(samples):
    """The commonest answer of a kind is right hardly more often than the stated chance."""
    answers: dict[str, Counter[str]] = {kind: Counter() for kind in CHANCE}
    for sample in samples:
        for asked in sample.questions:
            if asked.kind in answers:
                answers[asked.kind][asked.answer] += 1
    for kind in ("colour", "shape", "place", *FEATURES, "shape there"):
        commonest = max(answers[kind].values()) / answers[kind].total()
        assert commonest < CHANCE[kind] + 0.12, kind


def test_a_description_names_everything():
    """Shapes with colour and place, features with their article, bare land by its name."""
    assert (
        description(Facts(things=THINGS)) == "A red circle in the top left and an orange star in the middle."
    )
    seen = Facts(scene=True, features=frozenset({"road", "water", "clouds"}))
    assert description(seen) == "A scene from above with water, a road and clouds."
    assert description(Facts(scene=True)) == "A scene from above with bare land."


def test_the_words_of_every_picture_fit_into_its_tokens(samples):
    """The facts, one word a token, are never longer than what the tower gives."""
    assert max(len(words(sample.facts)) for sample in samples) <= IMAGE_TOKENS
    said = words(Facts(things=THINGS))
    assert "".join(said[:8]) == " two red circle is red top left."
    assert said[8:15] == ["\n"] * 7
    assert "".join(said[15:22]) == " orange star is orange middle middle."


def test_a_shape_can_be_told_from_its_ground():
    """Where a lone shape is, the picture differs from its corner opposite by the least contrast."""
    for seed in range(40):
        picture, facts = draw_shapes(np.random.default_rng(seed), 120, 120)
        if facts.things[0].place != "middle" or len(facts.things) > 1:
            continue
        pixels = np.asarray(picture, float)
        assert np.linalg.norm(pixels[60, 60] - pixels[3, 3]) > LEAST_CONTRAST - 45


def test_water_is_in_the_pixels():
    """Scenes with water in the facts are bluer than the same number without, on average."""
    blue: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(60):
        picture, facts = draw_overhead(np.random.default_rng(seed), 96, 96)
        pixels = np.asarray(picture, float)
        blue["water" in facts.features].append(float((pixels[..., 2] > pixels[..., 0] + 15).mean()))
    assert np.mean(blue[True]) > np.mean(blue[False]) + 0.05
