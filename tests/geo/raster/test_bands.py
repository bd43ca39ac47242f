from __future__ import annotations

import pytest
from geo.raster.made import make_card

from baton_geo.card import Band, Card
from baton_geo.errors import RasterUnusable, RequestInvalid
from baton_geo.raster.pixels.bands import (
    KNOWN_BANDS,
    PRODUCTS,
    BandChoice,
    FileBand,
    FileBands,
    choose_bands,
    normalised,
)
from baton_geo.raster.reading.geotiff import read_band, read_product

RGB = (
    Band(name="BLUE", aliases=("B02",), mean=0, std=1),
    Band(name="GREEN", aliases=("B03",), mean=0, std=1),
    Band(name="RED", aliases=("B04",), mean=0, std=1),
)
CARD = make_card(tile=32, overlap=8).model_copy(update={"bands": RGB})


def chosen(names: tuple[str | None, ...], card: Card, indices: tuple[int, ...] | None = None) -> BandChoice:
    """The choice among bands of which the file gives only the descriptions."""
    return choose_bands(FileBands(tuple(FileBand(name) for name in names)), card, indices)


TWO_STEPS = CARD.model_copy(update={"frames": 2})


@pytest.mark.parametrize(
    ("card", "names", "indices", "expected"),
    [
        (CARD, ("RED", "GREEN", "BLUE"), None, (2, 1, 0)),
        (CARD, ("b04", " b03 ", "B02", "B08"), None, (2, 1, 0)),
        (CARD, ("B04_10m", "T33TXM_B03_10m", "S2 B02"), None, (2, 1, 0)),
        (CARD, ("Band 1 - Red", "mean_green", "Blue (490 nm)"), None, (2, 1, 0)),
        (CARD, ("Red Edge 1", "RED", "Green", "Blue", "red minus blue"), None, (3, 2, 1)),
        (CARD, ("Band 3", "Band 2", "Band 1"), None, (0, 1, 2)),
        (CARD, (None, None, None), None, (0, 1, 2)),
        (CARD, ("x", "y", None), None, (0, 1, 2)),
        (CARD, ("BLUE", "GREEN", "RED"), (2, 2, 0), (2, 2, 0)),
        (TWO_STEPS, (None,) * 6, None, (0, 1, 2, 3, 4, 5)),
        (TWO_STEPS, ("RED", "GREEN", "BLUE", "RED", "GREEN", "BLUE"), None, (2, 1, 0, 5, 4, 3)),
    ],
)
def test_chosen(
    card: Card, names: tuple[str | None, ...], indices: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    """Indices win, then names and aliases without case, then the order."""
    assert chosen(names, card, indices).bands == expected


def test_strange_names_are_told() -> None:
    """When names are there and none is known, the client hears that the order decided."""
    assert "used in order as BLUE, GREEN, RED" in chosen(("x", "y", "z"), CARD).notes[0]


@pytest.mark.parametrize(
    ("card", "names", "indices", "message"),
    [
        (
            CARD,
            ("BLUE", "GREEN"),
            None,
            "band 3 'RED' is missing; the file has 2 bands: 1 'BLUE', 2 'GREEN'; the model takes BLUE, GREEN, RED",
        ),
        (
            CARD,
            (None,),
            None,
            "band 2 'GREEN' is missing; the file has 1 band without names; the model takes BLUE, GREEN, RED",
        ),
        (TWO_STEPS, (None,) * 4, None, "band 5 'GREEN' of time step 2 is missing"),
        (
            CARD,
            (None,) * 13,
            None,
            "the file has 13 bands without names; name them as the model does, or say which with indices",
        ),
        (
            CARD,
            ("BLUE", "GREEN", "RED", "red"),
            None,
            "band 'RED' is in the file 2 times, the model takes it 1 times",
        ),
        (
            CARD,
            ("BLUE", "GREEN", "RED"),
            (0, 1, 12),
            "band 13, which indices asks for as 'RED', is missing; the file has 3 bands",
        ),
        (CARD, ("BLUE", "GREEN", "RED"), (0, 1, -1), "band 0, which indices asks for as 'RED', is missing"),
    ],
)
def test_refused(
    card: Card, names: tuple[str | None, ...], indices: tuple[int, ...] | None, message: str
) -> None:
    """What is missing is named, and what the file has."""
    with pytest.raises(RasterUnusable) as caught:
        chosen(names, card, indices)
    assert message in caught.value.message


def test_wrong_number_of_indices() -> None:
    """A list of the wrong length is the request's fault, and says which field."""
    with pytest.raises(
        RequestInvalid, match=r"indices names 2 bands; the model takes 3: BLUE, GREEN, RED"
    ) as caught:
        chosen((None,) * 13, CARD, (1, 2))
    assert caught.value.param == "indices"


def test_a_name_cannot_break_the_message() -> None:
    """A name of a thousand letters with a line break in it is shown short and on one line."""
    with pytest.raises(RasterUnusable) as caught:
        chosen(("BLUE", "a\n\x1b[31mb" + "c" * 1000), CARD)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400


def at(*wavelengths: float, names: tuple[str | None, ...] = ()) -> FileBands:
    """Bands of which the file says wavelengths, and perhaps names."""
    given = names or (None,) * len(wavelengths)
    return FileBands(tuple(FileBand(name, nm=nm) for name, nm in zip(given, wavelengths, strict=True)))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (at(665, 560, 490), (2, 1, 0)),
        (at(705, 665, 560, 490), (3, 2, 1)),
        (at(*range(400, 1000, 10)), (9, 16, 26)),  # of sixty narrow bands the nearest
        (at(665, 560, 443), None),  # nearer to the coastal band than to blue
        (at(490, 560, 710), None),  # the red edge
        (at(835, 660, 560, 485, names=("B4", "B3", "B2", "B1")), (3, 2, 1)),  # Landsat 5, by its wavelengths
    ],
)
def test_wavelengths(file: FileBands, expected: tuple[int, ...] | None) -> None:
    """Each band is the nearest within 40 nm, and not one that is nearer to another known band."""
    if expected is None:
        with pytest.raises(RasterUnusable, match=r"is missing.*say which with indices"):
            choose_bands(file, CARD, None)
    else:
        assert choose_bands(file, CARD, None).bands == expected


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_numbers_of_every_product(product: str) -> None:
    """As its files have them, with leading zeros and prefixes; of other products the same numbers are others."""
    column = PRODUCTS.index(product)
    known = [band.numbers[column] for band in KNOWN_BANDS if band.name in ("BLUE", "GREEN", "RED")]
    for form in ("{}", "B{}", "b0{}", "SR_B{}", *(("Band {}", "sr_band{}") if column else ())):
        names = tuple(form.format(text if form == "{}" else text.removeprefix("b")) for text in known[::-1])
        file = FileBands(tuple(FileBand(name) for name in names), product)
        assert choose_bands(file, CARD, None).bands == (2, 1, 0), names


