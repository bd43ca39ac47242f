"""Draw pictures of up to three coloured shapes on a pale background."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from training.look_tiny.facts import COLOURS, PLACES, SHAPES, Facts, Thing

FINE = 2  # shapes are drawn this much larger, then shrunk: smooth edges
CENTRES = {
    "top left": (0.25, 0.25),
    "top right": (0.75, 0.25),
    "middle": (0.5, 0.5),
    "bottom left": (0.25, 0.75),
    "bottom right": (0.75, 0.75),
}
LEAST_CONTRAST = 95  # between a shape and the ground, root of the summed squares of 8-bit colours

Colour = npt.NDArray[np.float64]


def draw_shapes(rng: np.random.Generator, width: int, height: int) -> tuple[Image.Image, Facts]:
    """Draw one to three shapes in different places; return the picture and its facts."""
    count = int(rng.choice(3, p=(0.45, 0.3, 0.25))) + 1
    places = sorted(rng.choice(len(PLACES), size=count, replace=False))
    ground = _ground_colour(rng)
    picture = Image.fromarray(_ground(rng, ground, width, height)).resize((width * FINE, height * FINE))
    things = []
    for place in places:
        colour, paint = _paint(rng, ground)
        thing = Thing(colour, str(rng.choice(SHAPES)), PLACES[place])
        _draw(rng, ImageDraw.Draw(picture), thing, paint, alone=count == 1)
        things.append(thing)
    return picture.resize((width, height), Image.Resampling.BOX), Facts(things=tuple(things))


def _ground_colour(rng: np.random.Generator) -> Colour:
    """Choose a pale colour: white, grey or a faint tint."""
    grey = rng.uniform(190, 252)
    return np.asarray(np.clip(grey + rng.normal(0, 6, 3), 0, 255))


def _ground(rng: np.random.Generator, colour: Colour, width: int, height: int) -> npt.NDArray[np.uint8]:
    """Draw a plain, graded or mottled background, uint8 (height, width, 3)."""
    rows, columns = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    angle, rise = rng.uniform(0, 2 * math.pi), rng.uniform(0, 20) * (rng.random() < 0.5)
    light = rise * (rows * math.sin(angle) + columns * math.cos(angle))
    if rng.random() < 0.4:
        light = light + rng.normal(0, rng.uniform(1, 5), (height, width))
    return np.asarray(np.clip(colour + light[:, :, None], 0, 255), np.uint8)


def _paint(rng: np.random.Generator, ground: Colour) -> tuple[str, tuple[int, int, int]]:
    """Choose a colour that contrasts with the background; return its name and its shade here."""
    while True:
        name = str(rng.choice(list(COLOURS)))
        shade = np.clip(np.array(COLOURS[name]) + rng.normal(0, 6, 3), 0, 255)
        if float(np.linalg.norm(shade - ground)) > LEAST_CONTRAST:
            return name, (int(shade[0]), int(shade[1]), int(shade[2]))


def _draw(
    rng: np.random.Generator,
    draw: ImageDraw.ImageDraw,
    thing: Thing,
    paint: tuple[int, int, int],
    *,
    alone: bool,
) -> None:
    width, height = draw.im.size
    side = min(width, height)
    radius = side * (rng.uniform(0.18, 0.26) if alone else rng.uniform(0.145, 0.175))
    across, down = CENTRES[thing.place]
    x, y = (across + rng.uniform(-0.04, 0.04)) * width, (down + rng.uniform(-0.04, 0.04)) * height
    turn = math.radians(rng.uniform(-8, 8))
    corners = [
        (
            x + radius * (u * math.cos(turn) - v * math.sin(turn)),
            y + radius * (u * math.sin(turn) + v * math.cos(turn)),
        )
        for u, v in outline(thing.shape)
    ]
    draw.polygon(corners, fill=paint)


def outline(shape: str) -> list[tuple[float, float]]:
    """Return the corners of a shape around (0, 0), y downwards; all shapes are about equally wide."""
    if shape == "circle":
        return _around(48, 1.0)
    if shape == "square":
        return [(-1, -1), (1, -1), (1, 1), (-1, 1)]
    if shape == "triangle":
        return [(0, -1.05), (1.08, 0.85), (-1.08, 0.85)]
    if shape == "star":
        outer, inner = _around(5, 1.2), _around(5, 0.46, math.pi / 5)
        return [corner for pair in zip(outer, inner, strict=True) for corner in pair]
    if shape == "cross":
        a, b = 0.32, 1.08
        quarter = [(a, -b), (a, -a), (b, -a)]
        return [_turned(corner, n) for n in range(4) for corner in quarter]
    raise ValueError(f"no such shape: {shape}")


def _around(count: int, radius: float, start: float = 0.0) -> list[tuple[float, float]]:
    angles = [start + 2 * math.pi * n / count for n in range(count)]
    return [(radius * math.sin(angle), -radius * math.cos(angle)) for angle in angles]


def _turned(corner: tuple[float, float], quarters: int) -> tuple[float, float]:
    x, y = corner
    for _ in range(quarters):
        x, y = -y, x
    return x, y
