"""JPEG 2000 scenes: the same mask as of the same pixels in a GeoTIFF, with the same place, in every use."""

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
    read_tiff,
    read_tile,
    run,
    sign_model,
    write_jp2,
    write_tiff,
)
from geo.raster.test_embeddings import encoder

from baton_geo.card import Band, Embedding
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import FileSpec, SceneRequest
from baton_geo.raster.open_scene import OpenScene
from baton_geo.settings import GeoLimits

LIMITS = GeoLimits(tile_bytes=0, open_seconds=20)
REQUEST = SceneRequest(card=make_card(), limits=LIMITS)
TILED = {"blockxsize": 64, "blockysize": 64}


def pixels_of(dtype: str, bands: int = 1, height: int = 150, width: int = 170, top: int = 250) -> Any:
    least = -top if np.dtype(dtype).kind == "i" else 0
    return np.random.default_rng(5).integers(least, top, (bands, height, width)).astype(dtype)


def tiles_of(scene: OpenScene) -> npt.NDArray[np.float32]:
    tiles = [read_tile(scene, tile) for tile in range(scene.info.tiles)]
    return np.stack([tile for tile in tiles if tile is not None])


def mask_of(decoders: Decoders, path: Path | list[Path], request: SceneRequest, above: float = 0) -> Any:
    with decoders.open(path, request) as scene:
        products = run(scene, lambda pixels: sign_model(pixels - np.float32(above)))
        assert products.mask is not None
        with rasterio.open(products.mask) as mask:
            return mask.read(1), mask.crs, mask.transform


KINDS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("uint8", 1, 250, {}),
    ("uint8", 3, 250, TILED),
    ("uint16", 1, 32_000, {"NBITS": 15, **TILED}),
    ("uint16", 1, 4_000, {"NBITS": 12}),
    ("uint16", 2, 60_000, {"blockxsize": 100, "blockysize": 70}),
    ("int16", 5, 3_000, TILED),
    ("uint8", 1, 250, {"CODEC": "J2K", **TILED}),
    ("uint16", 3, 900, {"SOP": "YES", "EPH": "YES", "PLT": "YES", "TLM": "YES", **TILED}),
]


@pytest.mark.parametrize(("dtype", "bands", "top", "options"), KINDS)
def test_the_model_sees_what_it_sees_of_a_geotiff(
    decoders: Decoders, tmp_path: Path, dtype: str, bands: int, top: int, options: dict[str, Any]
) -> None:
    """Lossless: every pixel of every band is the same, in 8 to 16 bits, with and without tiles and boxes."""
    pixels = pixels_of(dtype, bands, top=top)
    request = SceneRequest(card=make_card(bands), limits=LIMITS)
    jp2 = write_jp2(tmp_path / "a.jp2", pixels, **options)
    tiff = write_tiff(tmp_path / "a.tif", pixels)
    with decoders.open(jp2, request) as scene, decoders.open(tiff, request) as expected:
        assert (scene.info.dtype, scene.info.count, scene.info.width) == (dtype, bands, 170)
        np.testing.assert_array_equal(tiles_of(scene), tiles_of(expected))
        if "CODEC" not in options:
            assert (scene.info.crs, scene.info.transform) == (expected.info.crs, expected.info.transform)


def test_the_mask_is_that_of_a_geotiff(decoders: Decoders, tmp_path: Path) -> None:
    """Pixel for pixel, with CRS and transform."""
    pixels = pixels_of("uint16", top=32_000)
    jp2 = write_jp2(tmp_path / "a.jp2", pixels, NBITS=15, **TILED)
    mask, crs, transform = mask_of(decoders, jp2, REQUEST, above=16_000)
    expected = mask_of(decoders, write_tiff(tmp_path / "a.tif", pixels), REQUEST, above=16_000)
    np.testing.assert_array_equal(mask, expected[0])
    np.testing.assert_array_equal(mask, pixels[0] > 16_000)
    assert (crs, transform) == expected[1:] == (rasterio.CRS.from_epsg(32633), NORTH_UP)


