"""Simulate light and air: shaded hillsides, haze, clouds and their shadows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.flood_scenes import spectra
from training.flood_scenes.noise import Field, Shape, blur, fractal, smoothstep
from training.flood_scenes.random_streams import RandomStreams

PIXEL_M = 10.0
CAST_STEPS = 24  # pixels toward the sun within which higher ground casts a shadow


@dataclass(frozen=True)
class Sun:
    """The position of the sun.

    Attributes:
        south: rows that one pixel toward the sun goes down; (south, east) has length 1.
        east: columns that it goes right.
        height: tangent of the sun's elevation.
    """

    south: float
    east: float
    height: float


def draw_sun(streams: RandomStreams) -> Sun:
    """Draw a sun in the south-east to south, as at a mid-morning overpass of the northern hemisphere."""
    rng = streams.stream("sun")
    azimuth, elevation = np.radians(rng.uniform(110, 180)), np.radians(rng.uniform(32, 60))
    return Sun(-float(np.cos(azimuth)), float(np.sin(azimuth)), float(np.tan(elevation)))


def shade(surface: Field, relief: Field, sun: Sun) -> Field:
    """Light the slopes of a surface by sun and sky.

    Args:
        surface: reflectance, (6, height, width).
        relief: terrain height in metres, (height, width).
        sun: position of the sun.
    """
    down, right = np.gradient(relief, PIXEL_M)
    # Lambert's cosine over that of level ground, for a normal of (-right, -down, 1).
    facing = (sun.height - down * sun.south - right * sun.east) / np.sqrt(1 + down**2 + right**2) / sun.height
    direct = np.clip(facing, 0, 1.6) * (1 - _cast(relief, sun))
    return _dimmed(surface, direct)


def _cast(relief: Field, sun: Sun) -> Field:
    """Return 1 where higher ground hides the sun, 0 elsewhere."""
    rise = np.full(relief.shape, -np.inf)
    for step in range(1, CAST_STEPS):
        shifted = np.roll(relief, (-round(step * sun.south), -round(step * sun.east)), axis=(0, 1))
        np.maximum(rise, shifted - step * PIXEL_M * sun.height, out=rise)
    return np.asarray(np.clip(blur(smoothstep(rise - relief, 0.0, 8.0), 1.0), 0, 1))


def _dimmed(surface: Field, direct: Field) -> Field:
    """Dim the surface: `direct` is the share of sunlight left; skylight stays."""
    skylight = spectra.SKYLIGHT[:, None, None]
    return np.asarray(surface * (skylight + (1 - skylight) * direct))


def haze(streams: RandomStreams, surface: Field) -> Field:
    """Add thin, smooth haze or cirrus: it dims the surface slightly and adds scattered light."""
    if not streams.occurs("haze", 0.6):
        return surface
    rng = streams.stream("haze")
    shape = (surface.shape[1], surface.shape[2])
    veil = fractal(rng, shape, largest=300, smallest=30, slope=3.2)
    thick = rng.uniform(0.1, 0.8) * smoothstep(veil, rng.uniform(-2.0, 0.3), 1.8)
    ice = rng.random()
    path = (1 - ice) * spectra.HAZE_PATH + ice * spectra.CIRRUS_PATH
    return np.asarray(surface * (1 - 0.25 * thick) + path[:, None, None] * thick)


def cloud_opacity(streams: RandomStreams, shape: Shape) -> Field:
    """Return the share of the ground that clouds hide, 0..1; some scenes have none."""
    if not streams.occurs("cloud", 0.75):
        return np.zeros(shape)
    rng = streams.stream("cloud")
    mass = fractal(rng, shape, largest=rng.uniform(90, 200), smallest=10, slope=4.0)
    edge = float(np.quantile(mass, 1 - rng.uniform(0.02, 0.10)))
    return smoothstep(mass, edge - 0.04, edge + 0.08)


def cloud_shadow(streams: RandomStreams, surface: Field, opacity: Field, sun: Sun) -> Field:
    """Add the shadows of clouds, shifted away from the sun by the clouds' height."""
    if not streams.occurs("cloud_shadow"):
        return surface
    reach = streams.stream("cloud_shadow").uniform(300, 1200) / sun.height / PIXEL_M
    thrown = np.roll(opacity, (-round(reach * sun.south), -round(reach * sun.east)), axis=(0, 1))
    return _dimmed(surface, 1 - 0.9 * blur(thrown, 0.8))


def cloud(streams: RandomStreams, surface: Field, opacity: Field) -> Field:
    """Add clouds."""
    shape = (opacity.shape[0], opacity.shape[1])
    lumps = np.clip(
        0.95 + 0.13 * fractal(streams.stream("cloud lumps"), shape, largest=40, smallest=3), 0.5, 1.3
    )
    return np.asarray(surface * (1 - opacity) + spectra.CLOUD[:, None, None] * lumps * opacity)
