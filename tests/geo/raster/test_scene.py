from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import rasterio
from geo.raster.made import (
    NORTH_UP,
    make_card,
    raw_tiff,
    read_tiff,
    read_tile,
    run,
    sign_model,
    write_strips,
    write_tiff,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton_geo.card import Band, Card
from baton_geo.errors import RasterTooLarge, RasterUnusable
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest
from baton_geo.raster.pixels.grid import Grid
from baton_geo.settings import GeoLimits

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"compress": "deflate", "interleave": "pixel"},
    {"compress": "lzw", "interleave": "band"},
    {"tiled": True, "blockxsize": 16, "blockysize": 16, "compress": "zstd"},
    {"tiled": True, "blockxsize": 64, "blockysize": 32, "interleave": "pixel", "bigtiff": "YES"},
    {"tiled": True, "blockxsize": 48, "blockysize": 48, "endianness": "BIG"},
)


def is_nodata(pixels: npt.NDArray[Any], nodata: float | None) -> npt.NDArray[np.bool_]:
    """Where (bands, height, width) is nodata in a band; where nodata is 0, in all bands."""
    marked = np.zeros(pixels.shape, np.bool_) if nodata is None else pixels == nodata
    hidden: npt.NDArray[np.bool_] = marked.all(axis=0) if nodata == 0 else marked.any(axis=0)
    return hidden


