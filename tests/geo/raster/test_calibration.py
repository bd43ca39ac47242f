"""Scale and offset: of the request, else of the file, else the model's alone; and products known to need an offset."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from geo.raster.made import make_card, read_tiff, read_tile, run, write_tiff

from baton_geo.card import Band, Card
from baton_geo.errors import GeoError, RasterUnusable, RequestInvalid
from baton_geo.prithvi import PrithviSegmenter
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneInfo, SceneRequest
from baton_geo.raster.pixels.calibration import ScaleOffset, Stated, conversion
from baton_geo.settings import GeoLimits
from training.flood_scenes.scenes import SyntheticScene, make_scene
from training.flood_scenes.sensor import NODATA
from training.flood_tiny.measure import Figures, draw_scenes, figures
from training.flood_tiny.predict import SHIPPED, Predictor
from training.flood_tiny.seeds import HELD_OUT_SEEDS

FLOOD = Card.model_validate(json.loads((SHIPPED / "config.json").read_text())["baton_geo"])
REFLECTANCE = Card(
    bands=(Band(name="B1", mean=0.0, std=0.1),),
    classes=make_card().classes,
    tile=32,
    overlap=8,
    scale=1e-4,
    valid_range=(-0.2, 2.0),
    nodata=-9999,
)
TEN_THOUSANDS = REFLECTANCE.model_copy(
    update={"scale": 1.0, "valid_range": None, "bands": (Band(name="B1", mean=0.0, std=1000.0),)}
)
BASELINE_4 = "S2B_MSIL2A_20240501T095029_N0510_R079_T33TXM_20240501T125910.SAFE"
BASELINE_2 = "S2B_MSIL2A_20200501T095029_N0214_R079_T33TXM_20200501T125910.SAFE"
TRUTH = np.array([0.05, 0.25, 0.75], np.float64)
SHIFTED = (TRUTH * 10_000 + 1000).round().astype(np.uint16)


def seen(
    decoders: Decoders, path: Path, card: Card = REFLECTANCE, **asked: float | tuple[float, ...]
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], SceneInfo]:
    """What the model gets of the first row, in the units of the card's mean; and what the scene says of itself."""
    request = SceneRequest(card=card, limits=GeoLimits(tile_bytes=0), **asked)
    with decoders.open(path, request) as scene:
        tile = read_tile(scene, 0)
        assert tile is not None
        return tile[0, 0, 0, :3].astype(np.float64) * card.bands[0].std, scene.info


def row(path: Path, values: Any, dtype: str, tags: dict[str, str] | None = None, **own: Any) -> Path:
    """A scene of 20 x 3 pixels with those three values in each row, tags, and a scale and an offset of its band."""
    numbers = np.asarray(values)
    whole = numbers if dtype == "float32" else numbers.round()
    pixels = np.broadcast_to(whole.astype(dtype), (1, 20, 3))
    write_tiff(path, np.ascontiguousarray(pixels), nodata=own.pop("nodata", None))
    with rasterio.open(path, "r+") as file:
        file.update_tags(**(tags or {}))
        file.update_tags(1, **own.pop("band_tags", {}))
        file.scales, file.offsets = (own.pop("scale", 1.0),), (own.pop("offset", 0.0),)
    assert not own
    return path


def flooded(
    decoders: Decoders,
    folder: Path,
    model: PrithviSegmenter,
    scenes: dict[int, SyntheticScene],
    added: int,
    **asked: float,
) -> Figures:
    """The shipped model by way of a decoder process and plain torch, `added` to each number that is not nodata."""

    def mask(pixels: Any) -> Any:
        raw = np.where(pixels == NODATA, NODATA, pixels + added).astype(np.int16)
        path = write_tiff(folder / "scene.tif", raw, nodata=NODATA)
        with decoders.open(path, SceneRequest(card=FLOOD, **asked)) as scene, torch.inference_mode():
            for tile in range(scene.info.tiles):
                if (values := read_tile(scene, tile)) is not None:
                    scene.write(tile, model(torch.from_numpy(values)[None])[0].numpy())
            written = scene.finish().mask
            assert written is not None
            return read_tiff(written)[0] == 1

    return figures(mask, scenes)