@pytest.mark.parametrize("options", [{"GMLJP2": "NO"}, {"GEOJP2": "NO"}])
@pytest.mark.parametrize("crs", ["EPSG:32633", "EPSG:4326", "EPSG:3035"])
def test_crs_and_transform_are_read_of_either_box(
    decoders: Decoders, tmp_path: Path, options: dict[str, str], crs: str
) -> None:
    """Of GeoJP2 and of GMLJP2, whatever the order of the CRS's axes."""
    place = rasterio.Affine(0.5, 0, 14, 0, -0.25, 45) if crs == "EPSG:4326" else NORTH_UP
    path = write_jp2(tmp_path / "a.jp2", pixels_of("uint8"), crs=crs, transform=place, **options)
    with decoders.open(path, REQUEST) as scene:
        assert (scene.info.crs, scene.info.transform) == (crs, place[:6])


def test_without_a_place(decoders: Decoders, tmp_path: Path) -> None:
    """A codestream alone says nothing of it, which a note says."""
    path = write_jp2(tmp_path / "a.j2k", pixels_of("uint8"), CODEC="J2K", crs=None, transform=None)
    with decoders.open(path, REQUEST) as scene:
        assert (scene.info.crs, scene.info.transform) == (None, None)
        notes = {note.partition(":")[0] for note in scene.info.notes}
        assert {"no_crs", "no_geotransform"} <= notes


WINDOWS = [(0, 0, 170, 150), (63, 63, 66, 66), (64, 64, 64, 64), (128, 128, 42, 22), (1, 127, 150, 2)]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_part_is_that_part(decoders: Decoders, tmp_path: Path, window: tuple[int, int, int, int]) -> None:
    """At, across and around the edges of its tiles, and in the tiles that the image's edge cuts."""
    pixels = pixels_of("int16", top=2_000)
    path = write_jp2(tmp_path / "a.jp2", pixels, **TILED)
    left, top, width, height = window
    request = REQUEST.model_copy(update={"window": window})
    mask, _, transform = mask_of(decoders, path, request)
    np.testing.assert_array_equal(mask, pixels[0, top : top + height, left : left + width] > 0)
    assert (transform.c, transform.f) == (500_000 + 10 * left, 5_000_000 - 10 * top)


def test_a_box_is_that_part(decoders: Decoders, tmp_path: Path) -> None:
    """`bbox` in the scene's CRS."""
    path = write_jp2(tmp_path / "a.jp2", pixels_of("uint8"), **TILED)
    box = {"bbox": (500_100.0, 4_999_000.0, 500_300.0, 4_999_500.0), "bbox_crs": "EPSG:32633"}
    with decoders.open(path, REQUEST.model_copy(update=box)) as scene:
        assert scene.info.window == (10, 50, 20, 50)


def test_a_large_untiled_file_is_read_in_parts(decoders: Decoders, tmp_path: Path) -> None:
    """GDAL decodes areas of a tile of more than 1,024 pixels; their edges are in no pixel of the mask."""
    pixels = pixels_of("int16", height=1500, width=1300)
    path = write_jp2(tmp_path / "a.jp2", pixels, blockxsize=1300, blockysize=1500)
    request = SceneRequest(card=make_card(tile=256, overlap=32), limits=LIMITS)
    np.testing.assert_array_equal(mask_of(decoders, path, request)[0], pixels[0] > 0)


def test_one_file_a_band_at_two_sizes(decoders: Decoders, tmp_path: Path) -> None:
    """As Sentinel-2's B02 at 10 m and B11 at 20 m: what the same files in GeoTIFF give."""
    bands = tuple(Band(name=name, mean=0.0, std=1.0) for name in ("BLUE", "SWIR_1"))
    card = make_card(tile=64, overlap=16).model_copy(update={"bands": bands})
    request = SceneRequest(card=card, limits=LIMITS, files=(FileSpec(name="BLUE"), FileSpec(name="SWIR_1")))
    coarse = {"transform": rasterio.Affine(20, 0, 500_000, 0, -20, 5_000_000)}
    fine_pixels, coarse_pixels = (pixels_of("uint16", 1, side, side, 30_000) for side in (240, 120))
    jp2 = [
        write_jp2(tmp_path / "b02.jp2", fine_pixels, NBITS=15, blockxsize=100, blockysize=100),
        write_jp2(tmp_path / "b11.jp2", coarse_pixels, NBITS=15, **TILED, **coarse),
    ]
    tiff = [
        write_tiff(tmp_path / "b02.tif", fine_pixels),
        write_tiff(tmp_path / "b11.tif", coarse_pixels, **coarse),
    ]
    with decoders.open(jp2, request) as scene, decoders.open(tiff, request) as expected:
        assert (scene.info.width, scene.info.transform) == (240, expected.info.transform)
        np.testing.assert_array_equal(tiles_of(scene), tiles_of(expected))


