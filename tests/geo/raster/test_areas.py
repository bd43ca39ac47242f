from __future__ import annotations

import math

import numpy as np
import pytest

from baton_geo.raster.pixels.areas import EllipsoidArea, PlaneArea, ellipsoid

WGS84 = 6378137.0, 298.257223563


def test_a_ten_metre_pixel() -> None:
    """A hundred square metres are a hundredth of a hectare."""
    assert PlaneArea((10, 0, 5e5, 0, -10, 5e6), 1.0).row(7) == pytest.approx(0.01)


def test_a_rotated_grid_in_feet() -> None:
    """A grid turned by 30 degrees keeps its area; a US survey foot is 1200/3937 m."""
    cosine, sine = math.cos(math.radians(30)), math.sin(math.radians(30))
    area = PlaneArea((100 * cosine, 100 * sine, 0, 100 * sine, -100 * cosine, 0), 1200 / 3937)
    assert area.row(0) == pytest.approx(100 * 100 * (1200 / 3937) ** 2 / 10_000)


def test_the_whole_earth() -> None:
    """The rows of a one-degree grid add up to the area of WGS 84: 510 065 621.724 km²."""
    area = EllipsoidArea((1, 0, -180, 0, -1, 90), math.radians(1), *WGS84)
    total = 360 * math.fsum(area.row(row) for row in range(180))
    assert total / 100 == pytest.approx(510_065_621.724, rel=1e-9)


@pytest.mark.parametrize("south", [0.0, 45.0, 89.0, -60.0])
def test_a_degree_by_integration(south: float) -> None:
    """A one-degree cell is the integral of both radii of curvature over it."""
    semi_major, flattening = WGS84[0], 1 / WGS84[1]
    squared = flattening * (2 - flattening)
    latitudes = np.radians(np.linspace(south, south + 1, 20_001))
    bend = 1 - squared * np.sin(latitudes) ** 2
    strip = semi_major**2 * (1 - squared) * np.cos(latitudes) / bend**2  # meridian radius * parallel radius
    expected = np.trapezoid(strip, latitudes) * math.radians(1) / 10_000
    area = EllipsoidArea((1, 0, 0, 0, -1, south + 1), math.radians(1), *WGS84)
    assert area.row(0) == pytest.approx(expected, rel=1e-8)


def test_a_sphere() -> None:
    """On a sphere the area is that of Archimedes: r² times longitudes times the difference of the sines."""
    area = EllipsoidArea((1, 0, 0, 0, -1, 60), math.radians(1), 6_371_000.0, 0.0)
    expected = (
        6_371_000**2 * math.radians(1) * (math.sin(math.radians(60)) - math.sin(math.radians(59))) / 1e4
    )
    assert area.row(0) == pytest.approx(expected, rel=1e-12)


def test_ellipsoid_of_a_crs() -> None:
    """The axes are those the CRS names, and None where it names none."""
    assert ellipsoid('GEOGCS["x",DATUM["y",SPHEROID["Bessel 1841",6377397.155,299.1528128]]]') == (
        6377397.155,
        299.1528128,
    )
    assert ellipsoid('LOCAL_CS["x"]') is None