def test_an_offset_that_is_said_costs_no_accuracy(decoders: Decoders, tmp_path: Path) -> None:
    """One tile of a held-out scene with Sentinel-2's 1,000 added: the mask is another, and the same once it is said."""
    seed = HELD_OUT_SEEDS[0]
    scenes, model = {seed: make_scene(seed, 256, 256)}, Predictor.of_folder().model
    plain = flooded(decoders, tmp_path, model, scenes, 0).pooled
    assert plain > 0.95
    assert flooded(decoders, tmp_path, model, scenes, 1000).pooled < 0.8
    assert flooded(decoders, tmp_path, model, scenes, 1000, offset=-1000).pooled == pytest.approx(
        plain, abs=1e-3
    )


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_four_scenes_with_an_offset_reach_their_figures(
    decoders: Decoders, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Intersection over union, pooled: 0.981; 0.609 with 1,000 added and not said; said, 0.981 again."""
    scenes, model = draw_scenes(HELD_OUT_SEEDS[:4]), Predictor.of_folder().model
    plain = flooded(decoders, tmp_path, model, scenes, 0).pooled
    unsaid = flooded(decoders, tmp_path, model, scenes, 1000).pooled
    said = flooded(decoders, tmp_path, model, scenes, 1000, offset=-1000).pooled
    record_property("IoU plain, offset unsaid, said", (plain, unsaid, said))
    assert plain > 0.97
    assert unsaid < 0.7
    assert said == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize(
    ("values", "dtype", "asked"),
    [
        (SHIFTED, "uint16", {"offset": -1000}),
        (SHIFTED, "uint16", {"scale": 1, "offset": -1000}),
        (SHIFTED, "uint16", {"scale": 1e-4, "offset": -0.1}),
        (SHIFTED, "float32", {"scale": 1e-4, "offset": -0.1}),
        ((TRUTH + 0.2) / 2.75e-5, "uint16", {"scale": 2.75e-5, "offset": -0.2}),  # Landsat's level 2
        ((TRUTH + 0.2) / 2.75e-5, "uint16", {"scale": 0.275, "offset": -2000}),
        (TRUTH * 100, "uint8", {"scale": 0.01}),
        (TRUTH * 100, "float32", {"scale": 0.01}),
        (TRUTH * 100, "float32", {"scale": 100}),
        (TRUTH * 10_000, "float32", {"scale": 1e-4}),
        (TRUTH, "float32", {"scale": 10_000}),
        (TRUTH, "float32", {"offset": 0}),
        (TRUTH + 0.1, "float32", {"offset": -0.1}),
        (TRUTH * 10_000, "int16", {"scale": 1}),
    ],
)
def test_what_a_request_says_leads_to_the_models_units(
    decoders: Decoders, tmp_path: Path, values: Any, dtype: str, asked: dict[str, float]
) -> None:
    """Reflectance, whichever of the two units of the card number * scale + offset gives; and a note says which."""
    got, info = seen(decoders, row(tmp_path / "a.tif", values, dtype), **asked)
    np.testing.assert_allclose(got, TRUTH, atol=2e-5)
    assert any(note.startswith("scale_of_request: the request says a scale of") for note in info.notes)


def test_floats_for_a_model_of_ten_thousands(decoders: Decoders, tmp_path: Path) -> None:
    """A card that scales nothing takes reflectance x 10000: of reflectance a request says scale=10000."""
    path = row(tmp_path / "a.tif", TRUTH, "float32")
    got, _ = seen(decoders, path, TEN_THOUSANDS, scale=10_000)
    np.testing.assert_allclose(got, TRUTH * 10_000, rtol=1e-5)
    got, _ = seen(decoders, row(tmp_path / "b.tif", SHIFTED, "uint16"), TEN_THOUSANDS, offset=-1000)
    np.testing.assert_allclose(got, TRUTH * 10_000, rtol=1e-5)


@pytest.mark.parametrize(
    "own",
    [
        {"scale": 1e-4, "offset": -0.1},
        {"tags": {"scale_factor": "0.0001", "add_offset": "-0.1"}},
        {"band_tags": {"scale_factor": "0.0001", "add_offset": "-0.1"}},
        {"tags": {"BOA_ADD_OFFSET": "-1000", "PRODUCT_URI": BASELINE_4}},
        {"band_tags": {"BOA_ADD_OFFSET": "-1000"}},
        {"scale": 1e-4, "tags": {"BOA_ADD_OFFSET": "-1000"}},
        {"scale": 1e-4, "tags": {"add_offset": "-0.1"}},
        {"scale": 1e-4, "offset": -0.1, "tags": {"PRODUCT_URI": BASELINE_4}},
    ],
)
def test_what_the_file_states_is_used(decoders: Decoders, tmp_path: Path, own: dict[str, Any]) -> None:
    """Band scales and offsets, and the tags that others write; with a note."""
    got, info = seen(decoders, row(tmp_path / "a.tif", SHIFTED, "uint16", **own))
    np.testing.assert_allclose(got, TRUTH, atol=1e-6)
    assert any(
        note.startswith("scale_of_file: the file states a scale of") and "are used" in note
        for note in info.notes
    )


def test_the_request_wins_over_the_file(decoders: Decoders, tmp_path: Path) -> None:
    """Either of the two in the request, and nothing that the file states counts; nor what it is by name."""
    for own in ({"scale": 0.5, "offset": 7.0}, {"tags": {"PRODUCT_URI": BASELINE_4}}, {"scale": np.nan}):
        path = row(tmp_path / "a.tif", SHIFTED, "uint16", **own)
        np.testing.assert_allclose(seen(decoders, path, offset=-1000)[0], TRUTH, atol=1e-6)
        np.testing.assert_allclose(seen(decoders, path, offset=0)[0], TRUTH + 0.1, atol=1e-6)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"scale": 1e-4, "offset": -0.1}, "the file states an offset of -0.1, and the request a scale alone"),
        ({"tags": {"PRODUCT_URI": BASELINE_4}}, "add offset=-0.1 to the request"),
    ],
)
def test_a_scale_alone_loses_no_offset(
    decoders: Decoders, tmp_path: Path, own: dict[str, Any], words: str
) -> None:
    """Where the file's numbers hold one, the request has to say it, 0 if there is none."""
    path = row(tmp_path / "a.tif", SHIFTED, "uint16", **own)
    with pytest.raises(RasterUnusable, match=words) as caught:
        seen(decoders, path, scale=1e-4)
    assert caught.value.param == "offset"
    np.testing.assert_allclose(seen(decoders, path, scale=1e-4, offset=-0.1)[0], TRUTH, atol=1e-6)


def test_each_band_has_its_own(decoders: Decoders, tmp_path: Path) -> None:
    """Of a file whose bands state different ones, for the bands in use, in the order the model takes them."""
    pixels = np.stack([np.full((20, 20), value, "uint16") for value in (1, 5000, 2000)])
    path = write_tiff(tmp_path / "a.tif", pixels)
    with rasterio.open(path, "r+") as file:
        file.scales, file.offsets = (9.0, 1e-4, 2e-4), (5.0, -0.1, 0.0)
    card = REFLECTANCE.model_copy(update={"bands": REFLECTANCE.bands * 2})
    request = SceneRequest(card=card, indices=(2, 1))
    with decoders.open(path, request) as scene:
        tile = read_tile(scene, 0)
        assert tile is not None
        np.testing.assert_allclose(tile[:, 0, 0, 0] * 0.1, [0.4, 0.4], atol=1e-6)
        assert any("for some bands" in note for note in scene.info.notes)


@pytest.mark.parametrize(
    ("dtype", "tags", "words"),
    [
        ("uint16", {"PRODUCT_URI": BASELINE_4}, "Sentinel-2 L2A of processing baseline 05.10"),
        ("uint16", {"TIFFTAG_IMAGEDESCRIPTION": f"cut from {BASELINE_4}"}, "add offset=-1000"),
        ("uint16", {"PRODUCT_URI": BASELINE_4.replace("N0510", "N0400")}, "baseline 04.00"),
        ("uint16", {"PRODUCT_URI": BASELINE_4.replace("L2A", "L1C")}, "Sentinel-2 L1C"),
        ("int16", {"PROCESSING_BASELINE": "04.00"}, "offset=0 if the offset has been removed"),
        ("uint16", {"s2:processing_baseline": "05.11"}, "baseline 05.11"),
        ("uint16", {"PRODUCT_URI": BASELINE_4, "scale_factor": "0.0001"}, "add offset=-1000"),
        ("float32", {"PRODUCT_URI": BASELINE_4, "BOA_ADD_OFFSET": "-1000"}, "scale=0.0001 and offset=-0.1"),
    ],
)
def test_a_product_that_needs_an_offset_and_states_none_is_refused(
    decoders: Decoders, tmp_path: Path, dtype: str, tags: dict[str, str], words: str
) -> None:
    """Not mapped wrongly: 422, with what to add."""
    values = SHIFTED if dtype != "float32" else TRUTH
    with pytest.raises(RasterUnusable, match=words) as caught:
        seen(decoders, row(tmp_path / "a.tif", values, dtype, tags))
    assert (caught.value.status, caught.value.param) == (422, "offset")


@pytest.mark.parametrize(
    ("dtype", "tags"),
    [
        ("uint16", {"PRODUCT_URI": BASELINE_2}),
        ("uint16", {"PROCESSING_BASELINE": "03.01"}),
        ("uint16", {"PROCESSING_BASELINE": "of ours"}),
        ("uint16", {"PRODUCT_URI": BASELINE_4, "earthsearch:boa_offset_applied": "True"}),
        ("int16", {"PRODUCT_URI": BASELINE_4, "add_offset": "0.0", "scale_factor": "0.0001"}),  # HLS
        ("int16", {"PROCESSING_BASELINE": "05.09", "HLS_PROCESSING_TIME": "2024-05-01T00:00:00Z"}),
        ("uint16", {"PRODUCT_URI": BASELINE_4, "BOA_ADD_OFFSET": "0"}),
        ("uint16", {"PRODUCT_URI": BASELINE_4, "BOA_ADD_OFFSET": "-1000", "boa_offset_applied": "true"}),
    ],
)
def test_products_without_an_offset_are_taken_as_they_are(
    decoders: Decoders, tmp_path: Path, dtype: str, tags: dict[str, str]
) -> None:
    """Older ones, and those whose provider took it off and says so."""
    got, _ = seen(decoders, row(tmp_path / "a.tif", TRUTH * 10_000, dtype, tags))
    np.testing.assert_allclose(got, TRUTH, atol=1e-6)


def test_a_picture_of_a_product_has_no_offset(decoders: Decoders, tmp_path: Path) -> None:
    """Sentinel-2's true colour image has the product's tags and 8 bits."""
    path = row(tmp_path / "a.tif", [1, 2, 3], "uint8", {"PRODUCT_URI": BASELINE_4})
    assert seen(decoders, path, make_card())[0].tolist() == [1, 2, 3]


def test_nodata_is_found_before_scaling(decoders: Decoders, tmp_path: Path) -> None:
    """The file's number 0 is nodata and becomes the model's 0, not -0.1; a number that only becomes 0 is a value."""
    path = row(tmp_path / "a.tif", [0, 1000, 6000], "uint16", nodata=0)
    request = SceneRequest(card=REFLECTANCE, offset=-1000)
    with decoders.open(path, request) as scene:
        tile = read_tile(scene, 0)
        assert tile is not None
        np.testing.assert_allclose(tile[0, 0, 0, :3] * 0.1, [0, 0, 0.5], atol=1e-6)
        scene.write(0, np.zeros((2, 32, 32), np.float32))
        assert scene.finish().nodata_pixels == 20


def test_values_are_judged_after_scaling(decoders: Decoders, tmp_path: Path) -> None:
    """The card's range is about values: what the file holds decides nothing, and the refusal says what was done."""
    path = row(tmp_path / "a.tif", TRUTH * 10_000, "float32")
    with pytest.raises(RasterUnusable, match=r"multiplying by 1: .* A request may give scale and offset"):
        seen(decoders, path)
    seen(decoders, path, scale=1e-4)
    with pytest.raises(RasterUnusable, match=r"multiplying by 0.0001 and adding -1000"):
        seen(decoders, path, scale=1e-4, offset=-1000)
    with pytest.raises(RasterUnusable, match=r"multiplying by 0.0001 and adding 3: they go from 3.1 to 3.1"):
        seen(decoders, row(tmp_path / "b.tif", [1000] * 3, "uint16", scale=1e-4, offset=3.0))


def test_an_offset_in_the_wrong_unit_is_refused(decoders: Decoders, tmp_path: Path) -> None:
    """-0.1 added to integers x 10000 would change nothing, and leave the mask wrong."""
    path = row(tmp_path / "a.tif", SHIFTED, "uint16")
    with pytest.raises(RequestInvalid, match=r"too small to change anything.*scale=0\.0001") as caught:
        seen(decoders, path, offset=-0.1)
    assert caught.value.param == "offset"


def test_a_stated_scale_that_leads_nowhere(decoders: Decoders, tmp_path: Path) -> None:
    """A card in ten thousands takes such integers as they are, whatever a scale of 0.0001 says; an offset is refused."""
    hls = row(tmp_path / "a.tif", TRUTH * 10_000, "int16", scale=1e-4)
    got, info = seen(decoders, hls, TEN_THOUSANDS)
    np.testing.assert_allclose(got, TRUTH * 10_000, rtol=1e-5)
    assert any("used as they are" in note for note in info.notes)
    with pytest.raises(RasterUnusable, match="do not lead to the model's units; give scale and offset"):
        seen(decoders, row(tmp_path / "b.tif", SHIFTED, "uint16", scale=1e-4, offset=-0.1), TEN_THOUSANDS)


@pytest.mark.parametrize(
    "line", [(0.0, 0.0), (-1.0, 0.0), (np.nan, 0.0), (np.inf, 0.0), (1.0, np.nan), (1.0, 1e300)]
)
def test_a_stated_scale_that_cannot_be(decoders: Decoders, tmp_path: Path, line: tuple[float, float]) -> None:
    """0, negative, NaN, infinite: refused, and the request can say another."""
    path = row(tmp_path / "a.tif", SHIFTED, "uint16", scale=line[0], offset=line[1])
    with pytest.raises(RasterUnusable, match="which cannot be"):
        seen(decoders, path)
    np.testing.assert_allclose(seen(decoders, path, offset=-1000)[0], TRUTH, atol=1e-6)


def test_nothing_said_is_the_card_alone() -> None:
    """As before there was a scale to say: the card's number for the type, and its offset."""
    card = REFLECTANCE.model_copy(update={"float_scale": 2.0, "offset": 0.5})
    for dtype, times in (("int16", 1e-4), ("float32", 2.0)):
        line = conversion(card, np.dtype(dtype), (0,), Stated((ScaleOffset(),)))
        assert (line.times.tolist(), line.plus.tolist(), line.notes) == ([times], [0.5], ())


def test_messages_are_for_the_person_who_made_the_raster(decoders: Decoders, tmp_path: Path) -> None:
    """One printable line each, whatever the tags hold."""
    path = row(tmp_path / "a.tif", SHIFTED, "uint16", {"PRODUCT_URI": BASELINE_4 + "\n\x1b[31m" * 500})
    with pytest.raises(GeoError) as caught:
        seen(decoders, path)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400


def test_as_many_numbers_as_bands(decoders: Decoders, tmp_path: Path) -> None:
    """One for all, or one a band in use; any other count is the request's fault."""
    path = row(tmp_path / "a.tif", SHIFTED, "uint16")
    np.testing.assert_allclose(seen(decoders, path, offset=(-1000.0,))[0], TRUTH, atol=1e-6)
    with pytest.raises(
        RequestInvalid, match=r"offset has 2 numbers; give one, or 1, one a band: B1"
    ) as caught:
        seen(decoders, path, offset=(-1000.0, 0.0))
    assert caught.value.param == "offset"


@pytest.mark.parametrize("side", [300, 1200])
def test_a_scene_speaks_by_all_of_its_pixels(decoders: Decoders, tmp_path: Path, side: int) -> None:
    """Small scenes are looked at whole, of large ones a sixteenth; either way 4 % dark pixels suggest an offset."""
    pixels = np.full((1, side, side), 2500, "uint16")
    pixels[:, ::25] = 500
    path = write_tiff(tmp_path / "a.tif", pixels)
    with decoders.open(path, SceneRequest(card=REFLECTANCE.model_copy(update={"tile": 600}))) as scene:
        products = run(scene, lambda tile: np.zeros((2, 600, 600), np.float32))
    assert [note.partition(":")[0] for note in products.notes] == ["offset_suspected"]


RADAR = REFLECTANCE.model_copy(
    update={
        "bands": (
            Band(name="B1", mean=0.0, std=0.1),
            Band(name="VV", mean=-12.0, std=5.0, scale=1.0, valid_range=(-60.0, 30.0)),
        ),
        "nodata_replace": 500.0,
    }
)


def beside(path: Path, optical: Any, radar: Any, dtype: str = "float32", **own: Any) -> Path:
    """A scene of an optical band and one in decibels, of three values in each row."""
    pixels = np.stack([np.broadcast_to(np.asarray(values, dtype), (20, 3)) for values in (optical, radar)])
    return write_tiff(path, np.ascontiguousarray(pixels), ("B1", "VV"), **own)


@pytest.mark.fault("F13")
def test_a_band_has_its_own_unit(decoders: Decoders, tmp_path: Path) -> None:
    """Decibels beside reflectances stay as they are; a single scale and offset are for the reflectances alone."""
    decibels = np.array([-20.0, -7.0, 3.0])
    path = beside(tmp_path / "a.tif", TRUTH * 10_000 + 1000, decibels)
    request = SceneRequest(card=RADAR, limits=GeoLimits(tile_bytes=0), scale=1e-4, offset=-0.1)
    with decoders.open(path, request) as scene:
        tile = read_tile(scene, 0)
    assert tile is not None
    np.testing.assert_allclose(tile[0, 0, 0, :3] * 0.1, TRUTH, atol=1e-5)
    np.testing.assert_allclose(tile[1, 0, 0, :3] * 5 - 12, decibels, atol=1e-5)
    whole = beside(tmp_path / "b.tif", TRUTH * 10_000, decibels, "int16", nodata=-9999)
    with decoders.open(whole, SceneRequest(card=RADAR, limits=GeoLimits(tile_bytes=0))) as scene:
        tile = read_tile(scene, 0)
    assert tile is not None
    np.testing.assert_allclose(tile[:, 0, 0, :3], [TRUTH / 0.1, (decibels + 12) / 5], atol=1e-5)


@pytest.mark.fault("F13")
def test_a_band_has_its_own_range(decoders: Decoders, tmp_path: Path) -> None:
    """Radar that is no decibels is refused by its band's name and range, not the reflectances'."""
    path = beside(tmp_path / "a.tif", TRUTH, [0.01, 200.0, 300.0])
    request = SceneRequest(card=RADAR, limits=GeoLimits(tile_bytes=0))
    with pytest.raises(RasterUnusable, match=r"band 'VV': 66\.7% of the pixels are outside -60 to 30"):
        decoders.open(path, request)


def test_nodata_may_be_replaced_by_a_number(decoders: Decoders, tmp_path: Path) -> None:
    """The model is given what its training put in the place of nodata, in the units of each band."""
    pixels = np.full((2, 20, 3), 1000, "int16")
    pixels[1] = -12
    pixels[:, :, 1] = -9999
    path = write_tiff(tmp_path / "a.tif", pixels, ("B1", "VV"), nodata=-9999)
    radar = RADAR.model_copy(update={"nodata_replace": 2.0})
    with decoders.open(path, SceneRequest(card=radar, limits=GeoLimits(tile_bytes=0))) as scene:
        tile = read_tile(scene, 0)
    assert tile is not None
    np.testing.assert_allclose(tile[:, 0, 0, :2], [[1.0, 0.002], [0.0, 2.8]], atol=1e-5)
