"""Measure how well masks agree with the truth, by intersection over union (Jaccard) of the water."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from training.flood_scenes.scenes import UNKNOWN, WATER, SyntheticScene, make_scene

Mask: TypeAlias = npt.NDArray[np.bool_]
Method: TypeAlias = Callable[[npt.NDArray[np.int16]], Mask]
"""Maps digital numbers (6, height, width) to a mask of the water (height, width)."""
ScenesBySeed: TypeAlias = Mapping[int, SyntheticScene]
"""Scenes by their seeds."""


@dataclass(frozen=True)
class Figures:
    """Intersection over union of one method on some scenes.

    Attributes:
        pooled: over the pixels of all scenes together.
        worst: of the scene where it is lowest.
        scenes: of each scene, by seed.
    """

    pooled: float
    worst: float
    scenes: dict[int, float]


def draw_scenes(seeds: Iterable[int], *, size: int = 512, processes: int = 2) -> dict[int, SyntheticScene]:
    """Draw the scenes of these seeds, `size` x `size` pixels each, in several processes."""
    seeds = list(seeds)
    with ProcessPoolExecutor(processes) as pool:
        drawn = pool.map(make_scene, seeds, [size] * len(seeds), [size] * len(seeds))
        return dict(zip(seeds, drawn, strict=True))


def figures(method: Method, scenes: ScenesBySeed) -> Figures:
    """Measure a method; pixels whose truth is unknown are left out.

    Raises:
        ValueError: there are no scenes.
    """
    if not scenes:
        raise ValueError("no scenes to measure on")
    counts = {seed: _agreement(method(scene.pixels), scene.label) for seed, scene in scenes.items()}
    each = {seed: both / max(either, 1) for seed, (both, either) in counts.items()}
    both, either = (sum(column) for column in zip(*counts.values(), strict=True))
    return Figures(both / max(either, 1), min(each.values()), each)


def _agreement(mask: Mask, label: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Count the pixels that are water in both, and in either."""
    known, water = label != UNKNOWN, label == WATER
    return int((mask & water & known).sum()), int(((mask | water) & known).sum())
