"""What is true of a picture, and the words for it. All questions are asked about these facts."""

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
# In reading order; things are listed in it.
PLACES: Final = ("top left", "top right", "middle", "bottom left", "bottom right")
FEATURES: Final = ("water", "fields", "road", "clouds")
NUMBERS: Final = ("one", "two", "three", "four")


@dataclass(frozen=True)
class Thing:
    """One shape in a picture: its colour, its shape and its place, words of the lists above."""

    colour: str
    shape: str
    place: str


@dataclass(frozen=True)
class Facts:
    """What is true of a picture.

    Attributes:
        things: in reading order; none in a scene from above.
        scene: whether it is a scene from above.
        features: those of `FEATURES` that the scene has.
    """

    things: tuple[Thing, ...] = ()
    scene: bool = False
    features: frozenset[str] = field(default_factory=frozenset)


def description(facts: Facts) -> str:
    """One sentence that says everything."""
    if not facts.scene:
        said = [f"{_article(thing.colour)} {thing.shape} in the {thing.place}" for thing in facts.things]
        return _capital(_listed(said)) + "."
    seen = [_with_article(name) for name in FEATURES if name in facts.features]
    return "A scene from above with " + (_listed(seen) if seen else "bare land") + "."


def words(facts: Facts) -> list[str]:
    """The facts as single words in fixed places: what the image's tokens are first taught to say.

    A scene: `overhead scene`, then `yes` or `no` and the name of each feature. Shapes: their number,
    `shapes`, then for each place its two words, and colour and shape of what is there, or `no shape`. So
    every word is about one part of the picture, whatever else is in it.
    """
    if facts.scene:
        said = ["overhead", "scene"]
        for name in FEATURES:
            said += ["yes" if name in facts.features else "no", name]
        return said
    said = [NUMBERS[len(facts.things) - 1], "shapes"]
    there = {thing.place: (thing.colour, thing.shape) for thing in facts.things}
    for place in PLACES:
        down, _, across = place.partition(" ")
        said += [down, across or down, *there.get(place, ("no", "shape"))]
    return said


def _article(colour: str) -> str:
    return ("an " if colour == "orange" else "a ") + colour


def _with_article(name: str) -> str:
    return "a road" if name == "road" else name


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