def plain_tile(
    pixels: npt.NDArray[Any], nodata: float | None, grid: Grid, tile: int
) -> npt.NDArray[np.float64] | None:
    """What a tile of (bands, height, width) should be, said another way: None, or (bands, tile, tile)."""
    row, column = grid.place(tile)
    y, x, side = grid.ys[row], grid.xs[column], grid.tile
    part = pixels[:, y : y + side, x : x + side].astype(np.float64)
    hidden = ~np.isfinite(part).all(axis=0) | is_nodata(part, nodata)
    if hidden.all():
        return None
    part[:, hidden] = 0
    return np.pad(part, [(0, 0), (0, side - part.shape[1]), (0, side - part.shape[2])], mode="edge")


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tiles_are_the_file(decoders: Decoders, tmp_path: Path, data: st.DataObject) -> None:
    """Whatever the size, type, layout, nodata and overlap: each tile holds the file's pixels, the mask their signs."""
    width, height = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 150))
    dtype, layout = np.dtype(data.draw(st.sampled_from(DTYPES))), data.draw(st.sampled_from(LAYOUTS))
    nodata = data.draw(st.sampled_from([None, 0.0, 3.0]))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    pixels = random.integers(0 if dtype.kind == "u" else -3, 4, (2, height, width)).astype(dtype)
    pixels[:, : height // 3, : width // 2] = 0 if nodata is None else nodata
    if dtype.kind == "f":
        pixels[1, height // 2 :, width // 2] = data.draw(st.sampled_from([np.nan, np.inf, 1.0]))
    card = make_card(2, tile=data.draw(st.sampled_from([16, 32, 64])), overlap=data.draw(st.integers(0, 8)))
    path = write_tiff(tmp_path / "scene.tif", pixels, nodata=nodata, **layout)
    grid = Grid(width, height, card.tile, card.overlap)
    valid = np.isfinite(pixels).all(axis=0) & ~is_nodata(pixels, nodata)
    request = SceneRequest(
        card=card, limits=GeoLimits(tile_bytes=0)
    )  # many tiles of few bytes are no bomb here
    if not valid.any():
        with pytest.raises(RasterUnusable, match="every pixel is nodata"):
            decoders.open(path, request)
        return
    with decoders.open(path, request) as scene:
        assert scene.info.tiles == len(grid)
        for tile in range(scene.info.tiles):
            got, expected = read_tile(scene, tile), plain_tile(pixels, nodata, grid, tile)
            assert (got is None) == (expected is None)
            if got is not None and expected is not None:
                np.testing.assert_array_equal(got[:, 0], expected)
                scene.write(tile, sign_model(got))
        products = scene.finish()
        assert products.mask is not None
        mask = read_tiff(products.mask)[0]
    np.testing.assert_array_equal(mask, np.where(valid, pixels[0] > 0, 255))
    assert products.nodata_pixels == (~valid).sum()
    assert sum(area.pixels for area in products.areas) == valid.sum()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_against_rasterio_on_windows(decoders: Decoders, tmp_path: Path, layout: dict[str, Any]) -> None:
    """A tile is what rasterio reads in its window."""
    pixels = np.random.default_rng(5).integers(-2000, 9000, (6, 200, 330)).astype("int16")
    path = write_tiff(tmp_path / "scene.tif", pixels, **layout)
    card = make_card(6, tile=64, overlap=20)
    grid = Grid(330, 200, 64, 20)
    with decoders.open(path, SceneRequest(card=card)) as scene, rasterio.open(path) as file:
        for tile in range(scene.info.tiles):
            row, column = grid.place(tile)
            window = rasterio.windows.Window(grid.xs[column], grid.ys[row], 64, 64)
            got = read_tile(scene, tile)
            assert got is not None
            np.testing.assert_array_equal(got[:, 0], file.read(window=window))


@pytest.mark.parametrize("rows", [1, 7, 64, 100, 333, 1000])
def test_strips_of_any_height(decoders: Decoders, tmp_path: Path, rows: int) -> None:
    """Strips lower and higher than a tile, and one of the whole scene, give the same tiles and mask."""
    pixels = np.random.default_rng(5).integers(-2000, 9000, (2, 333, 90)).astype("int16")
    path = write_strips(tmp_path / "scene.tif", pixels, rows)
    grid = Grid(90, 333, 32, 8)
    with decoders.open(path, SceneRequest(card=make_card(2), limits=GeoLimits(tile_bytes=0))) as scene:
        for tile in range(scene.info.tiles):
            got, expected = read_tile(scene, tile), plain_tile(pixels, None, grid, tile)
            assert got is not None
            assert expected is not None
            np.testing.assert_array_equal(got[:, 0], expected)
            scene.write(tile, sign_model(got))
        products = scene.finish()
        assert products.mask is not None
        np.testing.assert_array_equal(read_tiff(products.mask)[0], pixels[0] > 0)


def test_scaling_by_hand(decoders: Decoders, tmp_path: Path) -> None:
    """A raw 5000 at scale 0.0001, offset -0.1, mean 0.2 and deviation 0.05 is 4; nodata is 0.0 in every band."""
    pixels = np.full((2, 16, 16), 5000, "int16")
    pixels[1, 0, 3] = -9999
    bands = (Band(name="A", mean=0.2, std=0.05), Band(name="B", mean=0.0, std=0.5))
    card = Card(
        bands=bands, classes=make_card().classes, tile=16, overlap=4, scale=1e-4, offset=-0.1, nodata=-9999
    )
    with decoders.open(write_tiff(tmp_path / "a.tif", pixels), SceneRequest(card=card)) as scene:
        tile = read_tile(scene, 0)
    assert tile is not None
    assert tile.shape == (2, 1, 16, 16)
    assert tile.dtype == np.float32
    assert tile[0, 0, 5, 5] == pytest.approx(4.0, rel=1e-6)
    assert tile[1, 0, 5, 5] == pytest.approx(0.8, rel=1e-6)
    assert tile[0, 0, 0, 3] == tile[1, 0, 0, 3] == 0.0


def test_float_files_have_a_scale_of_their_own(decoders: Decoders, tmp_path: Path) -> None:
    """Floats are taken at `float_scale`, integers at `scale`."""
    card = make_card(scale=1e-4, float_scale=2.0)
    path = write_tiff(tmp_path / "a.tif", np.full((1, 16, 16), 3, "float32"))
    with decoders.open(path, SceneRequest(card=card)) as scene:
        tile = read_tile(scene, 0)
    assert tile is not None
    assert (tile[0, 0] == 6.0).all()


def test_time_steps(decoders: Decoders, tmp_path: Path) -> None:
    """A file holds the bands of step after step; the model gets bands first, then steps."""
    pixels = np.arange(6, dtype="uint8")[:, None, None] + np.zeros((6, 32, 32), "uint8")
    card = make_card(3, frames=2)
    with decoders.open(write_tiff(tmp_path / "a.tif", pixels), SceneRequest(card=card)) as scene:
        tile = read_tile(scene, 0)
    assert tile is not None
    np.testing.assert_array_equal(tile[:, :, 0, 0], [[0, 3], [1, 4], [2, 5]])


def test_bands_by_name_and_by_index(decoders: Decoders, tmp_path: Path) -> None:
    """The file's descriptions choose the bands; the request's indices choose others."""
    pixels = np.arange(3, dtype="uint8")[:, None, None] + np.zeros((3, 16, 16), "uint8")
    path = write_tiff(tmp_path / "a.tif", pixels, names=("b2", "other", "b1"))
    card = make_card(2)
    for indices, expected in ((None, [2, 0]), ((1, 1), [1, 1])):
        with decoders.open(path, SceneRequest(card=card, indices=indices)) as scene:
            tile = read_tile(scene, 0)
            assert scene.info.names == ("b2", "other", "b1")
        assert tile is not None
        np.testing.assert_array_equal(tile[:, 0, 0, 0], expected)


def test_a_time_step_of_zeros_is_nodata_where_0_is(decoders: Decoders, tmp_path: Path) -> None:
    """Outside a swath one date holds 0 in all bands; dark water is 0 in some bands of every date."""
    pixels = np.full((4, 40, 30), 7, np.uint16)  # two bands at two dates
    pixels[2:, :10] = 0
    pixels[1::2, 20:] = 0
    path = write_tiff(tmp_path / "scene.tif", pixels, nodata=0)
    with decoders.open(path, SceneRequest(card=make_card(2, frames=2))) as scene:
        products = run(scene, sign_model)
    assert products.nodata_pixels == 10 * 30
    assert ["nodata_zero_kept: 50.0%" in note for note in products.notes] == [True]


def test_an_alpha_band_is_nodata(decoders: Decoders, tmp_path: Path) -> None:
    """Where alpha is 0 there is nothing; it is a band of the file, and none that is used in order."""
    pixels = np.full((4, 40, 40), 200, "uint8")
    pixels[3] = 255
    pixels[3, :10] = 0
    path = write_tiff(tmp_path / "a.tif", pixels, photometric="RGB", alpha="YES")
    with decoders.open(path, SceneRequest(card=make_card(3))) as scene:
        assert (scene.info.count, scene.info.bands) == (4, (0, 1, 2))
        products = run(scene, sign_model)
    assert products.nodata_pixels == 400


def test_an_internal_mask_is_nodata(decoders: Decoders, tmp_path: Path) -> None:
    """A mask inside the file says where there is nothing."""
    path = tmp_path / "a.tif"
    profile = {
        "driver": "GTiff",
        "width": 40,
        "height": 40,
        "count": 1,
        "dtype": "uint8",
        "crs": "EPSG:32633",
    }
    mask = np.full((40, 40), 255, "uint8")
    mask[30:] = 0
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True),
        rasterio.open(path, "w", transform=NORTH_UP, **profile) as file,
    ):
        file.write(np.full((1, 40, 40), 7, "uint8"))
        file.write_mask(mask)
    with decoders.open(path, SceneRequest(card=make_card())) as scene:
        assert run(scene, sign_model).nodata_pixels == 400


