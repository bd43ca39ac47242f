"""One file a band: one grid, the warper's numbers, refusals where the files are not of one ground."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import rasterio
from geo.raster.made import NORTH_UP, UTM, make_card, read_tiff, read_tile, run, sign_model, write_tiff
from rasterio.enums import Resampling
from rasterio.warp import reproject, transform

from baton_geo.card import Band, Card
from baton_geo.errors import RasterUnusable
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import FileSpec, SceneRequest
from baton_geo.settings import GeoLimits

LIMITS = GeoLimits(tile_bytes=0)
SIDE = 240  # at 10 m


def card_of(*names: str, **more: dict[str, Any]) -> Card:
    bands = tuple(Band(name=name, mean=0.0, std=1.0, **more.get(name, {})) for name in names)
    return make_card(tile=64, overlap=16).model_copy(update={"bands": bands})


def pixels_of(seed: int, ratio: float = 1.0, dtype: str = "int16") -> npt.NDArray[Any]:
    side = round(SIDE / ratio)
    return (
        np.random.default_rng(seed)
        .integers(0 if dtype[0] == "u" else -900, 3000, (1, side, side))
        .astype(dtype)
    )


def saved(folder: Path, name: str, pixels: npt.NDArray[Any], ratio: float = 1.0, **options: Any) -> Path:
    a, _, x, _, e, y = (options.pop("transform", None) or NORTH_UP)[:6]
    transform = rasterio.Affine(a * ratio, 0, x, 0, e * ratio, y)
    return write_tiff(folder / f"{name}.tif", pixels, transform=transform, **options)


def request(card: Card, *names: str, **fields: Any) -> SceneRequest:
    return SceneRequest(
        card=card, limits=LIMITS, files=tuple(FileSpec(name=name) for name in names), **fields
    )


def whole(decoders: Decoders, files: list[Path], asked: SceneRequest) -> npt.NDArray[np.float32]:
    """All bands of a scene as the model sees them, put together of its tiles; 0 where it is unknown."""
    with decoders.open(files, asked) as scene:
        info = scene.info
        found = np.zeros((len(asked.card.bands), info.height, info.width), np.float32)
        from baton_geo.raster.pixels.grid import Grid

        grid = Grid(info.width, info.height, asked.card.tile, asked.card.overlap)
        for tile in range(info.tiles):
            row, column = grid.place(tile)
            y, x = grid.ys[row], grid.xs[column]
            part = read_tile(scene, tile)
            if part is not None:
                here = found[:, y : y + grid.tile, x : x + grid.tile]
                here[:] = part[:, 0, : here.shape[1], : here.shape[2]]
    return found


def warped(pixels: npt.NDArray[Any], ratio: float, side: int, how: Resampling, nodata: float | None) -> Any:
    """The same by GDAL's warper: a file's band on the scene's grid."""
    out = np.zeros((side, side), pixels.dtype)
    of_file = rasterio.Affine(10 * ratio, 0, 500_000, 0, -10 * ratio, 5_000_000)
    size = 10 * SIDE / side
    of_scene = rasterio.Affine(size, 0, 500_000, 0, -size, 5_000_000)
    reproject(
        pixels[0], out, src_transform=of_file, dst_transform=of_scene, src_crs=UTM, dst_crs=UTM,
        resampling=how, src_nodata=nodata, dst_nodata=nodata,
    )  # fmt: skip
    return out


