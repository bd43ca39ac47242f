"""Polygons, style and item of a mask: areas are the mask's, places are right, other programs read them."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import sqlite3
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest
import rasterio
from geo.raster.made import NORTH_UP, make_card, run, sign_model, write_tiff

from baton_geo.errors import RasterTooLarge
from baton_geo.raster import sandbox
from baton_geo.raster.child import Child
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import Products, SceneRequest
from baton_geo.raster.open_scene import ChildHandle, OpenScene
from baton_geo.raster.products import vectors
from baton_geo.settings import GeoLimits
from baton_spool import Naming, make

CARD = make_card(1, 2, tile=32, overlap=8)
WANTED = {"polygons": True, "geopackage": True, "style": True, "item": True}
PLACES: dict[str, dict[str, Any]] = {
    "north up": {},
    "south up": {"transform": rasterio.Affine(10, 0, 500_000, 0, 10, 4_000_000)},
    "degrees": {"crs": "EPSG:4326", "transform": rasterio.Affine(0.001, 0, 14, 0, -0.001, 46)},
    "mercator": {"crs": "EPSG:3857", "transform": rasterio.Affine(10, 0, 1_500_000, 0, -10, 8_000_000)},
    "antimeridian": {"crs": "EPSG:32601", "transform": rasterio.Affine(10, 0, 347_700, 0, -10, 7_001_000)},
    "beyond 180": {"crs": "EPSG:4326", "transform": rasterio.Affine(0.001, 0, 179.95, 0, -0.001, 10)},
    "rotated": {"transform": rasterio.Affine(8, 6, 500_000, 6, -8, 5_000_000)},
    "no place": {"crs": None, "transform": None},
}


def blobs(height: int = 150, width: int = 170) -> npt.NDArray[np.int16]:
    """Two classes in patches with holes, and a corner of nodata."""
    noise = np.random.default_rng(4).normal(size=(height // 5, width // 5)).repeat(5, 0).repeat(5, 1)
    pixels = np.where(noise > 0.3, 5, -5).astype("int16")
    pixels[20:60, 30:90], pixels[30:40, 40:60] = 5, -5
    pixels[:13, :17] = 0
    return pixels[None]


def scene(decoders: Decoders, folder: Path, pixels: npt.NDArray[Any], target: Path, **more: Any) -> Products:
    """A scene's files, copied to a folder that outlives it."""
    options = {name: more.pop(name) for name in ("crs", "transform") if name in more}
    path = write_tiff(folder / "scene.tif", pixels, nodata=0, **options)
    asked = SceneRequest(card=CARD, limits=GeoLimits(tile_bytes=0), **(WANTED | more))
    target.mkdir()
    with decoders.open(path, asked) as opened:
        products = run(opened, sign_model)
        for made in (products.mask, products.polygons, products.geopackage, products.style, products.item):
            if made is not None:
                (target / made.name).write_bytes(made.read_bytes())
    return products


def features(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "mask.geojson").read_text())["features"]
    return found


def signed_area(ring: list[list[float]]) -> float:
    points = np.array(ring) - ring[0]
    return float((points[:-1, 0] * points[1:, 1] - points[1:, 0] * points[:-1, 1]).sum()) / 2


@pytest.mark.parametrize("where", PLACES)
def test_areas_of_polygons_are_the_masks(decoders: Decoders, tmp_path: Path, where: str) -> None:
    """Pixels and hectares of each class, in GeoJSON and GeoPackage; every ring turns as RFC 7946 says."""
    products = scene(decoders, tmp_path, blobs(), tmp_path / "out", **PLACES[where])
    found = features(tmp_path / "out")
    with sqlite3.connect(tmp_path / "out" / "mask.gpkg") as base:
        rows = base.execute("SELECT value, class, pixels, hectares, geom FROM mask").fetchall()
    assert len(rows) == len(found) > 10
    for value, area in enumerate(products.areas):
        mine = [feature["properties"] for feature in found if feature["properties"]["value"] == value]
        assert sum(said["pixels"] for said in mine) == area.pixels
        assert sum(row[2] for row in rows if row[0] == value) == area.pixels
        assert {said["class"] for said in mine} == {area.name}
        if area.hectares is None:
            assert {said["hectares"] for said in mine} == {None}
        else:
            assert sum(said["hectares"] for said in mine) == pytest.approx(area.hectares, rel=1e-6, abs=1e-4)
            assert sum(row[3] for row in rows if row[0] == value) == pytest.approx(
                area.hectares, rel=1e-6, abs=1e-4
            )
    for feature in found:
        outer, *holes = feature["geometry"]["coordinates"]
        assert signed_area(outer) > 0
        assert all(signed_area(hole) < 0 for hole in holes)
        if where != "no place":
            points = np.array(outer)
            assert (np.abs(points[:, 0]) <= 180).all()
            assert np.ptp(points[:, 0]) < 1, "no polygon spans the world"


