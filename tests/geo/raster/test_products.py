from __future__ import annotations

import io
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import rasterio
from geo.raster.made import NORTH_UP, make_card, read_tiff, run, sign_model, write_tiff
from PIL import Image
from rasterio.enums import ColorInterp

from baton_geo.card import Band, Card, ClassLabel, MapValue
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import Products, SceneRequest
from baton_geo.raster.products.preview import LONGEST

LAND, WATER = ClassLabel(name="land", colour=(200, 180, 140)), ClassLabel(name="water", colour=(20, 110, 220))
CARD = Card(bands=(Band(name="B1", mean=0, std=1),), classes=(LAND, WATER), tile=256, overlap=32, nodata=-9)


def halves(height: int = 1200, width: int = 1500) -> npt.NDArray[np.int16]:
    """Water right of the middle, nodata in the upper left corner."""
    pixels = np.full((1, height, width), -1, "int16")
    pixels[:, :, width // 2 :] = 1
    pixels[:, : height // 10, : width // 10] = -9
    return pixels


def directories(path: Path) -> list[dict[int, tuple[int, ...]]]:
    """Offset and tags (short and long numbers only) of each directory of a classic little-endian TIFF, in order."""
    data, found = path.read_bytes(), []
    (place,) = struct.unpack_from("<I", data, 4)
    while place:
        (count,) = struct.unpack_from("<H", data, place)
        tags: dict[int, tuple[int, ...]] = {0: (place,)}
        for entry in range(place + 2, place + 2 + 12 * count, 12):
            tag, kind, values = struct.unpack_from("<HHI", data, entry)
            code = {3: "H", 4: "I"}.get(kind)
            if code:
                form = f"<{values}{code}"
                where = (
                    entry + 8 if struct.calcsize(form) <= 4 else struct.unpack_from("<I", data, entry + 8)[0]
                )
                tags[tag] = struct.unpack_from(form, data, where)
        found.append(tags)
        (place,) = struct.unpack_from("<I", data, place + 2 + 12 * count)
    return found


def check_cog(path: Path) -> None:
    """The rules of the layout: tiled, overviews by halves, directories first, small overviews before large data."""
    found = directories(path)
    places = [tags[0][0] for tags in found]
    assert places == sorted(places)
    assert all(322 in tags and tags[322] == (512,) for tags in found)
    widths = [tags[256][0] for tags in found]
    assert all(abs(wide - 2 * narrow) <= 1 for wide, narrow in pairwise(widths))
    assert widths[-1] <= 512
    firsts = [min(offset for offset in tags[324] if offset) for tags in found]
    assert max(places) < min(firsts)  # every directory before any data
    assert firsts == sorted(firsts, reverse=True)  # the smallest overview's data first


def make(decoders: Decoders, path: Path, card: Card, check: object, **wanted: bool) -> Products:
    """Products of a scene; `check` looks at them while their files are there."""
    with decoders.open(path, SceneRequest(card=card, **wanted)) as scene:
        products = run(scene, sign_model)
        if callable(check):
            check(products)
    return products


def test_the_mask_is_a_cog(decoders: Decoders, tmp_path: Path) -> None:
    """Same grid, exact nodata, tiles, overviews, colours and class names."""
    pixels = halves()

    def check(products: Products) -> None:
        assert products.mask is not None
        check_cog(products.mask)
        with rasterio.open(products.mask) as file:
            np.testing.assert_array_equal(file.read(1), np.where(pixels[0] == -9, 255, pixels[0] > 0))
            assert file.crs.to_epsg() == 32633
            assert file.transform == NORTH_UP
            assert (file.nodata, file.dtypes, file.count) == (255, ("uint8",), 1)
            assert file.overviews(1) == [2, 4]
            assert file.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
            assert file.colorinterp == (ColorInterp.palette,)
            colours = file.colormap(1)
            assert (colours[0], colours[1], colours[255]) == (
                (200, 180, 140, 255),
                (20, 110, 220, 255),
                (0, 0, 0, 0),
            )
            assert file.descriptions == ("class",)
            assert file.tags(1)["CLASS_1"] == "water"
        with rasterio.open(products.mask, overview_level=1) as small:
            assert set(np.unique(small.read(1))) == {0, 1, 255}  # no class is made up by averaging

    make(decoders, write_tiff(tmp_path / "a.tif", pixels), CARD, check)


def test_the_probabilities_are_a_cog(decoders: Decoders, tmp_path: Path) -> None:
    """A band for each class, 0 to 250 with a scale that makes it 0 to 1, 255 where nothing is known."""
    pixels = halves()
    chance = 1 / (1 + np.exp(-2))  # of the class whose score is 1 where the other's is -1

    def check(products: Products) -> None:
        assert products.probabilities is not None
        check_cog(products.probabilities)
        with rasterio.open(products.probabilities) as file:
            values = file.read()
            assert (file.count, file.nodata, file.scales) == (2, 255, (1 / 250, 1 / 250))
            assert file.descriptions == ("land", "water")
            assert file.transform == NORTH_UP
        valid = pixels[0] != -9
        expected = np.round(np.where(pixels[0] > 0, chance, 1 - chance) * 250)
        np.testing.assert_array_equal(values[1], np.where(valid, expected, 255))
        np.testing.assert_array_equal(values[0], np.where(valid, 250 - expected, 255))

    make(decoders, write_tiff(tmp_path / "a.tif", pixels), CARD, check, probabilities=True)


def test_a_constant_model_has_no_seams(decoders: Decoders, tmp_path: Path) -> None:
    """Probabilities of a constant model are one number, nodata apart."""
    path = write_tiff(tmp_path / "a.tif", np.ones((1, 300, 500), "int16"))
    card = make_card(3, tile=64, overlap=30).model_copy(
        update={"bands": CARD.bands, "classes": make_card(1, 3).classes}
    )
    scores = np.broadcast_to(np.array([0.2, 0.9, -1], np.float32)[:, None, None], (3, 64, 64)).copy()
    with decoders.open(path, SceneRequest(card=card, probabilities=True)) as scene:
        products = run(scene, lambda tile: scores)
        assert products.probabilities is not None
        assert products.mask is not None
        values, mask = read_tiff(products.probabilities), read_tiff(products.mask)
    chances = np.exp([0.2, 0.9, -1]) / np.exp([0.2, 0.9, -1]).sum()
    assert (values == np.round(chances * 250)[:, None, None]).all()
    assert (mask == 1).all()


def test_areas_of_a_projected_scene(decoders: Decoders, tmp_path: Path) -> None:
    """100 m² a pixel: pixels, hectares and shares of what is known."""
    products = make(decoders, write_tiff(tmp_path / "a.tif", halves(100, 100)), CARD, None)
    land, water = products.areas
    assert (land.name, land.pixels, water.name, water.pixels) == ("land", 4900, "water", 5000)
    assert [land.hectares, water.hectares] == pytest.approx([49.0, 50.0])
    assert land.share + water.share == pytest.approx(1.0)
    assert products.nodata_pixels == 100


def test_areas_of_a_geographic_scene(decoders: Decoders, tmp_path: Path) -> None:
    """One degree by one degree north of the equator: 1 230 846.4 ha on WGS 84, row by row."""
    path = write_tiff(
        tmp_path / "a.tif",
        np.ones((1, 100, 100), "int16"),
        crs="EPSG:4326",
        transform=rasterio.Affine(0.01, 0, 5, 0, -0.01, 1),
    )
    products = make(decoders, path, CARD, None)
    assert products.areas[1].hectares == pytest.approx(1_230_846.389, rel=1e-6)


def test_no_areas_without_a_crs(decoders: Decoders, tmp_path: Path) -> None:
    """Pixels are counted, hectares are not made up."""
    products = make(decoders, write_tiff(tmp_path / "a.tif", halves(64, 64), crs=None), CARD, None)
    assert [area.hectares for area in products.areas] == [None, None]
    assert products.areas[1].pixels == 32 * 64


def test_nothing_unasked_is_written(decoders: Decoders, tmp_path: Path) -> None:
    """What is not wanted is not there, and what is goes with the scene."""
    path = write_tiff(tmp_path / "a.tif", halves(64, 64))
    kept: list[Path] = []

    def check(products: Products) -> None:
        assert products.preview is not None
        kept.append(products.preview.parent)

        assert [path.name for path in kept[0].iterdir()] == ["preview.png"]

    products = make(decoders, path, CARD, check, mask=False, preview=True)
    assert (products.mask, products.probabilities) == (None, None)
    assert products.areas[1].pixels == 32 * 64
    assert not kept[0].exists()


class TestPreview:
    """The preview."""

    RGB = CARD.model_copy(
        update={"bands": tuple(Band(name=name, mean=0, std=1) for name in ("RED", "GREEN", "BLUE"))}
    )

    def preview(self, decoders: Decoders, path: Path, card: Card) -> npt.NDArray[np.uint8]:
        with decoders.open(path, SceneRequest(card=card, preview=True)) as scene:
            preview = run(scene, sign_model).preview
            assert preview is not None
            with Image.open(preview) as image:
                assert image.format == "PNG"
                return np.asarray(image.convert("RGBA"))

    @pytest.mark.parametrize(
        ("height", "width"), [(1500, 2300), (3000, 300), (20, 30), (700, 700), (1, 2000)]
    )
    def test_size(self, decoders: Decoders, tmp_path: Path, height: int, width: int) -> None:
        """At most 1024 pixels on the long side, at least 512 so that the legend can be read."""
        preview = self.preview(decoders, write_tiff(tmp_path / "a.tif", halves(height, width)), CARD)
        assert 512 <= max(preview.shape) <= LONGEST

    def test_colours(self, decoders: Decoders, tmp_path: Path) -> None:
        """Water is bluer than land, nodata is transparent, and the legend shows the exact colours."""
        preview = self.preview(decoders, write_tiff(tmp_path / "a.tif", halves(600, 800)), CARD)
        land, water = preview[300, 100].astype(int), preview[300, 700].astype(int)
        assert water[2] - water[0] > land[2] - land[0] + 50
        assert preview[10, 10, 3] == 0
        legend = {tuple(pixel) for pixel in preview[600:].reshape(-1, 4)}
        assert {(200, 180, 140, 255), (20, 110, 220, 255), (255, 255, 255, 255)} <= legend

    def test_the_scene_shines_through(self, decoders: Decoders, tmp_path: Path) -> None:
        """With red, green and blue the scene's brightness is seen under the classes."""
        pixels = np.tile(np.linspace(1, 3000, 800).astype("int16"), (3, 600, 1))
        preview = self.preview(
            decoders, write_tiff(tmp_path / "a.tif", pixels, names=("RED", "GREEN", "BLUE")), self.RGB
        )
        row = preview[300, :, :3].astype(int).sum(axis=1)
        assert row[750] > row[400] > row[50]

    def test_scene_and_classes_alone(self, decoders: Decoders, tmp_path: Path) -> None:
        """Both are of one size; the classes have their own colours, the scene its brightness, and no data none."""
        pixels = np.tile(np.linspace(1, 3000, 800).astype("int16"), (3, 600, 1))
        pixels[:, :, :400] *= -1
        pixels[:, :60, :80] = -9
        path = write_tiff(tmp_path / "a.tif", pixels, names=("RED", "GREEN", "BLUE"))
        with decoders.open(path, SceneRequest(card=self.RGB, mask=False, scene=True, classes=True)) as opened:
            products = run(opened, sign_model)
            assert products.scene is not None
            assert products.classes is not None
            scene, classes = (
                np.asarray(Image.open(io.BytesIO(each.read_bytes())))
                for each in (products.scene, products.classes)
            )
        assert scene.shape == classes.shape == (600, 800, 4)
        assert scene[10, 10, 3] == classes[10, 10, 3] == 0
        assert tuple(classes[300, 100]) == (*LAND.colour, 255)
        assert tuple(classes[300, 700]) == (*WATER.colour, 255)
        assert scene[300, 790, :3].astype(int).sum() > scene[300, 450, :3].astype(int).sum()

    def test_many_classes(self, decoders: Decoders, tmp_path: Path) -> None:
        """Two hundred classes do not make the preview larger, and a name of any length or script is drawn."""
        classes = tuple(
            ClassLabel(name=f"{number} 水 " + "x" * 200, colour=(number, 0, 0)) for number in range(200)
        )
        card = CARD.model_copy(update={"classes": classes})
        path = write_tiff(tmp_path / "a.tif", np.ones((1, 300, 300), "int16"))
        with decoders.open(path, SceneRequest(card=card, preview=True)) as scene:
            preview = run(scene, lambda tile: np.zeros((200, 256, 256), np.float32)).preview
            assert preview is not None
            with Image.open(preview) as image:
                assert max(image.size) <= LONGEST


def test_a_regression_gives_values(decoders: Decoders, tmp_path: Path) -> None:
    """Values blended as they are, scaled and in float32, with the unit; NaN where nothing is known."""
    value = MapValue(name="biomass", unit="Mg/ha", scale=2.0, offset=100.0)
    card = CARD.model_copy(update={"classes": (), "value": value})
    pixels = halves(400, 500)
    path = write_tiff(tmp_path / "a.tif", pixels)
    wanted = np.where(pixels[0] == -9, np.nan, 2.0 * 3 * pixels[0] + 100).astype(np.float32)
    request = SceneRequest(card=card, mask=False, value=True, preview=True, classes=True)
    with decoders.open(path, request) as scene:
        products = run(scene, lambda tile: 3 * tile[:1, 0])
        assert products.value is not None
        check_cog(products.value)
        with rasterio.open(products.value) as file:
            np.testing.assert_allclose(file.read(1), wanted, rtol=1e-6)
            assert (file.dtypes, file.units, file.descriptions) == (("float32",), ("Mg/ha",), ("biomass",))
            assert np.isnan(file.nodata)
        assert products.preview is not None
        with Image.open(products.preview) as preview:
            assert preview.size[0] >= 500
        assert products.classes is not None
        with Image.open(products.classes) as classes:
            assert len(np.unique(np.asarray(classes).reshape(-1, 4), axis=0)) == 3
    assert (products.areas, products.nodata_pixels) == ((), 40 * 50)
    assert products.values is not None
    assert (products.values.minimum, products.values.maximum) == (94, 106)
    assert products.values.mean == pytest.approx(np.nanmean(wanted))
