"""What the instrument and the mosaic do: blur, noise, seams, edges of the swath, numbers of 16 bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton_geo.flood.chance import Chance
from baton_geo.flood.noise import Field, Shape, blur, grid

NODATA = -9999
UNIT = 10_000  # digital numbers for a reflectance of 1
LOWEST, HIGHEST = -2000, 20_000
BLUR_PIXELS = 0.45


def seen_by_sensor(chance: Chance, light: Field) -> Field:
    """Blurred a little and noisy; reflectance, (6, height, width)."""
    light = blur(light, BLUR_PIXELS)
    if not chance.strikes("noise"):
        return light
    rng = chance.of("noise")
    # A floor, and shot noise that grows with the root of the light.
    floor, shot = rng.uniform(0.001, 0.005, (6, 1, 1)), rng.uniform(0.002, 0.010)
    spread = np.sqrt(floor**2 + shot**2 * np.maximum(light, 0))
    columns = 1 + rng.normal(0, 0.004, (6, 1, light.shape[2]))
    return np.asarray(light * columns + spread * rng.standard_normal(light.shape))


def seams(chance: Chance, light: Field) -> Field:
    """Joined from two or three passes of slightly different gain and offset."""
    if not chance.strikes("seam", 0.6):
        return light
    rng = chance.of("seam")
    shape = (light.shape[1], light.shape[2])
    for _ in range(int(rng.integers(1, 3))):
        beyond = _side(rng, shape) > 0
        gain, offset = (
            rng.uniform(0.92, 1.08) + rng.normal(0, 0.015, (6, 1, 1)),
            rng.normal(0, 0.003, (6, 1, 1)),
        )
        light = np.where(beyond, light * gain + offset, light)
    return light


def beyond_swath(chance: Chance, shape: Shape) -> npt.NDArray[np.bool_]:
    """Where there is no data: outside a turned swath, in some scenes."""
    if not chance.strikes("nodata", 0.4):
        return np.zeros(shape, dtype=np.bool_)
    rng = chance.of("nodata")
    rows, columns = grid(shape)
    angle = rng.uniform(-0.35, 0.35) + rng.integers(4) * np.pi / 2
    along = rows * np.cos(angle) + columns * np.sin(angle)
    return np.asarray(along > rng.uniform(0.3, 0.48) * min(shape))


def digital(light: Field, missing: npt.NDArray[np.bool_]) -> npt.NDArray[np.int16]:
    """int16 digital numbers: reflectance x 10000, `NODATA` where missing."""
    numbers = np.clip(np.rint(light * UNIT), LOWEST, HIGHEST)
    return np.asarray(np.where(missing, NODATA, numbers).astype(np.int16))


def _side(rng: np.random.Generator, shape: Shape) -> Field:
    """A straight line through the scene, slightly turned from upright or level: which side, and how far."""
    rows, columns = grid(shape)
    angle = rng.normal(0, 0.12) + rng.integers(2) * np.pi / 2
    return np.asarray(columns * np.cos(angle) + rows * np.sin(angle) - rng.uniform(-0.35, 0.35) * min(shape))