@pytest.mark.parametrize("order", ["backwards", "rows swapped"])
def test_tiles_in_any_order(decoders: Decoders, tmp_path: Path, order: str) -> None:
    """Tiles read and written out of turn make the same mask."""
    pixels = np.random.default_rng(0).integers(-9, 9, (1, 100, 100)).astype("int16")
    with decoders.open(write_tiff(tmp_path / "a.tif", pixels), SceneRequest(card=make_card())) as scene:
        tiles = list(range(scene.info.tiles))
        tiles = tiles[::-1] if order == "backwards" else [tile ^ 4 for tile in tiles if tile ^ 4 < len(tiles)]
        assert sorted(tiles) == list(range(scene.info.tiles))
        read = {tile: read_tile(scene, tile) for tile in tiles}
        for tile, values in sorted(read.items(), key=lambda item: -item[0]):
            assert values is not None
            scene.write(tile, sign_model(values))
        products = scene.finish()
        assert products.mask is not None
        np.testing.assert_array_equal(read_tiff(products.mask)[0], pixels[0] > 0)


def test_misuse_is_an_error_here(decoders: Decoders, tmp_path: Path) -> None:
    """A tile twice, an unread tile, scores of the wrong shape or NaN, and an early finish never reach the child."""
    pixels = np.ones((1, 40, 40), "uint8")
    with decoders.open(write_tiff(tmp_path / "a.tif", pixels), SceneRequest(card=make_card())) as scene:
        scores = np.zeros((2, 32, 32), np.float32)
        with pytest.raises(ValueError, match="not in turn"):
            scene.write(0, scores)
        read_tile(scene, 0)
        for tile in (0, 4, -1):
            with pytest.raises(ValueError, match=f"tile {tile}"):
                read_tile(scene, tile)
        with pytest.raises(ValueError, match="shape"):
            scene.write(0, scores[:1])
        with pytest.raises(RuntimeError, match="not finite"):
            scene.write(0, scores * np.nan)
        scene.write(0, scores)
        with pytest.raises(ValueError, match="3 of 4 tiles are not done"):
            scene.finish()


