"""Draw random numbers from one named stream per feature, so that leaving one out changes no other."""

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
class RandomStreams:
    """The random streams of one scene.

    Attributes:
        seed: of the scene.
        without: phenomena to leave out.
    """

    seed: int
    without: frozenset[Phenomenon] = frozenset()

    def stream(self, name: str) -> np.random.Generator:
        """Return a fresh stream for `name`; the same seed and name give the same numbers."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def occurs(self, phenomenon: Phenomenon, probability: float = 1.0) -> bool:
        """Decide whether the scene has a phenomenon."""
        drawn = self.stream(f"whether {phenomenon}").random() < probability
        return bool(drawn) and phenomenon not in self.without
