from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from geo.raster.made import make_card, run, sign_model, write_tiff
from rasterio import CRS, Affine
from rasterio.warp import transform as reproject

from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest
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


@pytest.mark.parametrize(
    ("crs", "transform"),
    [
        ("EPSG:3395", (10, 0, 1_525_000, 0, -10, 5_780_000)),  # World Mercator
        ("EPSG:3857", (10, 0, 1_525_000, 0, -10, 5_780_000)),
        ("EPSG:4087", (10, 0, 1_525_000, 0, -10, 5_120_000)),  # degrees times a constant
        ("EPSG:3395", (7, 7, 1_525_000, 7, -7, 5_780_000)),  # turned by 45 degrees
    ],
)
def test_areas_are_those_on_the_ground(
    decoders: Decoders, tmp_path: Path, crs: str, transform: tuple[float, ...]
) -> None:
    """At the centre of the scene, against an equal-area projection; with a note that has both sizes."""
    path = write_tiff(
        tmp_path / "a.tif", np.ones((1, 20, 20), "uint8"), crs=crs, transform=Affine(*transform)
    )
    with decoders.open(path, SceneRequest(card=make_card())) as scene:
        assert sum(note.startswith("areas_scaled: ") for note in scene.info.notes) == 1
        found = sum(area.hectares or 0.0 for area in run(scene, sign_model).areas)
    a, b, c, d, e, f = transform
    corners = [(0, 0), (20, 0), (20, 20), (0, 20)]
    xs, ys = reproject(
        CRS.from_string(crs),
        CRS.from_epsg(6933),
        [a * x + b * y + c for x, y in corners],
        [d * x + e * y + f for x, y in corners],
    )[:2]
    ring = list(zip(xs, ys, strict=True))
    twice = sum(x * v - u * y for (x, y), (u, v) in zip(ring, ring[1:] + ring[:1], strict=True))
    assert found == pytest.approx(abs(twice) / 2 / 10_000, rel=1e-4)


@pytest.mark.parametrize("crs", ["EPSG:32633", "EPSG:6933", "EPSG:3035"])
def test_areas_that_are_right_are_left_alone(decoders: Decoders, tmp_path: Path, crs: str) -> None:
    """UTM within 1 %, and equal-area projections, have the area of the plane and no note."""
    place = {
        "EPSG:32633": (500_000, 5_000_000),
        "EPSG:6933": (1_400_000, 5_200_000),
        "EPSG:3035": (4_400_000, 2_900_000),
    }
    x, y = place[crs]
    transform = Affine(10, 0, x, 0, -10, y)
    path = write_tiff(tmp_path / "a.tif", np.ones((1, 20, 20), "uint8"), crs=crs, transform=transform)
    with decoders.open(path, SceneRequest(card=make_card())) as scene:
        assert not any("areas" in note for note in scene.info.notes)
        assert sum(area.hectares or 0.0 for area in run(scene, sign_model).areas) == pytest.approx(4.0)


def test_three_dimensional_degrees_have_areas(decoders: Decoders, tmp_path: Path) -> None:
    """EPSG:4979 is latitude, longitude and height: the areas of EPSG:4326."""
    found = []
    for crs in ("EPSG:4326", "EPSG:4979"):
        transform = Affine(1e-4, 0, 13.7, 0, -1e-4, 46.0)
        path = write_tiff(tmp_path / "a.tif", np.ones((1, 20, 20), "uint8"), crs=crs, transform=transform)
        with decoders.open(path, SceneRequest(card=make_card())) as scene:
            found.append([area.hectares for area in run(scene, sign_model).areas])
    assert found[0] == found[1]
    assert found[0][1] == pytest.approx(3.444, abs=0.001)


@pytest.mark.parametrize("crs", ["EPSG:32633", "EPSG:3395", "EPSG:3031"])
def test_a_scene_that_is_nowhere_has_the_planes_areas(decoders: Decoders, tmp_path: Path, crs: str) -> None:
    """A billion kilometres off: said, and no more is known of the ground."""
    transform = Affine(10, 0, 1e12, 0, -10, 1e12)
    path = write_tiff(tmp_path / "a.tif", np.ones((1, 20, 20), "uint8"), crs=crs, transform=transform)
    with decoders.open(path, SceneRequest(card=make_card())) as scene:
        products = run(scene, sign_model)
    assert any(note.startswith("off_earth: ") for note in scene.info.notes)
    assert sum(area.hectares or 0.0 for area in products.areas) > 0