def test_a_large_scene_of_nodata(decoders: Decoders, tmp_path: Path) -> None:
    """All tiles are None, and `finish` says that there is nothing to classify."""
    path = write_tiff(tmp_path / "a.tif", np.zeros((1, 1500, 1500), "uint8"), nodata=0, compress="deflate")
    with decoders.open(path, SceneRequest(card=make_card(tile=512))) as scene:
        assert all(read_tile(scene, tile) is None for tile in range(scene.info.tiles))
        with pytest.raises(RasterUnusable, match="every pixel is nodata"):
            scene.finish()


def test_one_pixel(decoders: Decoders, tmp_path: Path) -> None:
    """A scene of one pixel is one tile, all of it that pixel."""
    path = write_tiff(tmp_path / "a.tif", np.full((1, 1, 1), 7, "uint8"))
    with decoders.open(path, SceneRequest(card=make_card())) as scene:
        tile = read_tile(scene, 0)
        assert tile is not None
        assert (tile == 7).all()
        scene.write(0, sign_model(tile))
        assert [area.pixels for area in scene.finish().areas] == [0, 1]


def test_a_foreign_byte_order(decoders: Decoders, tmp_path: Path) -> None:
    """A Motorola-order TIFF made byte by byte reads as written."""
    tags: dict[int, tuple[int, list[int]]] = {
        256: (3, [2]),
        257: (3, [2]),
        258: (3, [16]),
        259: (3, [1]),
        262: (3, [1]),
        273: (4, [-1]),
        277: (3, [1]),
        278: (3, [2]),
        279: (4, [8]),
    }
    path = tmp_path / "a.tif"
    path.write_bytes(raw_tiff(tags, b"\0\1\0\2\0\3\1\0", order=">"))
    with decoders.open(path, SceneRequest(card=make_card(), limits=GeoLimits(tile_bytes=0))) as scene:
        tile = read_tile(scene, 0)
    assert tile is not None
    np.testing.assert_array_equal(tile[0, 0, :2, :2], [[1, 2], [3, 256]])


def test_a_small_scene_of_one_value(decoders: Decoders, tmp_path: Path) -> None:
    """A sound file of a few hundred bytes and some tens of tiles is no bomb."""
    path = write_tiff(tmp_path / "a.tif", np.ones((1, 180, 180), "uint8"), compress="deflate", tiled=True)
    assert path.stat().st_size < 64 * 49
    with decoders.open(path, SceneRequest(card=make_card())) as scene:
        assert scene.info.tiles == 64
        assert run(scene, sign_model).areas[1].pixels == 180 * 180


@pytest.mark.parametrize("replaced", [None, 3.0])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "float32"])
def test_the_model_sees_the_same_whether_it_or_the_decoder_normalises(
    decoders: Decoders, tmp_path: Path, dtype: str, replaced: float | None
) -> None:
    """Bit for bit: a multiplication and an addition in float32, and what the card says of nodata."""
    limits = np.iinfo(dtype) if dtype != "float32" else np.iinfo("int16")
    pixels = np.random.default_rng(7).integers(limits.min, limits.max, (2, 40, 52), np.int64).astype(dtype)
    pixels[0, 5:20, 30:45] = 7
    pixels[:, 39, 51] = 7  # what is beyond the scene is its edge
    bands = (Band(name="A", mean=0.2, std=0.05), Band(name="B", mean=31.7, std=0.3))
    card = make_card(2, scale=0.013, float_scale=0.013, nodata_replace=replaced)
    card = card.model_copy(update={"bands": bands})
    path = write_tiff(tmp_path / "a.tif", pixels, nodata=7)
    with decoders.open(path, SceneRequest(card=card, offset=1.5)) as scene:
        assert (scene.info.carried, scene.info.strip) == (dtype, 4 if dtype == "float32" else 8)
        tiles = [read_tile(scene, tile) for tile in range(scene.info.tiles)]
    times, plus, empty = np.empty((3, 2, 1, 1), np.float32)
    for number, band in enumerate(bands):
        times[number] = 0.013 / band.std
        plus[number] = (1.5 * 0.013 - band.mean) / band.std
        empty[number] = 0 if replaced is None else (replaced * 0.013 - band.mean) / band.std
    expected = pixels.astype(np.float32) * times + plus
    expected = np.where((pixels == 7).any(axis=0), empty, expected)
    padded = np.pad(expected, [(0, 0), (0, 32), (0, 32)], mode="edge")
    grid = Grid(52, 40, 32, 8)
    for tile, seen in enumerate(tiles):
        row, column = grid.place(tile)
        y, x = grid.ys[row], grid.xs[column]
        assert seen is not None
        np.testing.assert_array_equal(seen[:, 0], padded[:, y : y + 32, x : x + 32])