def test_files_of_one_grid_are_one_file(decoders: Decoders, tmp_path: Path) -> None:
    """In whatever order they are named: the tiles and the mask are those of one file with all the bands."""
    card = card_of("BLUE", "GREEN", "RED")
    bands = [pixels_of(seed) for seed in range(3)]
    together = write_tiff(tmp_path / "all.tif", np.concatenate(bands), ("BLUE", "GREEN", "RED"))
    names = ["RED", "BLUE", "GREEN"]
    files = [saved(tmp_path, name, bands[["BLUE", "GREEN", "RED"].index(name)]) for name in names]
    with decoders.open(together, SceneRequest(card=card, limits=LIMITS)) as one:
        expected = run(one, sign_model)
        with decoders.open(files, request(card, *names)) as several:
            got = run(several, sign_model)
            assert several.info.transform == one.info.transform
            assert got.mask is not None
            assert expected.mask is not None
            np.testing.assert_array_equal(read_tiff(got.mask), read_tiff(expected.mask))
    assert got.areas == expected.areas


RATIOS = [(2.0, "bilinear"), (3.0, "bilinear"), (6.0, "bilinear"), (2.0, "nearest"), (6.0, "nearest")]


@pytest.mark.parametrize("dtype", ["int16", "uint16", "float32"])
@pytest.mark.parametrize(("ratio", "how"), RATIOS)
def test_coarser_bands_are_what_the_warper_makes_of_them(
    decoders: Decoders, tmp_path: Path, ratio: float, how: str, dtype: str
) -> None:
    """On the finest grid, in the file's own type, at the scene's edges and the tiles'."""
    card = card_of("RED", "SWIR_1", SWIR_1={"resampling": how})
    fine, coarse = pixels_of(1), pixels_of(2, ratio, dtype)
    files = [
        saved(tmp_path, "RED", fine),
        saved(tmp_path, "SWIR_1", coarse, ratio, blockysize=16, tiled=True, blockxsize=16),
    ]
    got = whole(decoders, files, request(card, "RED", "SWIR_1"))
    np.testing.assert_array_equal(got[0], fine[0])
    expected = warped(coarse, ratio, SIDE, Resampling[how], None)
    exact = warped(coarse.astype("float64"), ratio, SIDE, Resampling[how], None)
    halves = (np.abs(exact % 1 - 0.5) < 1e-6) & (dtype != "float32")
    np.testing.assert_allclose(got[1][~halves], expected[~halves], atol=1e-3 if dtype == "float32" else 0)
    assert np.abs(got[1] - expected)[halves].max(initial=0) <= 1, "a half is rounded either way"


@pytest.mark.parametrize("ratio", [0.5, 1 / 3])
def test_the_card_says_whose_pixels_are_the_masks(decoders: Decoders, tmp_path: Path, ratio: float) -> None:
    """A finer band that it does not mark is averaged onto the grid, as the warper does it."""
    card = card_of("RED", "SWIR_1", SWIR_1={"grid": True})
    fine, coarse = pixels_of(1, ratio), pixels_of(2)
    files = [saved(tmp_path, "RED", fine, ratio), saved(tmp_path, "SWIR_1", coarse)]
    got = whole(decoders, files, request(card, "RED", "SWIR_1"))
    np.testing.assert_array_equal(got[1], coarse[0])
    expected = warped(fine, ratio, SIDE, Resampling.bilinear, None)
    assert np.abs(got[0] - expected).max() <= 1, "a rounding of the warper's weights in single precision"
    assert (got[0] != expected).mean() < 1e-3


def test_nodata_of_each_file_is_its_own(decoders: Decoders, tmp_path: Path) -> None:
    """Unknown where the pixel below is; known neighbours are blended of what is known."""
    card = card_of("RED", "SWIR_1")
    fine, coarse = pixels_of(1), pixels_of(2, 2.0, "float32")
    fine[0, :40, :40], coarse[0, 60:80, 60:80] = -999, -32768.0
    files = [
        saved(tmp_path, "RED", fine, nodata=-999),
        saved(tmp_path, "SWIR_1", coarse, 2.0, nodata=-32768.0),
    ]
    got = whole(decoders, files, request(card, "RED", "SWIR_1"))
    hidden = np.zeros((SIDE, SIDE), np.bool_)
    hidden[:40, :40] = hidden[120:160, 120:160] = True
    assert not got[:, hidden].any()
    expected = warped(coarse, 2.0, SIDE, Resampling.bilinear, -32768.0)
    np.testing.assert_allclose(got[1][~hidden], expected[~hidden], atol=1e-3)


