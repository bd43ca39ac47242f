"""Simulate the instrument and the mosaic: blur, noise, seams, edges of the swath, 16-bit numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from training.flood_scenes.noise import Field, Shape, blur, grid
from training.flood_scenes.random_streams import RandomStreams

NODATA = -9999
UNIT = 10_000  # digital numbers for a reflectance of 1
LOWEST, HIGHEST = -2000, 20_000
BLUR_PIXELS = 0.45


def seen_by_sensor(streams: RandomStreams, light: Field) -> Field:
    """Blur reflectance (6, height, width) slightly and add noise."""
    light = blur(light, BLUR_PIXELS)
    if not streams.occurs("noise"):
        return light
    rng = streams.stream("noise")
    # A floor, and shot noise that grows with the root of the light.
    floor, shot = rng.uniform(0.001, 0.005, (6, 1, 1)), rng.uniform(0.002, 0.010)
    spread = np.sqrt(floor**2 + shot**2 * np.maximum(light, 0))
    columns = 1 + rng.normal(0, 0.004, (6, 1, light.shape[2]))
    return np.asarray(light * columns + spread * rng.standard_normal(light.shape))


def seams(streams: RandomStreams, light: Field) -> Field:
    """Join the scene from two or three passes of slightly different gain and offset."""
    if not streams.occurs("seam", 0.6):
        return light
    rng = streams.stream("seam")
    shape = (light.shape[1], light.shape[2])
    for _ in range(int(rng.integers(1, 3))):
        beyond = _side(rng, shape) > 0
        gain, offset = (
            rng.uniform(0.92, 1.08) + rng.normal(0, 0.015, (6, 1, 1)),
            rng.normal(0, 0.003, (6, 1, 1)),
        )
        light = np.where(beyond, light * gain + offset, light)
    return light


def beyond_swath(streams: RandomStreams, shape: Shape) -> npt.NDArray[np.bool_]:
    """Return where there is no data: outside a rotated swath, in some scenes."""
    if not streams.occurs("nodata", 0.4):
        return np.zeros(shape, dtype=np.bool_)
    rng = streams.stream("nodata")
    rows, columns = grid(shape)
    angle = rng.uniform(-0.35, 0.35) + rng.integers(4) * np.pi / 2
    along = rows * np.cos(angle) + columns * np.sin(angle)
    return np.asarray(along > rng.uniform(0.3, 0.48) * min(shape))


def digital(light: Field, missing: npt.NDArray[np.bool_]) -> npt.NDArray[np.int16]:
    """Convert reflectance to int16 digital numbers: x 10000, `NODATA` where missing."""
    numbers = np.clip(np.rint(light * UNIT), LOWEST, HIGHEST)
    return np.asarray(np.where(missing, NODATA, numbers).astype(np.int16))


def _side(rng: np.random.Generator, shape: Shape) -> Field:
    """Return each pixel's signed distance from a nearly vertical or horizontal line through the scene."""
    rows, columns = grid(shape)
    angle = rng.normal(0, 0.12) + rng.integers(2) * np.pi / 2
    return np.asarray(columns * np.cos(angle) + rows * np.sin(angle) - rng.uniform(-0.35, 0.35) * min(shape))