def test_a_strip_is_its_tiles_but_those_of_nodata(decoders: Decoders, tmp_path: Path) -> None:
    """Read three at a time, the last strip is shorter, and one that is all nodata is empty."""
    pixels = np.arange(1, 1 + 24 * 192, dtype=np.uint16).reshape(1, 24, 192)
    pixels[0, :, 24:144] = 0
    path = write_tiff(tmp_path / "a.tif", pixels, nodata=0)
    card = make_card(tile=24, overlap=0)
    with (
        decoders.open(path, SceneRequest(card=card)) as scene,
        decoders.open(path, SceneRequest(card=card)) as other,
    ):
        one_by_one = {tile: other.read(tile) for tile in range(8)}
        strips = [scene.read(first, 3) for first in range(0, 8, 3)]
        assert [tiles for tiles, _ in strips] == [(0,), (), (6, 7)]
        for tiles, strip in strips:
            for tile, own in zip(tiles, strip, strict=True):
                np.testing.assert_array_equal(own, one_by_one[tile][1][0])
        assert scene.tiles_done == 5
        with pytest.raises(ValueError, match="tile 0"):
            scene.read(0, 3)


def test_numbers_that_float32_does_not_hold(decoders: Decoders, tmp_path: Path) -> None:
    """A billion and one less a billion is one: integers of 32 and 64 bits and float64 are normalised in float64."""
    values = 1_000_000_000 + np.arange(3)
    for dtype in ("int32", "uint32", "int64", "uint64", "float64"):
        pixels = np.broadcast_to(values.astype(dtype), (1, 16, 3))
        request = SceneRequest(card=make_card(), offset=-1e9)
        with decoders.open(write_tiff(tmp_path / "a.tif", np.ascontiguousarray(pixels)), request) as scene:
            tile = read_tile(scene, 0)
        assert tile is not None
        assert tile[0, 0, 0, :3].tolist() == [0, 1, 2], dtype


def test_bands_in_use_are_limited(decoders: Decoders, tmp_path: Path) -> None:
    """A file of 285 bands is taken where three are used; a model of three where two are allowed is not."""
    path = write_tiff(tmp_path / "a.tif", np.ones((285, 16, 16), "int16"), interleave="pixel")
    request = SceneRequest(card=make_card(3), indices=(284, 0, 7), limits=GeoLimits(tile_bytes=0))
    with decoders.open(path, request) as scene:
        assert (scene.info.count, scene.info.bands) == (285, (284, 0, 7))
    few = request.model_copy(update={"limits": GeoLimits(tile_bytes=0, bands=2)})
    with pytest.raises(RasterTooLarge, match="3 bands are used; at most 2"):
        decoders.open(path, few)


def test_a_file_of_all_the_bands_allowed_is_opened_in_time(decoders: Decoders, tmp_path: Path) -> None:
    """4,096 bands, each with a name, one wavelength the model knows among them."""
    names = tuple(f"layer {number} at {number + 400} nm" for number in range(4096))
    path = write_tiff(tmp_path / "a.tif", np.ones((4096, 1, 1), "uint16"), names, interleave="pixel")
    card = make_card().model_copy(update={"bands": (Band(name="RED", mean=0, std=1),)})
    with decoders.open(path, SceneRequest(card=card, limits=GeoLimits(tile_bytes=0))) as scene:
        assert scene.info.bands == (265,)