def test_the_cards_nodata_is_not_blended_into_its_neighbours(decoders: Decoders, tmp_path: Path) -> None:
    """Of a file that states none."""
    card = card_of("RED", "SWIR_1").model_copy(update={"nodata": -999})
    fine, coarse = pixels_of(1), pixels_of(2, 2.0, "float32")
    coarse[0, 60:80, 60:80] = -999
    files = [saved(tmp_path, "RED", fine), saved(tmp_path, "SWIR_1", coarse, 2.0)]
    got = whole(decoders, files, request(card, "RED", "SWIR_1"))
    hidden = np.zeros((SIDE, SIDE), np.bool_)
    hidden[120:160, 120:160] = True
    expected = warped(coarse, 2.0, SIDE, Resampling.bilinear, -999)
    np.testing.assert_allclose(got[1][~hidden], expected[~hidden], atol=1e-3)


def test_each_type_is_read_in_its_own_unit(decoders: Decoders, tmp_path: Path) -> None:
    """Integers of reflectance x 10000 beside floats of reflectance, for a card that knows both."""
    card = card_of("RED", "SWIR_1").model_copy(update={"scale": 0.0001, "float_scale": 1.0})
    numbers = pixels_of(4)
    files = [saved(tmp_path, "RED", numbers), saved(tmp_path, "SWIR_1", numbers.astype("float32") / 10_000)]
    got = whole(decoders, files, request(card, "RED", "SWIR_1"))
    np.testing.assert_allclose(got[0], got[1], atol=1e-6)


@pytest.mark.parametrize("south_up", [False, True])
def test_a_part_of_several_files_is_that_part(decoders: Decoders, tmp_path: Path, south_up: bool) -> None:
    """Coarser pixels beyond the part count at its edge, so it is what the whole scene has there."""
    card = card_of("RED", "SWIR_1")
    up = rasterio.Affine(10, 0, 500_000, 0, 10, 4_000_000) if south_up else NORTH_UP
    files = [
        saved(tmp_path, "RED", pixels_of(1), transform=up),
        saved(tmp_path, "SWIR_1", pixels_of(2, 2.0), 2.0, transform=up),
    ]
    every = whole(decoders, files, request(card, "RED", "SWIR_1"))
    part = whole(decoders, files, request(card, "RED", "SWIR_1", window=(33, 51, 101, 77)))
    np.testing.assert_array_equal(part, every[:, 51 : 51 + 77, 33 : 33 + 101])


OFF: list[tuple[dict[str, Any], float, str]] = [
    ({"crs": "EPSG:32634"}, 1.0, "'RED' is in EPSG:32633, 'SWIR_1' in EPSG:32634"),
    ({"transform": rasterio.Affine(10, 0, 500_005, 0, -10, 5_000_000)}, 1.0, "do not cover the same ground"),
    ({}, 1.5, "has to be a whole number"),
]


@pytest.mark.fault("F20")
@pytest.mark.parametrize(("options", "ratio", "says"), OFF)
def test_files_of_other_grounds_are_refused(
    decoders: Decoders, tmp_path: Path, options: dict[str, Any], ratio: float, says: str
) -> None:
    """By the names of both, and with what does not fit."""
    files = [
        saved(tmp_path, "RED", pixels_of(1)),
        saved(tmp_path, "SWIR_1", pixels_of(2, ratio), ratio, **options),
    ]
    with pytest.raises(RasterUnusable, match=says):
        decoders.open(files, request(card_of("RED", "SWIR_1"), "RED", "SWIR_1"))


