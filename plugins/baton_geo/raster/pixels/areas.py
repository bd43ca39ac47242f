"""Compute the area of pixels on the ground."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Protocol

Transform = Sequence[float]  # a, b, c, d, e, f
HECTARE = 10_000.0  # square metres
WGS84 = 6_378_137.0, 298.257223563  # semi-major axis, metres; inverse flattening


class PixelArea(Protocol):
    """The area of one pixel in each row of the scene, hectares."""

    def row(self, row: int) -> float: ...


class PlaneArea:
    """Pixels of a projected grid: all have |det| of the transform times the square of the unit.

    Args:
        factor: area on the ground, as a share of that.
    """

    def __init__(self, transform: Transform, metres: float, factor: float = 1.0) -> None:
        a, b, _, d, e, _ = transform
        self._hectares = abs(a * e - b * d) * metres**2 * factor / HECTARE

    def row(self, row: int) -> float:
        return self._hectares


class EllipsoidArea:
    """Pixels of a latitude-longitude grid: those of one row have the same area.

    The area between two parallels is that of the authalic sphere: a**2 * (q2 - q1) * longitudes / 2, with q
    from J. P. Snyder, Map Projections: A Working Manual (USGS Professional Paper 1395, 1987), equation 3-12.

    Args:
        radians: size of one unit of the CRS, radians.
        inverse_flattening: of the ellipsoid; 0 for a sphere.
    """

    def __init__(
        self, transform: Transform, radians: float, semi_major: float, inverse_flattening: float
    ) -> None:
        self._width = abs(transform[0]) * radians
        self._top, self._step = transform[5] * radians, transform[4] * radians
        self._semi_major = semi_major
        flattening = 1 / inverse_flattening if inverse_flattening else 0.0
        self._eccentricity = math.sqrt(flattening * (2 - flattening))

    def row(self, row: int) -> float:
        top, bottom = self._top + row * self._step, self._top + (row + 1) * self._step
        share = abs(self._q(top) - self._q(bottom)) / 2
        return self._semi_major**2 * share * self._width / HECTARE

    def _q(self, latitude: float) -> float:
        sine = math.sin(max(-math.pi / 2, min(math.pi / 2, latitude)))
        e = self._eccentricity
        if not e:
            return 2 * sine
        return (1 - e * e) * (sine / (1 - (e * sine) ** 2) + math.atanh(e * sine) / e)


def ground_area(around: Sequence[tuple[float, float]]) -> float:
    """Compute the area of a pixel on WGS 84, hectares, from the centres of its four neighbours.

    Args:
        around: longitude and latitude, degrees, of the neighbours to the left, right, top and bottom.
    """
    left, right, top, bottom = ([math.radians(degrees) for degrees in point] for point in around)
    middle = (left[1] + right[1]) / 2
    squared = (2 - 1 / WGS84[1]) / WGS84[1]
    bend = 1 - squared * math.sin(middle) ** 2
    along, across = (
        WGS84[0] * math.cos(middle) / math.sqrt(bend),
        WGS84[0] * (1 - squared) / math.pow(bend, 1.5),
    )
    (x, y), (u, v) = (
        (along * math.remainder(to[0] - of[0], 2 * math.pi), across * (to[1] - of[1]))
        for of, to in ((left, right), (top, bottom))
    )
    return abs(x * v - y * u) / 4 / HECTARE


def ellipsoid(wkt: str) -> tuple[float, float] | None:
    """Read the semi-major axis in metres and the inverse flattening from a CRS's WKT, if it has them."""
    found = re.search(r'(?:SPHEROID|ELLIPSOID)\["[^"]*",([0-9.eE+]+),([0-9.eE+]+)', wkt)
    return (float(found[1]), float(found[2])) if found else None
