"""One scene in the numbers of several products, said in the ways that files say it: mapped right, noted or refused.

The truth is the made scene's own; `flood-tiny` runs in plain torch behind a raster process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import rasterio
import torch
from geo.raster.made import read_tiff, run, write_tiff

from baton_geo.card import Card
from baton_geo.errors import RasterUnusable
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest
from training.flood_scenes.scenes import UNKNOWN, WATER, make_scene
from training.flood_tiny.predict import SHIPPED, Predictor
from training.flood_tiny.seeds import HELD_OUT_SEEDS

FLOOD = Card.model_validate(json.loads((SHIPPED / "config.json").read_text())["baton_geo"])
NAMES = tuple(band.name for band in FLOOD.bands)
RIGHT, NOTED = 0.005, 0.02
Floats = npt.NDArray[np.float64]
S2_NEW = "S2B_MSIL2A_20240501T095029_N0510_R079_T33TXM_20240501T125910.SAFE"
S2_OLD = "S2B_MSIL2A_20200501T095029_N0214_R079_T33TXM_20200501T125910.SAFE"
LC08 = "LC08_L2SP_191028_20240501_20240508_02_T1"
LE07 = "LE07_L2SP_191028_20020501_20200916_02_T1"
HLS_L30 = "HLS.L30.T33TXM.2024122T095029.v2.0"
HLS_S30 = "HLS.S30.T33TXM.2024122T095029.v2.0"

# What a product makes of a reflectance.
TEN_THOUSANDS = ("int16", lambda r: r * 10_000)
SENTINEL = ("uint16", lambda r: (r * 10_000 + 1000).clip(1))
LANDSAT = ("uint16", lambda r: ((r + 0.2) / 2.75e-5).clip(1, 65_535))
DARK_LANDSAT = ("uint16", lambda r: ((r.clip(-0.1, 0.3) + 0.2) / 2.75e-5).clip(1, 65_535))
FLOATS = ("float32", lambda r: r)
BYTES = ("uint8", lambda r: (r * 250).clip(0, 255))
STAC = ("blue", "green", "red", "nir08", "swir16", "swir22")
SHUFFLED = (2, 4, 0, 5, 3, 1)  # of the model's bands, in the file
STRAIGHT = (0, 1, 2, 3, 4, 5)
DECOY = -1  # a band of other numbers


@dataclass(frozen=True)
class Way:
    """A file, and what has to become of it.

    Attributes:
        numbers: type, and function of reflectance.
        names: of the file's bands, None: none.
        order: which of the model's bands each of them is.
        becomes: "" right; a code: noted with it; else words of a 422, after "!".
        asked: of the request.
        tags: of the file.
        band_tags: of each band.
        domain: of the band tags.
        line: scale and offset of the bands for GDAL.
        profile: of rasterio.
        changed: changes the numbers (bands, height, width) before they are written.
    """

    numbers: tuple[str, Callable[[Floats], Floats]] = TEN_THOUSANDS
    names: tuple[str | None, ...] | None = tuple(NAMES[band] for band in SHUFFLED)
    order: tuple[int, ...] = SHUFFLED
    becomes: str = ""
    asked: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    band_tags: tuple[dict[str, str], ...] = ()
    domain: str | None = None
    line: tuple[float, float] = (1.0, 0.0)
    profile: dict[str, Any] = field(default_factory=dict)
    changed: Callable[[npt.NDArray[Any]], None] = lambda pixels: None


def said(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(names[band] for band in SHUFFLED)


def nm(*centres: float, key: str = "wavelength") -> tuple[dict[str, str], ...]:
    return tuple({key: f"{centres[band]:g}"} for band in SHUFFLED)


def dark_zero(pixels: npt.NDArray[Any]) -> None:
    """Clip the darkest fifth of SWIR_2 at 0, as some processors do over water."""
    band = pixels[SHUFFLED.index(5)]
    band[band <= np.quantile(band, 0.2)] = 0


def one_hole(pixels: npt.NDArray[Any]) -> None:
    pixels[0, 100, 100] = -3.4e38


def stripe(pixels: npt.NDArray[Any]) -> None:
    pixels[2, 20:23] = -9999


NUMBERED = ("B02", "B03", "B04", "B8A", "B11", "B12")
OLI = ("SR_B2", "SR_B3", "SR_B4", "SR_B5", "SR_B6", "SR_B7")
TM = ("SR_B1", "SR_B2", "SR_B3", "SR_B4", "SR_B5", "SR_B7")
WITH_DECOYS = (*SHUFFLED, DECOY, DECOY)
WAYS = {
    # Order and names
    "our names": Way(),
    "STAC's common names": Way(names=said(STAC)),
    "STAC's names, with its broad nir": Way(names=(*said(STAC), "nir", "coastal"), order=WITH_DECOYS),
    "STAC's nir alone is another band": Way(
        names=said((*STAC[:3], "nir", *STAC[4:])), becomes="!'NIR_NARROW' is missing.*'nir'.*indices"
    ),
    "nir of Landsat is the narrow one": Way(
        names=said((*STAC[:3], "nir", *STAC[4:])), tags={"platform": "landsat-8"}
    ),
    "nir at 865 nm": Way(
        names=said((*STAC[:3], "nir", *STAC[4:])), band_tags=nm(490, 560, 665, 865, 1610, 2190)
    ),
    "Sentinel-2's numbers": Way(names=(*said(NUMBERED), "B08", "B05"), order=WITH_DECOYS),
    "Sentinel-2's GDAL driver": Way(
        names=said(
            tuple(
                f"{name}, central wavelength {at} nm"
                for name, at in zip(
                    ("B2", "B3", "B4", "B8A", "B11", "B12"), (490, 560, 665, 865, 1610, 2190), strict=True
                )
            )
        )
    ),
    "numbers of HLS L30": Way(
        names=(*said(("B02", "B03", "B04", "B05", "B06", "B07")), "B11"),
        order=WITH_DECOYS[:7],
        tags={"HLS_PROCESSING_TIME": "2024-05-03T00:00:00Z", "GRANULE": HLS_L30, "LANDSAT_PRODUCT_ID": LC08},
    ),
    "numbers of HLS S30": Way(names=said(NUMBERED), tags={"GRANULE": HLS_S30}),
    "Landsat's numbers without Landsat": Way(
        names=("B2", "B3", "B4", "B5", "B6", "B7"), order=STRAIGHT, becomes="!NIR_NARROW' is missing"
    ),
    "numbers of band 4 to 9": Way(
        names=tuple(f"B{number}" for number in range(4, 10)), order=STRAIGHT, becomes="!'BLUE' is missing"
    ),
    "wavelengths": Way(names=None, band_tags=nm(490, 560, 665, 865, 1610, 2190)),
    "wavelengths in micrometres, GDAL's domain": Way(
        names=None,
        band_tags=nm(0.49, 0.56, 0.665, 0.865, 1.61, 2.19, key="CENTRAL_WAVELENGTH_UM"),
        domain="IMAGERY",
    ),
    "wavelengths of Landsat 7": Way(
        names=None, band_tags=nm(478, 561, 661, 835, 1650, 2208), becomes="band_wavelength"
    ),
    "wavelengths as names": Way(names=said(("490 nm", "0.56 um", "665 nm", "865nm", "1610 nm", "2190 nm"))),
    "a name and a wavelength that contradict": Way(
        band_tags=nm(490, 560, 865, 665, 1610, 2190), becomes="!contradicts itself.*indices"
    ),
    "two names that contradict": Way(
        band_tags=tuple({"common_name": name} for name in said((*STAC[:3], "swir16", "nir08", STAC[5]))),
        becomes="!contradicts itself.*indices",
    ),
    "colours of a part": Way(
        names=None, order=(2, 1, 0, 3, 4, 5), profile={"photometric": "RGB"}, becomes="!marked red.*indices"
    ),
    "names win over colours": Way(profile={"photometric": "RGB"}, becomes="bands_marked"),
    "a band marked alpha that has a name": Way(
        profile={"photometric": "RGB", "alpha": "YES"}, becomes="bands_marked"
    ),
    "a band marked alpha without names": Way(
        names=None, order=STRAIGHT, profile={"alpha": "YES"}, becomes="!marked alpha"
    ),
    "a band marked alpha and indices": Way(
        names=None,
        order=STRAIGHT,
        profile={"photometric": "RGB", "alpha": "YES"},
        asked={"indices": STRAIGHT},
    ),
    "nothing said": Way(names=None, order=STRAIGHT, becomes="bands_in_order"),
    "nothing said, another order, indices": Way(
        names=None, asked={"indices": tuple(SHUFFLED.index(band) for band in range(6))}
    ),
    "a band too few": Way(
        names=said(NAMES)[:5], order=SHUFFLED[:5], becomes="!'GREEN' is missing.*say which with indices"
    ),
    # Units
    "floats": Way(FLOATS),
    "float64": Way(("float64", lambda r: r)),
    "float16": Way(FLOATS, profile={"nbits": 16}),
    "int64": Way(("int64", lambda r: r * 10_000)),
    "uint64": Way(("uint64", lambda r: (r * 10_000).clip(0))),
    "int32": Way(("int32", lambda r: r * 10_000)),
    "float64 x 1e6 with a scale": Way(("float64", lambda r: r * 1e6), line=(1e-6, 0.0)),
    "float64 x 1e12": Way(("float64", lambda r: r * 1e12), becomes="!every pixel is nodata.*numbers like"),
    "Sentinel-2 before 04.00": Way(names=said(NUMBERED), tags={"PRODUCT_URI": S2_OLD}),
    "Sentinel-2 since 04.00": Way(SENTINEL, tags={"PRODUCT_URI": S2_NEW}, becomes="!add offset=-1000"),
    "Sentinel-2 since 04.00, by its datatake": Way(
        SENTINEL,
        tags={"DATATAKE_1_ID": "GS2B_20240501T095029_037366_N05.10"},
        becomes="!baseline 05.10.*add offset=-1000",
    ),
    "Sentinel-2 since 04.00, asked": Way(SENTINEL, tags={"PRODUCT_URI": S2_NEW}, asked={"offset": -1000.0}),
    "Sentinel-2 since 04.00, GDAL's offset": Way(SENTINEL, tags={"PRODUCT_URI": S2_NEW}, line=(1e-4, -0.1)),
    "Sentinel-2 since 04.00, ESA's offset": Way(
        SENTINEL, tags={"PRODUCT_URI": S2_NEW, "BOA_ADD_OFFSET": "-1000"}
    ),
    "Sentinel-2 since 04.00, offset applied": Way(
        tags={"PRODUCT_URI": S2_NEW, "earthsearch:boa_offset_applied": "true"}
    ),
    "an offset that is applied and stated": Way(
        tags={"PRODUCT_URI": S2_NEW, "STAC_earthsearch_boa_offset_applied": "true"},
        line=(1e-4, -0.1),
        becomes="!an offset of -0.1, and says .boa_offset_applied=true",
    ),
    "a tag and GDAL that disagree": Way(
        SENTINEL, tags={"add_offset": "-0.2"}, line=(1e-4, -0.1), becomes="!two offsets: -0.1 .*-0.2"
    ),
    "two scales": Way(
        tags={"scale_factor": "0.001"}, line=(1e-4, 0.0), becomes="!two scales: 0.0001 .*0.001"
    ),
    "Sentinel-2's offset and nothing said": Way(SENTINEL, becomes="offset_suspected"),
    "Sentinel-2's offset in floats": Way(("float32", lambda r: r + 0.1), becomes="offset_suspected"),
    "an offset taken off twice": Way(
        ("int16", lambda r: r * 10_000), tags={"BOA_ADD_OFFSET": "-1000"}, becomes="values_negative"
    ),
    "Landsat": Way(
        LANDSAT,
        names=said(OLI),
        tags={"LANDSAT_PRODUCT_ID": LC08},
        becomes="!scale=0.0000275 and offset=-0.2",
    ),
    "Landsat, asked": Way(
        LANDSAT,
        names=said(OLI),
        tags={"LANDSAT_PRODUCT_ID": LC08},
        asked={"scale": 2.75e-5, "offset": -0.2},
    ),
    "Landsat, an offset alone": Way(
        LANDSAT,
        names=said(OLI),
        tags={"LANDSAT_PRODUCT_ID": LC08},
        asked={"offset": -0.2},
        becomes="!scale=0.0000275",
    ),
    "Landsat, GDAL's scale and offset": Way(
        LANDSAT, names=said(OLI), tags={"LANDSAT_PRODUCT_ID": LC08}, line=(2.75e-5, -0.2)
    ),
    "Landsat 8's numbers, by SR_B6": Way(LANDSAT, names=said(OLI), line=(2.75e-5, -0.2)),
    "Landsat's numbers without SR_B6": Way(
        LANDSAT, names=said(TM), line=(2.75e-5, -0.2), becomes="!is missing.*SR_B4 is RED.*indices"
    ),
    "Landsat 7's numbers, asked": Way(
        LANDSAT,
        names=said(TM),
        line=(2.75e-5, -0.2),
        asked={"indices": tuple(SHUFFLED.index(band) for band in range(6))},
    ),
    "Landsat 7's numbers, by ST_B6": Way(
        LANDSAT, names=(*said(TM), "ST_B6"), order=WITH_DECOYS[:7], line=(2.75e-5, -0.2)
    ),
    "Landsat 7's numbers with wavelengths": Way(
        LANDSAT,
        names=said(TM),
        band_tags=nm(485, 560, 660, 860, 1650, 2220),
        line=(2.75e-5, -0.2),
        becomes="band_wavelength",
    ),
    "Landsat 8's numbers by colour, and their words": Way(
        LANDSAT,
        names=said(tuple(f"{number} ({name})" for number, name in zip(OLI, STAC, strict=True))),
        line=(2.75e-5, -0.2),
    ),
    "SR_B6 of a Landsat 7": Way(
        LANDSAT,
        names=said(OLI),
        tags={"LANDSAT_PRODUCT_ID": LE07},
        line=(2.75e-5, -0.2),
        becomes="!is missing.*SR_B4 is RED.*indices",
    ),
    "ESPA's names of Landsat 8": Way(
        names=said(tuple(f"sr_band{number}" for number in range(2, 8))),
    ),
    "ESPA's names of Landsat 5": Way(
        names=(*said(tuple(f"sr_band{number}" for number in (1, 2, 3, 4, 5, 7))), "bt_band6"),
        order=WITH_DECOYS[:7],
    ),
    "ESPA's names of any": Way(
        names=said(tuple(f"sr_band{number}" for number in (1, 2, 3, 4, 5, 7))),
        becomes="!is missing.*SR_B4 is RED.*indices",
    ),
    "names of Landsat 7's files": Way(
        LANDSAT, names=said(tuple(f"{LE07}_{number}" for number in TM)), line=(2.75e-5, -0.2)
    ),
    "names of two Landsats' files": Way(
        LANDSAT,
        names=(
            *said(tuple(f"{LE07}_{number}" for number in TM))[:3],
            *(f"{LC08}_{OLI[n]}" for n in (5, 3, 1)),
        ),
        line=(2.75e-5, -0.2),
        becomes="!is missing.*SR_B4 is RED.*indices",
    ),
    "a Landsat and no more, plain numbers": Way(
        names=("B2", "B3", "B4", "B8A", "B11", "B12"),
        order=STRAIGHT,
        tags={"constellation": "landsat"},
        becomes="!is missing.*SR_B4 is RED.*indices",
    ),
    "plain numbers of Landsat 5, by its sensor": Way(
        names=said(("B1", "B2", "B3", "B4", "B5", "B7")), tags={"SENSOR_ID": "TM"}
    ),
    "plain numbers of Landsat 9, by its sensor": Way(
        names=said(("B2", "B3", "B4", "B5", "B6", "B7")), tags={"SENSOR_ID": "OLI_TIRS"}
    ),
    "Band 1 to Band 7 of Landsat 5": Way(
        names=said(tuple(f"Band {number}" for number in (1, 2, 3, 4, 5, 7))),
        tags={"SPACECRAFT_ID": "LANDSAT_5"},
    ),
    "Landsat 7's numbers": Way(
        LANDSAT, names=said(TM), tags={"LANDSAT_PRODUCT_ID": LE07}, line=(2.75e-5, -0.2)
    ),
    "Landsat without bright pixels, nothing said": Way(DARK_LANDSAT, becomes="values_of_landsat"),
    "a scale and an offset a band": Way(
        SENTINEL,
        names=None,
        order=STRAIGHT,
        changed=lambda pixels: np.copyto(pixels[3:], pixels[3:] * 2),
        asked={"scale": (1e-4,) * 3 + (5e-5,) * 3, "offset": (-0.1,) * 6, "indices": STRAIGHT},
    ),
    "8 bits": Way(BYTES, becomes="!8 bits.*give scale"),
    "8 bits, asked": Way(BYTES, asked={"scale": 1 / 250}),
    "8 bits, GDAL's scale": Way(BYTES, line=(1 / 250, 0.0)),
    "8 bits, an offset alone": Way(BYTES, asked={"offset": 5.0}, becomes="!8 bits.*give scale"),
    "reflectance x 1000": Way(("int16", lambda r: r * 1000), becomes="values_dark"),
    "reflectance x 2500": Way(("int16", lambda r: r * 2500), becomes="values_dark"),
    "reflectance x 1000, asked": Way(("int16", lambda r: r * 1000), asked={"scale": 0.001}),
    "per cent": Way(("int16", lambda r: r * 100), becomes="!too small"),
    "per cent in floats": Way(("float32", lambda r: r * 100), becomes="!outside"),
    "divided twice": Way(("float32", lambda r: r / 10_000), becomes="!too small"),
    "floats with a scale that was applied": Way(FLOATS, line=(1e-4, 0.0), becomes="!too small"),
    "reflectance x 10000 in floats": Way(("float32", lambda r: r * 10_000), becomes="!outside"),
    # Nodata
    "dark water clipped at a nodata of 0": Way(
        profile={"nodata": 0}, changed=dark_zero, becomes="nodata_zero_kept"
    ),
    "one pixel of -3.4e38": Way(FLOATS, changed=one_hole, becomes="fill_hidden"),
    "a stripe of one band alone": Way(
        changed=stripe, profile={"nodata": -9999}, becomes="nodata_of_one_band"
    ),
    "the card's own nodata": Way(changed=stripe, becomes="nodata_of_card"),
}


class Remembering:
    """The model; many files are the same to it, and then it is asked once."""

    def __init__(self) -> None:
        self._model = Predictor.of_folder().model
        self._scores: dict[bytes, npt.NDArray[np.float32]] = {}

    def __call__(self, tile: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        key = tile.tobytes()
        if key not in self._scores:
            with torch.inference_mode():
                self._scores[key] = self._model(torch.from_numpy(tile)[None])[0].numpy()
        return self._scores[key]


@pytest.fixture(scope="module")
def model() -> Remembering:
    return Remembering()


@pytest.fixture(scope="module")
def scene() -> tuple[Floats, npt.NDArray[np.uint8]]:
    """Reflectance (6, 256, 256) without nodata, and the classes."""
    made = make_scene(HELD_OUT_SEEDS[0], 256, 256)
    return np.where(made.label == UNKNOWN, 1, made.pixels) / 10_000, made.label


def write(way: Way, path: Path, reflectance: Floats) -> Path:
    """The file of a way."""
    dtype, numbers = way.numbers
    bands = [reflectance[band] if band != DECOY else reflectance[0, ::-1, ::-1] for band in way.order]
    values = numbers(np.stack(bands))
    pixels = (values if np.dtype(dtype).kind == "f" else values.round()).astype(dtype)
    way.changed(pixels)
    write_tiff(path, pixels, **way.profile)
    with rasterio.open(path, "r+") as file:
        file.update_tags(**way.tags)
        file.scales, file.offsets = (way.line[0],) * len(bands), (way.line[1],) * len(bands)
        for number, name in enumerate(way.names or (), 1):
            file.set_band_description(number, name)
        for number, tags in enumerate(way.band_tags, 1):
            file.update_tags(number, ns=way.domain, **tags)
    return path


def mapped(
    decoders: Decoders, model: Remembering, path: Path, asked: dict[str, Any]
) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
    """The mask, and the notes."""
    with decoders.open(path, SceneRequest(card=FLOOD, **asked)) as scene:
        products = run(scene, model)
        assert products.mask is not None
        return read_tiff(products.mask)[0], scene.info.notes + products.notes


def iou(mask: npt.NDArray[Any], truth: npt.NDArray[np.uint8]) -> float:
    """Intersection over union of the water; what the mask hides is land."""
    water, known = mask == WATER, truth != UNKNOWN
    both, either = water & (truth == WATER) & known, (water | (truth == WATER)) & known
    return float(both.sum() / either.sum())


@pytest.fixture(scope="module")
def plain(
    decoders: Decoders,
    model: Remembering,
    scene: tuple[Floats, npt.NDArray[np.uint8]],
    tmp_path_factory: pytest.TempPathFactory,
) -> float:
    """What is reached where the file says everything in the model's own way."""
    path = write(Way(names=NAMES, order=STRAIGHT), tmp_path_factory.mktemp("plain") / "a.tif", scene[0])
    mask, notes = mapped(decoders, model, path, {})
    assert notes == ()
    return iou(mask, scene[1])