def test_geometries_are_the_pixels(decoders: Decoders, tmp_path: Path) -> None:
    """In the scene's own CRS: polygons burnt on the mask's grid are the mask again."""
    scene(decoders, tmp_path, blobs(), tmp_path / "out", mask=True)
    with rasterio.open(tmp_path / "out" / "mask.tif") as file:
        mask = file.read(1)
    with sqlite3.connect(tmp_path / "out" / "mask.gpkg") as base:
        rows = base.execute("SELECT value, geom FROM mask").fetchall()
        (bounds,) = base.execute("SELECT min_x, min_y, max_x, max_y, srs_id FROM gpkg_contents").fetchall()
    shapes = [({"type": "Polygon", "coordinates": rings(geometry)}, value) for value, geometry in rows]
    burnt = rasterio.features.rasterize(shapes, mask.shape, fill=255, transform=NORTH_UP, dtype="uint8")
    np.testing.assert_array_equal(burnt, mask)
    assert bounds == (500_000, 4_998_500, 501_700, 5_000_000, 32633)


def rings(blob: bytes) -> list[list[tuple[float, float]]]:
    """The rings of a GeoPackage's polygon."""
    magic, _, flags, srs = struct.unpack_from("<2sBBi", blob)
    assert (magic, flags, srs) == (b"GP", 3, 32633)
    order, kind, count = struct.unpack_from("<BII", blob, 40)
    assert (order, kind) == (1, 3)
    found, at = [], 49
    for _ in range(count):
        (length,) = struct.unpack_from("<I", blob, at)
        numbers = struct.unpack_from(f"<{2 * length}d", blob, at + 4)
        found.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
        at += 4 + 16 * length
    assert at == len(blob)
    return found


@pytest.mark.parametrize("where", ["antimeridian", "beyond 180"])
def test_a_scene_across_the_antimeridian_is_cut_there(decoders: Decoders, tmp_path: Path, where: str) -> None:
    """Polygons lie on both sides, and end at it; so does the item's box, whose west is greater than its east."""
    scene(decoders, tmp_path, np.full((1, 150, 170), 5, "int16"), tmp_path / "out", **PLACES[where])
    east, west = [], []
    for feature in features(tmp_path / "out"):
        (outer,) = feature["geometry"]["coordinates"]
        longitudes = np.array(outer)[:, 0]
        (east if longitudes.mean() > 0 else west).append(longitudes)
    assert len(east) == len(west) == 1
    assert (east[0].max(), west[0].min()) == pytest.approx((180, -180), abs=1e-3)
    item = json.loads((tmp_path / "out" / "item.json").read_text())
    assert item["bbox"][0] > 179
    assert item["bbox"][2] < -179
    assert item["geometry"]["type"] == "MultiPolygon"


def test_small_polygons_are_sieved(decoders: Decoders, tmp_path: Path) -> None:
    """They become part of what is around them; nodata stays."""
    pixels = np.full((1, 60, 60), 5, "int16")
    pixels[0, 10, 10], pixels[0, 30:35, 30:35], pixels[0, :5] = -5, -5, 0
    plain = scene(decoders, tmp_path, pixels, tmp_path / "plain")
    scene(decoders, tmp_path, pixels, tmp_path / "sieved", sieve=4)
    assert plain.areas[0].pixels == 26
    counts = [
        sorted(feature["properties"]["pixels"] for feature in features(tmp_path / name))
        for name in ("plain", "sieved")
    ]
    assert counts == [[1, 25, 60 * 55 - 26], [25, 60 * 55 - 25]]


