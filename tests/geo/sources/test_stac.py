"""STAC items of several catalogues: the files of the model's bands, and what is said of their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from geo.raster.made import UTM, write_jp2, write_tiff
from geo.sources.hosts import page, redirect
from geo.sources.ranges import Ranges, whole
from geo.sources.test_ranges import answer, local, mask_of, serving

from baton_geo.card import Card
from baton_geo.contract import geo_request
from baton_geo.errors import GeoError, RasterUnusable, RequestInvalid, SourceRefused
from baton_geo.prithvi import card_of
from baton_geo.stac import files_of
from training.flood_tiny.predict import SHIPPED

CARD: Card = card_of(json.loads((SHIPPED / "config.json").read_text()))
TIFF = "image/tiff; application=geotiff; profile=cloud-optimized"
KEYS = ("B02", "B03", "B04", "B8A", "B11", "B12")
NAMES = ("blue", "green", "red", "nir08", "swir16", "swir22")


def item(assets: dict[str, Any], **properties: Any) -> dict[str, Any]:
    more = {"datetime": "2024-05-01T10:00:00Z", "platform": "sentinel-2a", **properties}
    own = {"rel": "self", "href": "https://stac.example.org/items/1.json"}
    return {"type": "Feature", "id": "1", "properties": more, "assets": assets, "links": [own]}


def numbered(**more: Any) -> dict[str, Any]:
    """As Planetary Computer: numbers as keys, colours beside them."""
    return {
        key: {"href": f"./{key}.tif", "type": TIFF, "eo:bands": [{"name": key, "common_name": name}], **more}
        for key, name in zip(KEYS, NAMES, strict=True)
    }


def worded(**band: Any) -> dict[str, Any]:
    """As Earth Search: words as keys, twins in JPEG 2000, a thumbnail, a picture of three bands."""
    assets: dict[str, Any] = {
        name: {"href": f"https://files.example.org/{name}.tif", "type": TIFF, "raster:bands": [band]}
        for name in NAMES
    }
    assets |= {f"{name}-jp2": {"href": f"s3://x/{name}.jp2", "type": "image/jp2"} for name in NAMES}
    assets["thumbnail"] = {"href": "https://files.example.org/t.jpg", "type": "image/jpeg"}
    assets["visual"] = {
        "href": "v.tif",
        "type": TIFF,
        "eo:bands": [{"name": n} for n in ("red", "green", "blue")],
    }
    return assets


def test_bands_are_found_by_keys_and_names() -> None:
    """Numbers, common names, STAC 1.1's `bands`; relative addresses lead from the item's own."""
    by_number = files_of(item(numbered()), None, CARD)
    assert [asset.data for _, _, asset in by_number] == [
        f"https://stac.example.org/items/{key}.tif" for key in KEYS
    ]
    assert [spec.name for _, spec, _ in by_number] == [band.name for band in CARD.bands]
    by_word = files_of(item(worded()), None, CARD)
    assert [asset.data for _, _, asset in by_word] == [
        f"https://files.example.org/{name}.tif" for name in NAMES
    ]
    newer = {
        f"asset-{n}": {"href": f"{n}.tif", "bands": [{"eo:common_name": name}]}
        for n, name in enumerate(NAMES)
    }
    by_band = files_of(item(newer), "https://a.example.org/x/item.json", CARD)
    assert [asset.data for _, _, asset in by_band] == [f"https://a.example.org/x/{n}.tif" for n in range(6)]
    together = {"all": {"href": "all.tif", "bands": [{"name": key} for key in KEYS]}}
    (only,) = files_of(item(together), None, CARD)
    assert (only[1].name, only[2].data) == (None, "https://stac.example.org/items/all.tif")


SAID: list[tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = [
    ({"scale": 0.0001, "offset": -0.1}, {}, {"scale_factor": "0.0001", "add_offset": "-0.1"}),
    ({"scale": 0.0001, "offset": -0.1}, {"earthsearch:boa_offset_applied": True}, {"scale_factor": "0.0001"}),
    ({}, {"s2:processing_baseline": "05.10"}, {"BOA_ADD_OFFSET": "-1000"}),
    ({}, {"processing:version": "05.11"}, {"BOA_ADD_OFFSET": "-1000"}),
    ({}, {"s2:processing_baseline": "03.01"}, {}),
    ({}, {"s2:processing_baseline": "05.10", "earthsearch:boa_offset_applied": True}, {}),
    ({}, {"s2:processing_baseline": "05.10", "platform": "landsat-8"}, {}),
    (
        {},
        {"s2:processing_baseline": "05.10"}
        | {f"p{n}": n for n in range(130)}
        | {"earthsearch:boa_offset_applied": True},
        {},
    ),
]


@pytest.mark.parametrize(("band", "properties", "tags"), SAID)
def test_flags_and_baseline_decide_about_the_offset(
    band: dict[str, Any], properties: dict[str, Any], tags: dict[str, str]
) -> None:
    """An applied offset is not applied again; a baseline that has one, and a flag that says nothing, needs it."""
    _, spec, _ = files_of(item(worded(**band), **properties), None, CARD)[0]
    assert spec.band_tags == (tags,)


def stored(folder: Path, shift: int = 0) -> tuple[Path, Path]:
    """Files of the six bands, the last two at 20 m, with a number added; and one of all at 10 m without it."""
    random = np.random.default_rng(1)
    bands = [random.integers(1, 3000, (1, 300, 300)).astype("uint16") for _ in KEYS]
    for place in (4, 5):
        bands[place] = bands[place][:, ::2, ::2].repeat(2, 1).repeat(2, 2)
    folder.mkdir()
    for place, (key, band) in enumerate(zip(KEYS, bands, strict=True)):
        ratio = 2 if place > 3 else 1
        transform = rasterio.Affine(10 * ratio, 0, 500_000, 0, -10 * ratio, 5_000_000)
        write_tiff(folder / f"{key}.tif", band[:, ::ratio, ::ratio] + np.uint16(shift), transform=transform)
    every = write_tiff(folder / "all.tif", np.concatenate(bands), tuple(b.name for b in CARD.bands), crs=UTM)
    return folder, every


def in_jp2(**more: Any) -> dict[str, Any]:
    """The same item of JPEG 2000 files alone, as Sentinel-2's own products have them."""
    return {
        key: asset | {"href": f"./{key}.jp2", "type": "image/jp2", **more}
        for key, asset in numbered().items()
    }