@pytest.mark.fault("F9")
@pytest.mark.parametrize(
    ("names", "tags", "expected"),
    [
        # Landsat's level 2 is either generation's, unless a name or tag tells: as Sentinel-2's this was B, G, R
        (("SR_B2", "SR_B3", "SR_B4"), {}, None),
        (("SR_B1", "SR_B2", "SR_B3", "SR_B4"), {}, None),
        (("SR_B1", "SR_B2", "SR_B3", "SR_B4", "SR_B5", "SR_B7"), {}, None),
        (("sr_band1", "sr_band2", "sr_band3", "sr_band4"), {}, None),
        (("mean_sr_b02", "mean_sr_b03", "mean_sr_b04"), {}, None),
        (("SR_B4 (band 3)", "SR_B3", "SR_B2"), {"mission": "Landsat"}, None),
        (("B4", "B3", "B2"), {"collection": "landsat-c2-l2"}, None),
        (("LM05_B4", "LM05_B3", "LM05_B2"), {}, None),
        (("B4", "B3", "B2"), {"SPACECRAFT_ID": "LANDSAT_1", "SENSOR_ID": "MSS"}, None),
        (("B4", "B3", "B2"), {"sources": "", "PLATFORM": "landsat-7,landsat-8"}, None),
        (("SR_B4", "SR_B3", "SR_B2", "SR_B6"), {"SENSOR_ID": "ETM"}, None),
        # Landsat 8 and 9
        (("SR_B4", "SR_B3", "SR_B2", "SR_B6"), {}, (2, 1, 0)),
        (("sr_band4", "sr_band3", "sr_band2", "sr_band6"), {}, (2, 1, 0)),
        (("SR_B4", "SR_B3", "SR_B2", "SR_QA_AEROSOL"), {}, (2, 1, 0)),
        (("SR_B4", "SR_B3", "SR_B2", "ST_B10"), {}, (2, 1, 0)),
        (("SR_B4", "SR_B3", "SR_B2"), {"LANDSAT_PRODUCT_ID": "LC09_L2SP_1"}, None),
        (("SR_B4", "SR_B3", "SR_B2"), {"SPACECRAFT_ID": "LANDSAT_9"}, (2, 1, 0)),
        (("SR_B4", "SR_B3", "SR_B2"), {"platform": "landsat-9", "constellation": "landsat"}, (2, 1, 0)),
        (("LC08_SR_B4", "LC08_SR_B3", "LC08_SR_B2"), {}, (2, 1, 0)),
        # Landsat 4 to 7
        (("SR_B1", "SR_B2", "SR_B3", "SR_B4", "SR_CLOUD_QA"), {}, (0, 1, 2)),
        (("SR_B1", "SR_B2", "SR_B3", "SR_B4", "ST_B6"), {}, (0, 1, 2)),
        (("sr_band1", "sr_band2", "sr_band3", "sr_band4", "bt_band6"), {}, (0, 1, 2)),
        (("B1", "B2", "B3", "B4", "B6_VCID_1"), {}, (0, 1, 2)),
        (("SR_B1", "SR_B2", "SR_B3", "SR_B4"), {"instruments": '["tm"]'}, (0, 1, 2)),
        (("LT05_B1", "LT05_B2", "LT05_B3", "LT05_B4"), {}, (0, 1, 2)),
        (("SR_B1 Landsat 5", "SR_B2 Landsat 5", "SR_B3 Landsat 5"), {}, (0, 1, 2)),
        # words and wavelengths tell bands where numbers do not
        (("SR_B3 red", "SR_B2 green", "SR_B1 blue"), {}, (2, 1, 0)),
        (("SR_B3 (660 nm)", "SR_B2 (560 nm)", "SR_B1 (485 nm)"), {}, (2, 1, 0)),
        # Sentinel-2's, and plain numbers
        (("B4", "B3", "B2"), {}, (2, 1, 0)),
        (("S2_SR_B4", "S2_SR_B3", "S2_SR_B2", "S2_SR_B6"), {}, (2, 1, 0)),
        (("B04", "B03", "B02"), {"platform": "sentinel-2b"}, (2, 1, 0)),
        (("T33UTM_B04", "T33UTM_B03", "T33UTM_B02"), {}, (2, 1, 0)),
    ],
)
def test_numbers_of_landsat_are_read_by_its_own_table_or_not_at_all(
    names: tuple[str, ...], tags: dict[str, str], expected: tuple[int, ...] | None
) -> None:
    """Only where the generation is certain; else the bands are listed, and `indices` asked for."""
    file = FileBands(
        tuple(read_band(name, {}, None, alpha=False) for name in names), read_product(tags, names)
    )
    if expected is None:
        with pytest.raises(RasterUnusable, match=r"the file has \d bands: 1 .*SR_B4 is RED.*indices"):
            choose_bands(file, CARD, None)
        assert choose_bands(file, CARD, (2, 1, 0)).bands == (2, 1, 0)
    else:
        assert choose_bands(file, CARD, None).bands == expected


