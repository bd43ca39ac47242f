"""Chance with names: one random stream for each thing drawn, so that leaving one out moves no other."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

Phenomenon: TypeAlias = Literal[
    "mixed",  # pixels part water, part land; without it each pixel is one or the other
    "emergent",  # plants standing in the water
    "shallow",  # the bottom seen through shallow water
    "turbid",  # sediment and algae in the water
    "glint",  # sky and sun mirrored by the water
    "urban",  # streets, roofs and roads
    "wet_soil",  # soil dark with water, mud
    "shade",  # hillsides turned from the sun and what they cast
    "haze",  # thin, smooth, bright
    "cloud",  # opaque
    "cloud_shadow",
    "noise",  # of the sensor
    "seam",  # lines along which a mosaic was joined
    "nodata",  # edges of the swath
]


@dataclass(frozen=True)
class Chance:
    """The random streams of one scene.

    Attributes:
        seed: of the scene.
        without: what is left out of it.
    """

    seed: int
    without: frozenset[Phenomenon] = frozenset()

    def of(self, name: str) -> np.random.Generator:
        """A fresh stream for `name`; the same seed and name give the same numbers."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def strikes(self, phenomenon: Phenomenon, probability: float = 1.0) -> bool:
        """Whether the scene has it."""
        drawn = self.of(f"whether {phenomenon}").random() < probability
        return bool(drawn) and phenomenon not in self.without
