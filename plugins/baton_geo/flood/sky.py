"""Light and air: shaded hillsides, haze, clouds and their shadows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton_geo.flood import spectra
from baton_geo.flood.chance import Chance
from baton_geo.flood.noise import Field, Shape, blur, fractal, smoothstep

PIXEL_M = 10.0
CAST_STEPS = 24  # pixels toward the sun that are looked at for something that casts a shadow


@dataclass(frozen=True)
class Sun:
    """Where the sun stands.

    Attributes:
        south: rows a step of one pixel toward the sun goes down; with `east` of length 1.
        east: columns it goes right.
        height: tangent of its elevation.
    """

    south: float
    east: float
    height: float


def draw_sun(chance: Chance) -> Sun:
    """In the south-east to south, as at a mid-morning overpass of the northern hemisphere."""
    rng = chance.of("sun")
    azimuth, elevation = np.radians(rng.uniform(110, 180)), np.radians(rng.uniform(32, 60))
    return Sun(-float(np.cos(azimuth)), float(np.sin(azimuth)), float(np.tan(elevation)))


def shade(surface: Field, relief: Field, sun: Sun) -> Field:
    """The surface with its slopes lit by sun and sky.

    Args:
        surface: reflectance, (6, height, width).
        relief: terrain height in metres, (height, width).
        sun: where it stands.
    """
    down, right = np.gradient(relief, PIXEL_M)
    # Lambert's cosine over that of level ground, for a normal of (-right, -down, 1).
    facing = (sun.height - down * sun.south - right * sun.east) / np.sqrt(1 + down**2 + right**2) / sun.height
    direct = np.clip(facing, 0, 1.6) * (1 - _cast(relief, sun))
    return _dimmed(surface, direct)


def _cast(relief: Field, sun: Sun) -> Field:
    """1 where higher ground stands before the sun, 0 elsewhere."""
    rise = np.full(relief.shape, -np.inf)
    for step in range(1, CAST_STEPS):
        shifted = np.roll(relief, (-round(step * sun.south), -round(step * sun.east)), axis=(0, 1))
        np.maximum(rise, shifted - step * PIXEL_M * sun.height, out=rise)
    return np.asarray(np.clip(blur(smoothstep(rise - relief, 0.0, 8.0), 1.0), 0, 1))


def _dimmed(surface: Field, direct: Field) -> Field:
    """The surface with `direct` of the sun's light left; the sky's light stays."""
    skylight = spectra.SKYLIGHT[:, None, None]
    return np.asarray(surface * (skylight + (1 - skylight) * direct))


def haze(chance: Chance, surface: Field) -> Field:
    """The scene through thin, smooth haze or cirrus: a little dimmer, and brighter by what that scatters."""
    if not chance.strikes("haze", 0.6):
        return surface
    rng = chance.of("haze")
    shape = (surface.shape[1], surface.shape[2])
    veil = fractal(rng, shape, largest=300, smallest=30, slope=3.2)
    thick = rng.uniform(0.1, 0.8) * smoothstep(veil, rng.uniform(-2.0, 0.3), 1.8)
    ice = rng.random()
    path = (1 - ice) * spectra.HAZE_PATH + ice * spectra.CIRRUS_PATH
    return np.asarray(surface * (1 - 0.25 * thick) + path[:, None, None] * thick)


def cloud_opacity(chance: Chance, shape: Shape) -> Field:
    """How much of the ground clouds hide, 0..1; none in some scenes."""
    if not chance.strikes("cloud", 0.75):
        return np.zeros(shape)
    rng = chance.of("cloud")
    mass = fractal(rng, shape, largest=rng.uniform(90, 200), smallest=10, slope=4.0)
    edge = float(np.quantile(mass, 1 - rng.uniform(0.02, 0.10)))
    return smoothstep(mass, edge - 0.04, edge + 0.08)


def cloud_shadow(chance: Chance, surface: Field, opacity: Field, sun: Sun) -> Field:
    """The ground with the shadows of clouds, thrown away from the sun by the clouds' height."""
    if not chance.strikes("cloud_shadow"):
        return surface
    reach = chance.of("cloud_shadow").uniform(300, 1200) / sun.height / PIXEL_M
    thrown = np.roll(opacity, (-round(reach * sun.south), -round(reach * sun.east)), axis=(0, 1))
    return _dimmed(surface, 1 - 0.9 * blur(thrown, 0.8))


def cloud(chance: Chance, surface: Field, opacity: Field) -> Field:
    """The scene with its clouds."""
    shape = (opacity.shape[0], opacity.shape[1])
    lumps = np.clip(0.95 + 0.13 * fractal(chance.of("cloud lumps"), shape, largest=40, smallest=3), 0.5, 1.3)
    return np.asarray(surface * (1 - opacity) + spectra.CLOUD[:, None, None] * lumps * opacity)