@pytest.mark.fault("F9")
@pytest.mark.parametrize("name", WAYS)
def test_a_file_is_mapped_right_or_noted_or_refused(
    decoders: Decoders,
    model: Remembering,
    scene: tuple[Floats, npt.NDArray[np.uint8]],
    plain: float,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    name: str,
) -> None:
    """Within 0.005 of the plain file; else refused with the words, or noted; never wrong without a note."""
    assert plain > 0.9
    way = WAYS[name]
    path = write(way, tmp_path / "a.tif", scene[0])
    if way.becomes.startswith("!"):
        with pytest.raises(RasterUnusable, match=f"(?s){way.becomes[1:]}"):
            mapped(decoders, model, path, way.asked)
        return
    mask, notes = mapped(decoders, model, path, way.asked)
    reached = iou(mask, scene[1])
    record_property("IoU", reached)
    codes = {note.partition(":")[0] for note in notes}
    if way.becomes:
        assert way.becomes in codes
    if not way.becomes or way.becomes in RIGHT_ALL_THE_SAME:
        assert reached == pytest.approx(plain, abs=RIGHT)
    if not notes:
        assert reached > plain - NOTED


RIGHT_ALL_THE_SAME = (
    "band_wavelength", "bands_in_order", "bands_marked", "fill_hidden", "nodata_zero_kept",
)  # fmt: skip
"""Notes of what was decided rightly; the others say what may be wrong."""


def test_there_are_enough_ways() -> None:
    """At least forty, a third of them refused."""
    refused = sum(way.becomes.startswith("!") for way in WAYS.values())
    assert len(WAYS) >= 40
    assert refused >= len(WAYS) / 4


def test_a_mask_carries_its_notes(decoders: Decoders, tmp_path: Path) -> None:
    """Whoever asked for the file alone finds them in its tags."""
    path = write(Way(names=None, order=STRAIGHT), tmp_path / "a.tif", np.full((6, 40, 40), 0.05))
    with decoders.open(path, SceneRequest(card=FLOOD)) as scene:
        products = run(scene, lambda tile: np.zeros((2, FLOOD.tile, FLOOD.tile), np.float32))
        assert products.mask is not None
        with rasterio.open(products.mask) as file:
            tags = file.tags()
        notes = (*scene.info.notes, *products.notes)
    assert [tags[f"NOTE_{number}"] for number in range(len(notes))] == list(notes)
    assert [note.partition(":")[0] for note in notes] == ["bands_in_order", "values_dark"]