@pytest.mark.fault("F20")
def test_a_missing_file_is_named(decoders: Decoders, tmp_path: Path) -> None:
    """As a missing band of one file is."""
    files = [saved(tmp_path, "RED", pixels_of(1)), saved(tmp_path, "BLUE", pixels_of(2))]
    with pytest.raises(RasterUnusable, match="'SWIR_1' is missing"):
        decoders.open(files, request(card_of("RED", "SWIR_1"), "RED", "BLUE"))


TURNS: list[tuple[dict[str, Any], tuple[float, ...], str, tuple[int, int, int, int]]] = [
    (
        {"crs": "EPSG:4326", "transform": rasterio.Affine(0.001, 0, 179.9, 0, -0.001, 10)},
        (179.95, 9.9, -179.9, 9.95),
        "EPSG:4326",
        (50, 50, 150, 50),
    ),
    (
        {"crs": "EPSG:4326", "transform": rasterio.Affine(0.001, 0, -180.1, 0, -0.001, 10)},
        (179.95, 9.9, -179.95, 9.95),
        "EPSG:4326",
        (50, 50, 100, 50),
    ),
    (
        {"transform": rasterio.Affine(10, 0, 500_000, 0, 10, 5_000_000)},
        (500_100, 5_000_200, 500_305, 5_000_401),
        "EPSG:32633",
        (10, 20, 21, 21),
    ),
]


@pytest.mark.parametrize(("place", "box", "crs", "window"), TURNS)
def test_a_box_is_found_on_any_grid(
    decoders: Decoders,
    tmp_path: Path,
    place: dict[str, Any],
    box: tuple[float, ...],
    crs: str,
    window: tuple[int, int, int, int],
) -> None:
    """Across the antimeridian, on either side of it, and on a grid whose rows go north."""
    path = write_tiff(tmp_path / "a.tif", pixels_of(1), **place)
    asked = SceneRequest(card=card_of("RED"), limits=LIMITS, bbox=box, bbox_crs=crs)
    with decoders.open(path, asked) as scene:
        assert scene.info.window == window


def test_a_box_in_degrees_covers_what_it_holds(decoders: Decoders, tmp_path: Path) -> None:
    """On a projected grid: every pixel of the scene whose centre lies in the box, and few others."""
    path = write_tiff(tmp_path / "a.tif", pixels_of(1))
    box = (15.005, 45.14, 15.015, 45.15)
    with decoders.open(path, SceneRequest(card=card_of("RED"), limits=LIMITS, bbox=box)) as scene:
        assert scene.info.window is not None
        left, top, width, height = scene.info.window
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    xs, ys = 500_000 + 10 * columns.ravel(), 5_000_000 - 10 * rows.ravel()
    east, north = (np.array(part).reshape(SIDE, SIDE) for part in transform(UTM, "EPSG:4326", xs, ys))
    inside = (east > box[0]) & (east < box[2]) & (north > box[1]) & (north < box[3])
    found = np.zeros_like(inside)
    found[top : top + height, left : left + width] = True
    assert inside.any()
    assert not (inside & ~found).any()
    assert found.sum() < 1.1 * inside.sum() + 4 * SIDE


WRONG_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"bbox": (0.0, 0.0, 1.0, 1.0)}, "no pixel in common"),
    ({"bbox": (15.0, 45.1, 15.01, 45.11), "bbox_crs": "EPSG:999999"}, "is not known here"),
    ({"window": (200, 0, 100, 10)}, "has 240 columns"),
]


@pytest.mark.parametrize(("part", "says"), WRONG_PARTS)
def test_a_part_that_is_not_there_is_refused(
    decoders: Decoders, tmp_path: Path, part: dict[str, Any], says: str
) -> None:
    """In words, with the field's name."""
    path = write_tiff(tmp_path / "a.tif", pixels_of(1))
    with pytest.raises(RasterUnusable, match=says) as caught:
        decoders.open(path, SceneRequest(card=card_of("RED"), limits=LIMITS, **part))
    assert caught.value.param in part
