"""Draw terrain and water: a valley with a river, its flood plain, lakes and hills."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.flood_scenes.noise import Field, Shape, covered, fractal, grid, shrink, smoothstep
from training.flood_scenes.random_streams import RandomStreams

FINE = 2  # shores are drawn at this many times the scene's resolution, then averaged
WET_FILM_M = 0.04  # less water than this on the ground is mud, not water


@dataclass(frozen=True)
class Ground:
    """One scene's surface; each array (height, width).

    Attributes:
        water: share of the pixel that is open water seen from above, 0..1.
        plants: share of the pixel that is plants standing in water, 0..1.
        depth: of the water, metres.
        above: height of the dry ground above the water nearby, metres.
        relief: height of the terrain, metres.
        plain: 1 in the flood plain, 0 in the hills.
    """

    water: Field
    plants: Field
    depth: Field
    above: Field
    relief: Field
    plain: Field


def draw_ground(streams: RandomStreams, shape: Shape) -> Ground:
    """Draw terrain and water of a scene of `shape` (height, width)."""
    fine = (shape[0] * FINE, shape[1] * FINE)
    rng = streams.stream("ground")
    middle = _winding_line(rng, fine)
    half_plain = rng.uniform(50, 160)
    hills = smoothstep(np.abs(middle), half_plain, 2.2 * half_plain)
    lakes = _lakes(rng, fine)
    # The hills come down to the lakes.
    relief = _hills(rng, fine, hills) * smoothstep(-lakes, 0, 5)
    flood = _flood(rng, fine, np.abs(middle) / half_plain, relief)
    level = np.maximum(np.maximum(_river(rng, fine, middle), lakes), flood)
    share = covered(level)
    water = shrink(share, FINE)
    if "mixed" in streams.without:
        water = np.asarray((water >= 0.5).astype(np.float64))
    depth = shrink(np.where(level > 0, level + WET_FILM_M, 0) * share, FINE) / (shrink(share, FINE) + 1e-6)
    standing = _plants(streams, shape, depth)
    return Ground(
        water=water * (1 - standing),
        plants=water * standing,
        depth=depth,
        above=shrink(np.maximum(-level, 0), FINE),
        relief=shrink(relief * (1 - share), FINE),
        plain=1 - shrink(hills, FINE),
    )


def _winding_line(rng: np.random.Generator, fine: Shape) -> Field:
    """Return each pixel's signed distance from a winding line through the scene, in scene pixels.

    The line is where a tilted plane and smooth noise add up to 0. The value divided by the slope approximates
    the distance (the first-order estimate of Taubin 1994).
    """
    rows, columns = grid(fine, 1 / FINE)
    angle, shift = rng.uniform(0, 2 * np.pi), rng.uniform(-0.15, 0.15) * min(fine) / FINE
    meanders = fractal(rng, fine, largest=FINE * rng.uniform(110, 220), smallest=FINE * 30, slope=4.5)
    plane = rows * np.cos(angle) + columns * np.sin(angle) + shift + rng.uniform(12, 38) * meanders
    down, right = np.gradient(plane, 1 / FINE)
    return np.asarray(plane / np.maximum(np.hypot(down, right), 0.35))


def _hills(rng: np.random.Generator, fine: Shape, hills: Field) -> Field:
    """Draw terrain height in metres; nearly 0 in the valley."""
    ridges = 2.5 - np.abs(fractal(rng, fine, largest=FINE * 140, smallest=FINE * 10, slope=4.0))
    rough = fractal(rng, fine, largest=FINE * 40, smallest=FINE * 4, slope=3.4)
    return np.asarray(hills * (rng.uniform(15, 140) * np.maximum(ridges, 0) + 3 * rough))


def _river(rng: np.random.Generator, fine: Shape, middle: Field) -> Field:
    """Draw the river's depth in metres, with bars and narrows; negative beyond its banks."""
    if rng.random() < 0.12:
        return np.full(fine, -9.0)
    width = rng.uniform(5, 16) * np.exp(
        0.25 * fractal(rng, fine, largest=FINE * 150, smallest=FINE * 40, slope=4)
    )
    bars = 0.4 * fractal(rng, fine, largest=FINE * 60, smallest=FINE * 14, slope=3.8)
    return np.asarray(rng.uniform(1, 4) * (1 - (middle / width) ** 2) + np.minimum(bars, 0.3))


def _lakes(rng: np.random.Generator, fine: Shape) -> Field:
    """Draw the depth of lakes and ponds in metres; negative on land."""
    hollows = fractal(rng, fine, largest=FINE * rng.uniform(80, 220), smallest=FINE * 22, slope=4.4)
    shore = np.quantile(hollows, 1 - rng.uniform(0.01, 0.08))
    return np.asarray((hollows - shore) * rng.uniform(3, 10))


def _flood(rng: np.random.Generator, fine: Shape, across: Field, relief: Field) -> Field:
    """Draw the depth of the flood on the plain in metres; it covers the lowest part of the scene.

    Args:
        rng: source of random numbers.
        fine: (height, width).
        across: distance from the valley's middle, in half widths of the plain.
        relief: terrain height, metres.
    """
    uneven = fractal(rng, fine, largest=FINE * 140, smallest=FINE * 16, slope=4.2)
    surface = 4.0 * np.minimum(across, 3) ** 2 + rng.uniform(0.4, 1.1) * uneven + relief
    return np.asarray(np.quantile(surface, rng.uniform(0.15, 0.36)) - surface)


def _plants(streams: RandomStreams, shape: Shape, depth: Field) -> Field:
    """Draw the share of the water hidden by plants standing in it, where it is shallow; 0..1."""
    if not streams.occurs("emergent", 0.5):
        return np.zeros(shape)
    rng = streams.stream("emergent")
    patches = fractal(rng, shape, largest=80, smallest=14, slope=4.0)
    start = float(np.quantile(patches, rng.uniform(0.92, 0.98)))
    return np.asarray(0.9 * smoothstep(patches, start, start + 0.25) * (1 - smoothstep(depth, 0.5, 1.0)))