@pytest.mark.parametrize(
    ("name", "band", "never"),
    [
        ("B8A NIR", "NIR_NARROW", "NIR_BROAD"),
        ("nir (B8A)", "NIR_NARROW", "NIR_BROAD"),
        ("Narrow NIR", "NIR_NARROW", "NIR_BROAD"),
        ("B8A - Vegetation red edge", "NIR_NARROW", "RED_EDGE_1"),
        ("B08 - NIR", "NIR_BROAD", "NIR_NARROW"),
        ("B12 SWIR", "SWIR_2", "SWIR_1"),
        ("B11 - SWIR", "SWIR_1", "SWIR_2"),
        ("B07 Red Edge", "RED_EDGE_3", "RED_EDGE_1"),
    ],
)
def test_a_number_tells_bands_of_one_common_name_apart(name: str, band: str, never: str) -> None:
    """Sentinel-2's bands are often listed by both, and several share the words."""
    for wanted in (band, never):
        card = CARD.model_copy(update={"bands": (RGB[2], Band(name=wanted, mean=0, std=1))})
        if wanted == band:
            assert chosen((name, "B4 Red"), card).bands == (1, 0)
        else:
            with pytest.raises(RasterUnusable, match=f"'{never}' is missing"):
                chosen((name, "B4 Red"), card)


def test_a_colour_of_several_bands_contradicts_none_of_them() -> None:
    """GDAL marks Sentinel-2's B8A as `nir`, and B12 as `swir`."""
    names = ("NIR_NARROW", "SWIR_2", "RED_EDGE_3")
    card = CARD.model_copy(update={"bands": tuple(Band(name=name, mean=0, std=1) for name in names)})
    marked = (FileBand("B8A", colour="nir"), FileBand("B12", colour="swir"), FileBand("B7", colour="rededge"))
    assert choose_bands(FileBands(marked), card, None) == BandChoice((0, 1, 2))
    landsat = FileBands(tuple(FileBand(colour=colour) for colour in ("red", "nir")), "Landsat 8-9")
    assert choose_bands(landsat, card.model_copy(update={"bands": (card.bands[0],)}), None).bands == (1,)


def test_every_known_band_has_names_of_its_own() -> None:
    """No name is of two bands but the common ones that STAC gives to several."""
    own = [name for band in KNOWN_BANDS for name in (normalised(band.name), band.common[0])]
    assert len(set(own)) == len({normalised(band.name) for band in KNOWN_BANDS} | set(own))
    for column in range(len(PRODUCTS)):
        numbers = [band.numbers[column] for band in KNOWN_BANDS if band.numbers[column]]
        assert len(numbers) == len(set(numbers))


def test_further_images_are_told() -> None:
    """A file of one band a page: the others are named, since a person sees them."""
    with pytest.raises(RasterUnusable, match="2 further images, which are not read") as caught:
        choose_bands(FileBands((FileBand("BLUE"),), pages=2), CARD, None)
    assert caught.value.param == "indices"


def test_colours_are_read_where_nothing_else_is_said() -> None:
    """Red, green, blue into the model's blue, green, red; a card without colours has no use for them."""
    file = FileBands(tuple(FileBand(colour=colour) for colour in ("red", "green", "blue")))
    assert choose_bands(file, CARD, None).bands == (2, 1, 0)
    assert choose_bands(file, make_card(3), None).bands == (0, 1, 2)