def test_nodata_is_that_of_the_item_or_the_model(decoders: Decoders, tmp_path: Path) -> None:
    """The format has none of its own."""
    pixels = pixels_of("uint16", top=3_000) + np.uint16(1)
    pixels[0, :40] = 0
    path = write_jp2(tmp_path / "a.jp2", pixels, **TILED)
    of_item = SceneRequest(card=make_card(), limits=LIMITS, files=(FileSpec(nodata=0),))
    of_model = SceneRequest(card=make_card(nodata=0), limits=LIMITS)
    for request in (of_item, of_model):
        with decoders.open(path, request) as scene:
            assert scene.info.nodata == 0
            assert run(scene, sign_model).nodata_pixels == 40 * 170


def test_an_alpha_band_hides_pixels(decoders: Decoders, tmp_path: Path) -> None:
    """As of a GeoTIFF."""
    pixels = pixels_of("uint8", 4)
    pixels[3] = 255
    pixels[3, :, :50] = 0
    path = write_jp2(tmp_path / "a.jp2", pixels, ALPHA="YES")
    with decoders.open(path, SceneRequest(card=make_card(3), limits=LIMITS)) as scene:
        assert run(scene, sign_model).nodata_pixels == 150 * 50


def test_colours_name_the_bands(decoders: Decoders, tmp_path: Path) -> None:
    """Sentinel-2's true-colour image, for a model of these three bands in another order."""
    bands = tuple(Band(name=name, mean=0.0, std=1.0) for name in ("BLUE", "GREEN", "RED"))
    card = make_card(3).model_copy(update={"bands": bands})
    path = write_jp2(tmp_path / "a.jp2", pixels_of("uint8", 3))
    data, grey = path.read_bytes(), b"colr\1\0\0\0\0\0\x11"
    assert data.count(grey) == 1
    path.write_bytes(data.replace(grey, b"colr\1\0\0\0\0\0\x10"))  # sRGB
    with decoders.open(path, SceneRequest(card=card, limits=LIMITS)) as scene:
        assert scene.info.bands == (2, 1, 0)


def test_files_beside_it_are_ignored(decoders: Decoders, tmp_path: Path) -> None:
    """No world file, .aux.xml or overview beside the raster changes what is seen."""
    path = write_jp2(tmp_path / "a.jp2", pixels_of("uint8"), GMLJP2="NO", GEOJP2="NO")
    (tmp_path / "a.j2w").write_text("1\n0\n0\n-1\n7\n7\n")
    (tmp_path / "a.wld").write_text("1\n0\n0\n-1\n7\n7\n")
    (tmp_path / "a.jp2.aux.xml").write_text("<PAMDataset><SRS>EPSG:3857</SRS></PAMDataset>")
    write_tiff(tmp_path / "a.jp2.ovr", np.zeros((1, 75, 85), "uint8"))
    with decoders.open(path, REQUEST) as scene:
        assert (scene.info.crs, scene.info.transform) == (None, None)


def test_an_embedding_is_that_of_a_geotiff(decoders: Decoders, tmp_path: Path) -> None:
    """Of an encoder alone."""
    card = make_card().model_copy(
        update={"classes": (), "overlap": 0, "embedding": Embedding(patch=8, width=3, model="f1d0")}
    )
    request = SceneRequest(card=card, limits=LIMITS, mask=False, embeddings=True)
    pixels, rasters = pixels_of("uint16", top=30_000), []
    for path in (write_jp2(tmp_path / "a.jp2", pixels, NBITS=15), write_tiff(tmp_path / "a.tif", pixels)):
        with decoders.open(path, request) as scene:
            made = run(scene, encoder)
            assert made.embeddings is not None
            rasters.append(read_tiff(made.embeddings))
    np.testing.assert_array_equal(*rasters)
