"""What a scene says of itself: georeference, date and notes; and whether its values can be the model's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import rasterio.rpc
from geo.raster.made import (
    NORTH_UP,
    make_card,
    run,
    sign_model,
    write_tiff,
)
from rasterio.errors import NotGeoreferencedWarning

from baton_geo.errors import RasterUnusable
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest

ZONE = (
    'PROJCS["Zone @#quatoriale",GEOGCS["WGS 84",DATUM["WGS_1984",SPHEROID["WGS 84",6378137,298.257223563]],'
    'PRIMEM["Greenwich",0],UNIT["degree",0.0174532925199433]],PROJECTION["Transverse_Mercator"],'
    'PARAMETER["latitude_of_origin",1],PARAMETER["central_meridian",15],PARAMETER["scale_factor",0.9996],'
    'PARAMETER["false_easting",500000],PARAMETER["false_northing",0],UNIT["metre",1]]'
)


class TestInfo:
    """What a scene says of itself."""

    def test_georeference(self, decoders: Decoders, tmp_path: Path) -> None:
        """CRS, transform and the centre in degrees: 500 km east in zone 33 is 15° east."""
        pixels = np.ones((1, 200, 2), "uint8")
        transform = rasterio.Affine(10, 0, 499_990, 0, -10, 5_000_000)
        path = write_tiff(tmp_path / "a.tif", pixels, transform=transform)
        with decoders.open(path, SceneRequest(card=make_card())) as scene:
            info = scene.info
        assert info.crs == "EPSG:32633"
        assert list(info.transform or ()) == [10, 0, 499_990, 0, -10, 5_000_000]
        assert info.longitude == pytest.approx(15.0, abs=1e-9)
        assert info.latitude == pytest.approx(45.144, abs=1e-3)
        assert [note.partition(":")[0] for note in info.notes] == ["bands_in_order"]

    @pytest.mark.parametrize(
        ("tags", "expected"),
        [
            ({"SENSING_TIME": "2024:05:06 10:11:12"}, "2024-05-06T10:11:12"),
            ({"ACQUISITION_DATE": "2023-01-02", "TIFFTAG_DATETIME": "2024:05:06 10:11:12"}, "2023-01-02"),
            ({"TIFFTAG_DATETIME": "2024:05:06 10:11:12"}, None),  # when the file was written
            ({"ACQUISITION_DATE": "0000:00:00 00:00:00"}, None),
            ({"ACQUISITION_DATE": "yesterday"}, None),
            ({}, None),
        ],
    )
    def test_date(
        self, decoders: Decoders, tmp_path: Path, tags: dict[str, str], expected: str | None
    ) -> None:
        """The date of acquisition goes before the date the file was written."""
        path = write_tiff(tmp_path / "a.tif", np.ones((1, 16, 16), "uint8"))
        with rasterio.open(path, "r+") as file:
            file.update_tags(**tags)
        with decoders.open(path, SceneRequest(card=make_card())) as scene:
            assert scene.info.acquired == expected

    @pytest.mark.parametrize(
        ("options", "note"),
        [
            ({"crs": None}, "the file has no CRS"),
            ({"crs": None, "transform": None}, "the file has no geotransform"),
            ({"crs": "EPSG:3857"}, "areas_scaled"),
            ({"transform": NORTH_UP @ rasterio.Affine.rotation(30)}, "the grid is rotated"),
            ({"crs": 'LOCAL_CS["site",UNIT["metre",1]]'}, "the CRS is local"),
        ],
    )
    def test_notes(self, decoders: Decoders, tmp_path: Path, options: dict[str, Any], note: str) -> None:
        """What is odd about the grid is accepted and said; the mask is on the same grid."""
        path = write_tiff(tmp_path / "a.tif", np.ones((1, 20, 20), "uint8"), **options)
        with decoders.open(path, SceneRequest(card=make_card())) as scene:
            assert any(note in said for said in scene.info.notes)
            products = run(scene, sign_model)
            assert products.mask is not None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotGeoreferencedWarning)
                with rasterio.open(path) as before, rasterio.open(products.mask) as after:
                    assert before.crs == after.crs
                    assert before.transform.almost_equals(after.transform)

    def test_control_points_are_copied(self, decoders: Decoders, tmp_path: Path) -> None:
        """A file with ground control points only gives a mask with the same ones."""
        points = [
            rasterio.control.GroundControlPoint(row, column, 15 + column, 45 - row)
            for row, column in ((0, 0), (0, 9), (9, 0), (9, 9))
        ]
        path = write_tiff(
            tmp_path / "a.tif", np.ones((1, 20, 20), "uint8"), crs="EPSG:4326", transform=None, gcps=points
        )
        with decoders.open(path, SceneRequest(card=make_card())) as scene:
            assert any("ground control points" in note for note in scene.info.notes)
            products = run(scene, sign_model)
            assert products.mask is not None
            with rasterio.open(products.mask) as file:
                copied, crs = file.gcps
        assert [(point.row, point.col, point.x, point.y) for point in copied] == [
            (point.row, point.col, point.x, point.y) for point in points
        ]
        assert crs.to_epsg() == 4326

    def test_rational_polynomial_coefficients_are_copied_and_said(
        self, decoders: Decoders, tmp_path: Path
    ) -> None:
        """What places a raw satellite picture on the ground places its mask too."""
        rpcs = rasterio.rpc.RPC(
            *(100.0, 50.0, 45.0, 0.5, [1.0] + [0.0] * 19, [0.0, 1.0] + [0.0] * 18, 10.0, 10.0),
            *(15.0, 0.5, [1.0] + [0.0] * 19, [0.0, 0.0, 1.0] + [0.0] * 17, 10.0, 10.0, 0.5, 0.5),
        )
        path = write_tiff(
            tmp_path / "a.tif", np.ones((1, 20, 20), "uint8"), crs=None, transform=None, rpcs=rpcs
        )
        with decoders.open(path, SceneRequest(card=make_card())) as scene:
            assert any(note.startswith("rpcs: ") for note in scene.info.notes)
            products = run(scene, sign_model)
            assert products.mask is not None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotGeoreferencedWarning)
                with rasterio.open(products.mask) as file:
                    assert file.rpcs.to_dict() == rpcs.to_dict()

    def test_several_images(self, decoders: Decoders, tmp_path: Path) -> None:
        """Of several images in a file the first is used, and that is said."""
        first = write_tiff(tmp_path / "two.tif", np.ones((1, 20, 20), "uint8"))
        with rasterio.open(
            first,
            "w",
            driver="GTiff",
            width=9,
            height=9,
            count=1,
            dtype="uint8",
            crs="EPSG:32633",
            transform=NORTH_UP,
            APPEND_SUBDATASET="YES",
        ) as file:
            file.write(np.full((1, 9, 9), 5, "uint8"))
        with decoders.open(first, SceneRequest(card=make_card())) as scene:
            assert any("2 images; the first is used" in note for note in scene.info.notes)
            assert (scene.info.width, scene.info.height) == (20, 20)

    def test_texts_in_latin_1_are_no_damage(self, decoders: Decoders, tmp_path: Path) -> None:
        """Names of bands, tags and the CRS, and what the file says beside them; the mask has its grid."""
        path = write_tiff(tmp_path / "a.tif", np.ones((2, 20, 20), "int16"), ("B1", "B2 @#tat"), crs=ZONE)
        with rasterio.open(path, "r+") as file:
            file.update_tags(AUTHOR="Andr@#", ACQUISITION_DATE="2024-05-06")
        data = path.read_bytes()
        assert data.count(b"@#") >= 3
        path.write_bytes(data.replace(b"@#", b"\xc9\xe9"))
        with decoders.open(path, SceneRequest(card=make_card(2), indices=(0, 1))) as scene:
            assert scene.info.names == ("B1", "B2 Eetat")
            assert scene.info.acquired == "2024-05-06"
            assert scene.info.latitude == pytest.approx(46.15, abs=0.01)
            products = run(scene, sign_model)
            assert products.mask is not None
            assert [area.hectares for area in products.areas] == pytest.approx([0, 4])

    def test_its_own_scale_is_told(self, decoders: Decoders, tmp_path: Path) -> None:
        """Of a file that states a scale it is said that this is used."""
        path = write_tiff(tmp_path / "a.tif", np.ones((1, 20, 20), "uint8"))
        with rasterio.open(path, "r+") as file:
            file.scales, file.offsets = (0.5,), (2.0,)
        with decoders.open(path, SceneRequest(card=make_card())) as scene:
            assert any("scale of 0.5 and an offset of 2" in note for note in scene.info.notes)


class TestRange:
    """Values the model cannot know."""

    CARD = make_card(scale=1e-4, valid_range=(0.0, 1.5))

    @pytest.mark.parametrize("side", [60, 1500])
    def test_wrong_units(self, decoders: Decoders, tmp_path: Path, side: int) -> None:
        """Reflectance x 100 000 is refused at once, with band, range and scale."""
        pixels = np.random.default_rng(0).integers(20_000, 60_000, (1, side, side)).astype("int32")
        path = write_tiff(tmp_path / "a.tif", pixels)
        with pytest.raises(
            RasterUnusable, match=r"band 'B1': .* outside 0 to 1.5 after multiplying by 0.0001"
        ):
            decoders.open(path, SceneRequest(card=self.CARD))

    @pytest.mark.parametrize(("rows", "refused"), [(1, False), (2, True)])
    def test_one_percent(self, decoders: Decoders, tmp_path: Path, rows: int, refused: bool) -> None:
        """One percent of the pixels may be outside, more may not."""
        pixels = np.full((1, 100, 100), 15_000, "uint16")
        pixels[:, :rows] = 15_001
        path = write_tiff(tmp_path / "a.tif", pixels)
        if refused:
            with pytest.raises(RasterUnusable, match=r"2\.0% of the pixels"):
                decoders.open(path, SceneRequest(card=self.CARD))
        else:
            decoders.open(path, SceneRequest(card=self.CARD)).close()

    def test_found_while_reading(self, decoders: Decoders, tmp_path: Path) -> None:
        """In a large scene two percent at the very bottom are found when they are read."""
        pixels = np.zeros((1, 1500, 1500), "uint16")
        pixels[:, -30:] = 60_000
        path = write_tiff(tmp_path / "a.tif", pixels)
        card = self.CARD.model_copy(update={"tile": 512, "overlap": 0})
        with (
            decoders.open(path, SceneRequest(card=card)) as scene,
            pytest.raises(RasterUnusable, match="band 'B1'"),
        ):
            run(scene, lambda tile: np.zeros((2, 512, 512), np.float32))

    def test_nodata_is_not_outside(self, decoders: Decoders, tmp_path: Path) -> None:
        """A scene that is half nodata is judged by the other half."""
        pixels = np.full((1, 60, 60), 5000, "int16")
        pixels[:, :30] = -9999
        decoders.open(
            write_tiff(tmp_path / "a.tif", pixels, nodata=-9999), SceneRequest(card=self.CARD)
        ).close()
        with pytest.raises(RasterUnusable, match="nodata value marked"):
            decoders.open(write_tiff(tmp_path / "a.tif", pixels), SceneRequest(card=self.CARD))