def test_jpeg_2000_is_taken_where_there_is_no_geotiff() -> None:
    """By its media type, or its name where the item gives none; of twins the GeoTIFF, if all bands have one."""
    for assets in (in_jp2(), {key: {"href": f"./{key}.JP2"} for key in KEYS}):
        chosen = [str(asset.data) for _, _, asset in files_of(item(assets), None, CARD)]
        assert [name.casefold()[-7:] for name in chosen] == [f"{key}.jp2".casefold() for key in KEYS]
    twins = numbered() | {f"{key}-jp2": asset for key, asset in in_jp2().items()}
    chosen = [str(asset.data) for _, _, asset in files_of(item(twins), None, CARD)]
    assert [name[-7:] for name in chosen] == [f"{key}.tif" for key in KEYS]
    del twins["B04"]
    chosen = [str(asset.data) for _, _, asset in files_of(item(twins), None, CARD)]
    assert [name[-7:] for name in chosen] == [f"{key}.jp2" for key in KEYS]


@pytest.mark.parametrize("part", [{}, {"window": [50, 60, 200, 180]}])
def test_an_item_of_jpeg_2000_files_is_mapped(tmp_path: Path, part: dict[str, Any]) -> None:
    """Each band a file of its own size, fetched whole, by ranges and without: the mask of the GeoTIFFs."""
    folder, every = stored(tmp_path / "files", shift=1000)
    own = item(in_jp2(), **{"s2:processing_baseline": "05.10"}) | {"links": []}
    with serving(tmp_path, every) as (host, _, plugin):
        host.pages["/items/1.json"] = page(json.dumps(own).encode())
        url = f"http://127.0.0.1:{host.port}/items/1.json"
        for key in KEYS:
            with rasterio.open(folder / f"{key}.tif") as file:
                pixels, transform = file.read(), file.transform
            path = folder / f"{key}.jp2"
            write_jp2(path, pixels, transform=transform, NBITS=15, blockxsize=64, blockysize=64)
            host.pages[f"/items/{key}.jp2"] = Ranges(path) if part else whole(path)
        answered = answer(plugin, {"item": url, **part})
        expected = answer(plugin, local(every) | part)
        assert "image/jp2" in dict(host.asked[-1][1])["Accept"]
    np.testing.assert_array_equal(mask_of(answered, tmp_path), mask_of(expected, tmp_path))
    assert (answered.crs, answered.transform) == (expected.crs, expected.transform)
    if part:
        assert answered.fetched is not None
        assert answered.fetched.bytes == sum((folder / f"{key}.jp2").stat().st_size for key in KEYS)