@pytest.mark.fault("F22")
def test_too_many_polygons_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mask of noise: with what to do."""
    monkeypatch.setattr(vectors, "POLYGONS_LIMIT", 100)
    mask = np.indices((40, 40)).sum(axis=0) % 2
    path = write_tiff(tmp_path / "mask.tif", mask[None].astype("uint8"))
    place = vectors.Georeference()
    with pytest.raises(RasterTooLarge, match="sieve=9"):
        list(vectors.polygons(path, CARD, place, vectors.Ground(place, 40, 40), 0))


@contextlib.contextmanager
def child_here(path: Path, asked: SceneRequest, folder: Path) -> Iterator[OpenScene]:
    """A scene whose child is a thread of this process, without the sandbox."""
    ours, theirs = socket.socketpair()
    lifeline, other_end = socket.socketpair()
    with path.open("rb") as file, theirs, lifeline, other_end:
        thread = threading.Thread(target=Child(theirs, [file.fileno()]).serve)
        thread.start()
        scene = OpenScene(
            ChildHandle(ours, lifeline), make(folder, Naming("scene-", folders=True)), asked, lambda: None
        )
        try:
            scene.begin()
            yield scene
        finally:
            other_end.sendall(b"\0" * 4)
            scene.close()
            thread.join()


@pytest.mark.fault("F22")
@pytest.mark.parametrize("if_few", [True, False])
def test_too_many_polygons_are_left_out_of_what_nobody_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, if_few: bool
) -> None:
    """The other files are there, the item names them alone and says why; named polygons are refused as ever."""
    monkeypatch.setattr(vectors, "POLYGONS_LIMIT", 10)
    for limit in ("limit_resources", "limit_writing", "confine_files"):
        monkeypatch.setattr(sandbox, limit, lambda *_: None)
    monkeypatch.setattr(sandbox, "limit_opening", lambda _: contextlib.nullcontext())
    path = write_tiff(tmp_path / "scene.tif", blobs(), nodata=0)
    wanted = {"probabilities": True, "preview": True, **WANTED}
    asked = SceneRequest(card=CARD, limits=GeoLimits(tile_bytes=0), if_few=if_few, **wanted)
    with child_here(path, asked, tmp_path) as opened:
        if not if_few:
            with pytest.raises(RasterTooLarge, match="sieve=9"):
                run(opened, sign_model)
            return
        products = run(opened, sign_model)
        assert (products.polygons, products.geopackage) == (None, None)
        assert set(products.left_out) == {"polygons", "geopackage"}
        (why,) = set(products.left_out.values())
        assert why.startswith("polygons_left_out: ")
        assert why in products.notes
        assert products.item is not None
        item = json.loads(products.item.read_text())
        assert why in item["properties"]["baton:notes"]
        files = {asset["href"].removeprefix("./") for asset in item["assets"].values()} | {"item.json"}
        assert files == {"mask.tif", "probabilities.tif", "preview.png", "mask.qml", "item.json"}
        assert {made.name for made in products.item.parent.iterdir()} == files


def test_the_style_names_classes_and_colours(decoders: Decoders, tmp_path: Path) -> None:
    """As QGIS reads it from beside the mask."""
    scene(decoders, tmp_path, blobs(), tmp_path / "out")
    entries = ElementTree.parse(tmp_path / "out" / "mask.qml").iter("paletteEntry")  # ours
    assert [(entry.get("value"), entry.get("label"), entry.get("color")) for entry in entries] == [
        (str(value), label.name, "#" + bytes(label.colour).hex()) for value, label in enumerate(CARD.classes)
    ]


@pytest.mark.parametrize("where", ["north up", "antimeridian", "no place"])
def test_the_item_says_where_and_what(decoders: Decoders, tmp_path: Path, where: str) -> None:
    """Its areas are the answer's, its files those that are there; pystac's schemas take it."""
    products = scene(decoders, tmp_path, blobs(), tmp_path / "out", mask=True, name="one", **PLACES[where])
    item = json.loads((tmp_path / "out" / "item.json").read_text())
    assert item["id"] == "one"
    assert [said["hectares"] for said in item["properties"]["baton:classes"]] == [
        area.hectares for area in products.areas
    ]
    for asset in item["assets"].values():
        assert (tmp_path / "out" / asset["href"]).is_file()
    assert ("bbox" in item) == (item["geometry"] is not None) == (where != "no place")
    import pystac
    from pystac.validation import validate_dict

    read = pystac.Item.from_dict(item)
    if where != "no place":
        validate_dict(item)
        assert all(math.isfinite(number) for number in read.bbox)


@pytest.mark.parametrize("where", PLACES)
def test_pyogrio_reads_both(decoders: Decoders, tmp_path: Path, where: str) -> None:
    """Layers, counts, CRS and classes as QGIS would; GDAL's own area of each polygon is that of its pixels."""
    import pyogrio

    products = scene(decoders, tmp_path, blobs(), tmp_path / "out", **PLACES[where])
    count = len(features(tmp_path / "out"))
    for name in ("mask.geojson", "mask.gpkg"):
        info = pyogrio.read_info(tmp_path / "out" / name)
        assert (info["features"], list(info["fields"])) == (count, ["value", "class", "pixels", "hectares"])
        assert info["geometry_type"] == "Polygon"
        *_, fields = pyogrio.raw.read(
            tmp_path / "out" / name, columns=["value", "pixels"], read_geometry=False
        )
        for value, area in enumerate(products.areas):
            assert fields[1][fields[0] == value].sum() == area.pixels
    if where != "no place":
        crs = PLACES[where].get("crs", "EPSG:32633")
        assert pyogrio.read_info(tmp_path / "out" / "mask.gpkg")["crs"] == crs
        asked = "SELECT pixels, OGR_GEOM_AREA AS area FROM mask"
        *_, (pixels, area) = pyogrio.raw.read(tmp_path / "out" / "mask.gpkg", sql=asked, sql_dialect="OGRSQL")
        a, b, _, d, e, _ = PLACES[where].get("transform", NORTH_UP)[:6]
        np.testing.assert_allclose(area, pixels * abs(a * e - b * d), rtol=1e-9)
