"""Draw synthetic satellite scenes of floods with their truth: six bands as Prithvi takes them, 10 m pixels.

The truth is what an interpreter of the image could know. A pixel is water where open water is at least half
of its surface seen from above: water under standing plants is land, and so is water under a cloud that hides
at least half of the light, since no water is seen there. Haze, cloud shadow and terrain shade do not change
the truth. Outside the swath it is unknown.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, get_args

import numpy as np
import numpy.typing as npt

from training.flood_scenes import sky
from training.flood_scenes.cover import surface_reflectance
from training.flood_scenes.ground import draw_ground
from training.flood_scenes.random_streams import Phenomenon, RandomStreams
from training.flood_scenes.sensor import beyond_swath, digital, seams, seen_by_sensor

LAND, WATER, UNKNOWN = 0, 1, 255
PHENOMENA: Final[tuple[Phenomenon, ...]] = get_args(Phenomenon)


@dataclass(frozen=True)
class SyntheticScene:
    """A scene and its truth.

    Attributes:
        pixels: int16 (6, height, width), reflectance x 10000; -9999 where there is no data.
        label: uint8 (height, width): 0 land, 1 water, 255 unknown.
    """

    pixels: npt.NDArray[np.int16]
    label: npt.NDArray[np.uint8]


def make_scene(
    seed: int, height: int = 512, width: int = 512, *, without: Collection[Phenomenon] = ()
) -> SyntheticScene:
    """Draw one scene; the same arguments give the same bytes.

    Args:
        seed: not negative.
        height: at least 16, pixels.
        width: at least 16, pixels.
        without: phenomena to leave out; the rest of the scene stays the same.

    Raises:
        ValueError: the seed is negative, the scene too small, or a phenomenon unknown.
    """
    if seed < 0 or min(height, width) < 16 or not set(without) <= set(PHENOMENA):
        raise ValueError("a scene needs a seed of 0 or more, 16 pixels a side, and known phenomena")
    streams = RandomStreams(seed, frozenset(without))
    ground, sun = draw_ground(streams, (height, width)), sky.draw_sun(streams)
    light = surface_reflectance(streams, ground)
    if streams.occurs("shade"):
        light = sky.shade(light, ground.relief, sun)
    opacity = sky.cloud_opacity(streams, (height, width))
    light = sky.haze(streams, sky.cloud_shadow(streams, light, opacity, sun))
    light = seams(streams, seen_by_sensor(streams, sky.cloud(streams, light, opacity)))
    missing = beyond_swath(streams, (height, width))
    water = (ground.water >= 0.5) & (opacity < 0.5)
    label = np.where(missing, UNKNOWN, np.where(water, WATER, LAND)).astype(np.uint8)
    return SyntheticScene(digital(light, missing), label)