def test_an_item_at_an_address_is_mapped(tmp_path: Path) -> None:
    """Its offset is taken off; the model's first band, which decides here, is that of the plain file."""
    folder, every = stored(tmp_path / "files", shift=1000)
    with serving(tmp_path, every) as (host, _, plugin):
        for key in KEYS:
            host.pages[f"/items/{key}.tif"] = Ranges(folder / f"{key}.tif")
        own = item(numbered(), **{"s2:processing_baseline": "05.10"}) | {"links": []}
        host.pages["/items/1.json"] = page(json.dumps(own).encode())
        url = f"http://127.0.0.1:{host.port}/items/1.json"
        part = answer(plugin, {"item": url, "window": [50, 60, 200, 180]})
        for key in KEYS:
            host.pages[f"/items/{key}.tif"] = whole(folder / f"{key}.tif")
        answered, expected = answer(plugin, {"item": url}), answer(plugin, local(every))
    np.testing.assert_array_equal(mask_of(answered, tmp_path), mask_of(expected, tmp_path))
    np.testing.assert_array_equal(mask_of(part, tmp_path), mask_of(expected, tmp_path)[60:240, 50:250])
    assert any(text.startswith("scale_of_file") for text in answered.notes)


WRONG: list[tuple[dict[str, Any], type[GeoError], str]] = [
    ({"type": "Feature"}, RequestInvalid, "no STAC item"),
    ({"type": "Feature", "assets": {str(n): {} for n in range(10_000)}}, RequestInvalid, "10000 assets"),
    (item({}), RasterUnusable, "not the model's bands"),
    (item({key: {"href": f"{key}.tif"} for key in KEYS[:5]}), RasterUnusable, "is missing"),
    (item({**numbered(), "B02b": numbered()["B02"]}), RasterUnusable, "2 times"),
    (item(numbered()) | {"links": []}, RequestInvalid, "relative and"),
]


@pytest.mark.fault("F21")
@pytest.mark.parametrize(("wrong", "kind", "says"), WRONG)
def test_an_item_that_does_not_fit_is_refused(wrong: dict[str, Any], kind: type[GeoError], says: str) -> None:
    """With what is missing or doubled, before anything is fetched."""
    with pytest.raises(kind, match=says) as caught:
        files_of(wrong, None, CARD)
    assert caught.value.message.startswith("data.item")


@pytest.mark.fault("F21")
def test_links_of_an_item_lead_to_no_other_host(tmp_path: Path) -> None:
    """Neither its assets nor its redirects; an endless item ends at its limit."""
    _, every = stored(tmp_path / "files")
    with serving(tmp_path, every) as (host, _, plugin):
        for href in (
            "http://169.254.169.254/latest",
            "http://127.0.0.1:1/x.tif",
            "s3://bucket/x.tif",
            "file:///etc/passwd",
        ):
            assets = {key: {"href": href} for key in KEYS}
            with pytest.raises(SourceRefused, match=r"data\.item\.assets\.B"):
                answer(plugin, {"item": item(assets)})
        host.pages["/1.json"] = redirect("http://127.0.0.2/1.json")
        host.pages["/2.json"] = page(b"{" + b" " * (5 * 1024 * 1024))
        host.pages["/3.json"] = page(b"[" * 100_000)
        at = f"http://127.0.0.1:{host.port}"
        for name, says in (("1", "redirect leads there"), ("2", "item may have"), ("3", "no JSON object")):
            with pytest.raises(GeoError, match=says):
                answer(plugin, {"item": f"{at}/{name}.json"})


@pytest.mark.fault("F21")
def test_many_assets_of_a_request_are_refused() -> None:
    """Ten thousand files are no scene; nor is a name of a megabyte."""
    for assets in (
        {str(n): "https://a.example.org/x.tif" for n in range(10_000)},
        {"x" * 10**6: "https://a.org/"},
    ):
        with pytest.raises(RequestInvalid) as caught:
            geo_request({"assets": assets})
        assert len(caught.value.message) < 500
