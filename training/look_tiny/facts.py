"""The facts of a drawn picture (shapes, places, features of a scene) and their words.

Questions and their right answers are derived from these facts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

COLOURS: Final = {
    "red": (214, 38, 40),
    "green": (46, 158, 62),
    "blue": (44, 84, 212),
    "yellow": (242, 218, 48),
    "orange": (246, 138, 24),
    "purple": (136, 58, 176),
    "black": (22, 22, 24),
}
SHAPES: Final = ("circle", "square", "triangle", "star", "cross")
# In reading order, in which shapes are listed.
PLACES: Final = ("top left", "top right", "middle", "bottom left", "bottom right")
FEATURES: Final = ("water", "fields", "road", "clouds")
NUMBERS: Final = ("one", "two", "three")


@dataclass(frozen=True)
class Thing:
    """One shape in a picture; its colour, shape and place are words of the lists above."""

    colour: str
    shape: str
    place: str


@dataclass(frozen=True)
class Facts:
    """The facts of a picture.

    Attributes:
        things: the shapes in reading order; empty for a scene from above.
        scene: whether the picture is a scene from above.
        features: the members of `FEATURES` that the scene has.
    """

    things: tuple[Thing, ...] = ()
    scene: bool = False
    features: frozenset[str] = field(default_factory=frozenset)


def description(facts: Facts) -> str:
    """Return one sentence that states all facts, e.g. "A red circle in the middle."."""
    if not facts.scene:
        said = [f"{_article(thing.colour)} {thing.shape} in the {thing.place}" for thing in facts.things]
        return _capital(_listed(said)) + "."
    seen = [_with_article(name) for name in FEATURES if name in facts.features]
    return "A scene from above with " + (_listed(seen) if seen else "bare land") + "."


def words(facts: Facts) -> list[str]:
    """Return the facts as words of one token each, at fixed places: the first target of the image tokens.

    A scene: ` scene`, then eight tokens for each feature. Shapes: their number, then for each place seven:
    ` red circle is red top left.`, or seven line ends where nothing is. So every token is about one part of
    the picture, whatever else is in it, and what follows a colour is its shape, what follows a shape is its
    colour: text models tend to repeat what followed before.
    """
    if facts.scene:
        return [" scene", *(word for name in FEATURES for word in _said_of(name, name in facts.features))]
    there = {thing.place: thing for thing in facts.things}
    return [
        f" {NUMBERS[len(facts.things) - 1]}",
        *(word for place in PLACES for word in _said_at(place, there.get(place))),
    ]


def _said_of(feature: str, there: bool) -> list[str]:
    said, much = (" Yes", " some") if there else (" No", " no")
    return [f" {feature}", said, f" {feature}", said, " there", " is", much, f" {feature}"]


def _said_at(place: str, thing: Thing | None) -> list[str]:
    if thing is None:
        return ["\n"] * 7
    down, _, across = place.partition(" ")
    colour, shape = f" {thing.colour}", f" {thing.shape}"
    return [colour, shape, " is", colour, f" {down}", f" {across or down}", "."]


def _article(colour: str) -> str:
    return ("an " if colour == "orange" else "a ") + colour


def _with_article(name: str) -> str:
    return "a road" if name == "road" else name


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
