"""Make the card of a model that has none, of what TerraTorch's config says of its training data.

`data` has the bands, means, deviations and `constant_scale`, or names a data module whose numbers are
published with TerraTorch; the task has `class_names` and `tiled_inference_parameters`, `input` the size of a
tile. A published pre-trained model has `bands`, `mean` and `std` beside its sizes.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from baton_geo.card import Band, Card, ClassLabel, MapValue
from baton_geo.prithvi.config import PrithviConfig, table_of, tables_of
from baton_geo.prithvi.terratorch import as_list, without_intervals

FIRST_COLOUR = (226, 222, 212)
GOLDEN = 0.618034  # of the circle of hues: each new one is far from those before
REFLECTANCE_SCALE = 0.0001
BRIGHTEST = 1.5  # a mean plus deviation beyond it is no reflectance
SANE = (-0.2, 2.0)  # reflectances
DECIBELS = (-100.0, 50.0)
SAR = frozenset({"VV", "VH", "HH", "HV"})
OPTICAL = MappingProxyType(
    {
        "COASTAL_AEROSOL": ("B01", "B1"), "BLUE": ("B02", "B2"), "GREEN": ("B03", "B3"), "RED": ("B04", "B4"),
        "RED_EDGE_1": ("B05", "B5"), "RED_EDGE_2": ("B06", "B6"), "RED_EDGE_3": ("B07", "B7"),
        "NIR": (), "NIR_BROAD": ("B08", "B8"), "NIR_NARROW": ("B8A",), "WATER_VAPOR": ("B09", "B9"),
        "CIRRUS": ("B10",), "SWIR_1": ("B11",), "SWIR_2": ("B12",),
    }
)  # fmt: skip
"""Optical bands as TerraTorch calls them, with Sentinel-2's names for them."""


@dataclass(frozen=True)
class DataModule:
    """A data set's numbers, as TerraTorch publishes them in the code of its data module.

    Attributes:
        numbers: mean and standard deviation of each band, after `scale`.
        scale: factor from the file's numbers.
        classes: names of the classes.
        value: of a regression: what the model's output is to be multiplied by, and what is to be added.
    """

    numbers: Mapping[str, tuple[float, float]]
    scale: float = 1.0
    classes: tuple[str, ...] = ()
    value: tuple[float, float] = (1.0, 0.0)
    unit: str | None = None


DATA_MODULES: Mapping[str, DataModule] = MappingProxyType(
    {
        "Sen1Floods11NonGeoDataModule": DataModule(
            {
                "COASTAL_AEROSOL": (0.16450718, 0.06977374), "BLUE": (0.1412956, 0.07406382),
                "GREEN": (0.13795798, 0.07370365), "RED": (0.12353792, 0.08692279),
                "RED_EDGE_1": (0.1481099, 0.07778555), "RED_EDGE_2": (0.23991728, 0.09105416),
                "RED_EDGE_3": (0.28587557, 0.10690993), "NIR_BROAD": (0.26345379, 0.10096586),
                "NIR_NARROW": (0.30902815, 0.11798815), "WATER_VAPOR": (0.04911151, 0.03380113),
                "CIRRUS": (0.00652506, 0.01463465), "SWIR_1": (0.2044958, 0.09772074),
                "SWIR_2": (0.11912015, 0.07659938),
            },
            scale=0.0001,
        ),
        "FireScarsNonGeoDataModule": DataModule(
            {
                "BLUE": (0.033349706741586264, 0.02269135568823774),
                "GREEN": (0.05701185520536176, 0.026807560223070237),
                "RED": (0.05889748132001316, 0.04004109844362779),
                "NIR_NARROW": (0.2323245113436119, 0.07791732423672691),
                "SWIR_1": (0.1972854853760658, 0.08708738838140137),
                "SWIR_2": (0.11944914225186566, 0.07241979477437814),
            },
        ),
        "MultiTemporalCropClassificationDataModule": DataModule(
            {
                "BLUE": (494.905781, 284.925432), "GREEN": (815.239594, 357.84876),
                "RED": (924.335066, 575.566823),
                "NIR_NARROW": (2968.881459, 896.601013), "SWIR_1": (2634.621962, 951.900334),
                "SWIR_2": (1739.579917, 921.407808),
            },
            classes=(
                "Natural Vegetation", "Forest", "Corn", "Soybeans", "Wetlands", "Developed / Barren",
                "Open Water",
                "Winter Wheat", "Alfalfa", "Fallow / Idle Cropland", "Cotton", "Sorghum", "Other",
            ),
        ),
        "Landslide4SenseNonGeoDataModule": DataModule(
            {
                "BLUE": (-0.3074, 0.8775), "GREEN": (-0.1277, 0.8860), "RED": (-0.0625, 0.8869),
                "RED_EDGE_1": (0.0439, 0.8857), "RED_EDGE_2": (0.0803, 0.8418),
                "RED_EDGE_3": (0.0644, 0.8354),
                "NIR_BROAD": (0.0802, 0.8491), "WATER_VAPOR": (0.3000, 0.9061), "CIRRUS": (0.4082, 1.6072),
                "SWIR_1": (0.0823, 0.8848), "SWIR_2": (0.0516, 0.9232), "SLOPE": (0.3338, 0.9018),
                "DEM": (0.7819, 1.2913),
            },
        ),
        "MChesapeakeLandcoverNonGeoDataModule": DataModule(
            {
                "RED": (0.4570387601852417, 0.21191735565662384),
                "GREEN": (0.5200885534286499, 0.1976749747991562),
                "BLUE": (0.4807923436164856, 0.17441707849502563),
                "NIR": (0.569856584072113, 0.2831788957118988),
            },
        ),
        "BioMasstersNonGeoDataModule": DataModule(
            {
                "BLUE": (1633.0802, 2499.7146), "GREEN": (1610.0035, 2308.5298), "RED": (1599.557, 2388.2268),
                "RED_EDGE_1": (1916.7083, 2389.6375), "RED_EDGE_2": (2478.8325, 2209.6467),
                "RED_EDGE_3": (2591.326, 2104.572), "NIR_BROAD": (2738.5837, 2194.209),
                "NIR_NARROW": (2685.8281, 2031.7762), "SWIR_1": (1023.90204, 934.0556),
                "SWIR_2": (696.48755, 759.8444),
            },
            value=(72.21242, 63.4584),
            unit="Mg/ha",
        ),
    }
)  # fmt: skip


def card_of(hf_config: Mapping[str, Any]) -> Card:
    """Read the card in a model's config.json, or make one of what a published configuration says.

    Raises:
        ValueError: config.json has neither a `baton_geo` table nor the bands' means and deviations, or what
            it says of them does not fit together; the message names the key.
    """
    table = hf_config.get("baton_geo")
    if table is not None and not _is_encoder(hf_config):
        return Card.model_validate(table)
    config = PrithviConfig.from_hf(hf_config)
    if config.decoder is None:
        if len(set(config.patch_size[1:])) > 1:
            raise ValueError("config.json: patch_size: embeddings need square patches")
        embedding = {"patch": config.patch_size[-1], "width": config.embed_dim}
        made = table or {"bands": _bands(config, {}, None)[0], "frames": config.num_frames}
        tile = made.get("tile", config.img_size[-1])
        alone = {"classes": (), "tile": tile, "overlap": 0, "embedding": embedding}
        return Card.model_validate({**made, **alone})
    held, _ = tables_of(hf_config)
    task = table_of(table_of(held, "model"), "init_args")
    data = table_of(held, "data")
    module = DATA_MODULES.get(str(data.get("class_path")).rpartition(".")[2])
    bands, unit = _bands(config, table_of(data, "init_args"), module)
    tile, overlap = _tiles(config, held, task)
    card: dict[str, Any] = {
        "bands": bands,
        "frames": config.num_frames,
        "tile": tile,
        "overlap": overlap,
    } | unit
    replaced = table_of(data, "init_args").get("no_data_replace")
    if isinstance(replaced, int | float):
        card["nodata_replace"] = float(replaced)
    if config.decoder is not None and config.decoder.task == "regression":
        times, plus = module.value if module else (1.0, 0.0)
        card["value"] = MapValue(scale=times, offset=plus, unit=module.unit if module else None)
    elif config.decoder is not None:
        names = task.get("class_names") or (module.classes if module else ())
        card["classes"] = _classes(list(names), config.decoder.num_classes)
    return Card.model_validate(card)


def _is_encoder(hf_config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is an encoder's; one that is no Prithvi model's at all is not."""
    held, args = tables_of(hf_config)
    return "embed_dim" in {**held, **args} and not held.get("segmentation") and "backbone" not in args


def _bands(
    config: PrithviConfig, data: Mapping[str, Any], module: DataModule | None
) -> tuple[tuple[Band, ...], dict[str, Any]]:
    """Make the bands, and the card's fields that say what one unit of a file is worth."""
    of_module = list(module.numbers) if module and len(module.numbers) == config.in_chans else None
    chosen = ("predict_output_bands", "output_bands", "bands")
    given = next((data[key] for key in chosen if data.get(key)), of_module or config.bands)
    names = [str(band) for band in without_intervals(_flat(given, data, "bands"))]
    means, stds = _flat(data.get("means"), data, "means"), _flat(data.get("stds"), data, "stds")
    if not means and module is not None and all(name in module.numbers for name in names):
        means, stds = zip(*(module.numbers[name] for name in names), strict=True)
    if not means:
        means, stds = config.mean, config.std
    if not means or not stds:
        raise ValueError(
            "config.json: has neither a `baton_geo` table nor the means and deviations of the bands "
            "(pretrained_cfg.data.init_args.means and stds)"
        )
    if config.bands and (len(names) != len(means) or any(name.isdigit() for name in names)):
        names = list(config.bands)  # the data name fewer bands, or number them
    names = names or [f"band {number + 1}" for number in range(config.in_chans)]
    if not len(names) == len(means) == len(stds) == config.in_chans:
        raise ValueError(
            f"config.json: data: {len(names)} bands, {len(means)} means and {len(stds)} deviations for a "
            f"model of {config.in_chans} bands"
        )
    scale = float(data.get("constant_scale", module.scale if module else 1.0))
    optical = [
        float(mean) + float(std)
        for name, mean, std in zip(names, means, stds, strict=True)
        if name in OPTICAL
    ]
    plain = all(float(mean) > 0 for name, mean in zip(names, means, strict=True) if name in OPTICAL)
    of_reflectance = bool(optical) and max(optical) <= BRIGHTEST and plain
    unit: dict[str, Any] = {"scale": scale, "float_scale": scale}
    if of_reflectance:
        whole = REFLECTANCE_SCALE if scale == 1 else scale
        unit = {"scale": whole, "float_scale": 1.0, "valid_range": SANE}
    sar = SAR & {name.partition("_")[0] for name in names}
    bands = tuple(
        Band(
            name=name,
            aliases=OPTICAL.get(name, ()),
            mean=float(mean),
            std=float(std),
            **_of_sar(float(mean), scale) if sar and optical and name.partition("_")[0] in SAR else {},
        )
        for name, mean, std in zip(names, means, stds, strict=True)
    )
    return bands, unit


def _of_sar(mean: float, scale: float) -> dict[str, Any]:
    """Make the unit of a radar band beside optical ones; means below 0 are decibels."""
    return {"scale": scale, "valid_range": DECIBELS if mean < 0 else None}


def _flat(value: Any, data: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Return a list; of a table by modality, the lists of the modalities one after the other."""
    if isinstance(value, Mapping):
        modalities = as_list(data.get("modalities") or list(value), "data.init_args.modalities")
        if not data.get("concat_bands"):
            raise ValueError(
                f"config.json: data.init_args.{key}: of several modalities, and concat_bands is not true"
            )
        return [
            one for name in modalities for one in as_list(value.get(name), f"data.init_args.{key}.{name}")
        ]
    return as_list(value or [], f"data.init_args.{key}")


def _tiles(config: PrithviConfig, held: Mapping[str, Any], task: Mapping[str, Any]) -> tuple[int, int]:
    """Find side and overlap of tiles: of the tiled inference, the declared input, or the model."""
    tiled = table_of(task, "tiled_inference_parameters")
    sides = {tiled.get(key, tiled.get("crop")) for key in ("h_crop", "w_crop")} - {None}
    steps = {tiled.get(key, tiled.get("stride")) for key in ("h_stride", "w_stride")} - {None}
    if len(sides) > 1:
        raise ValueError("config.json: tiled_inference_parameters: h_crop and w_crop must be equal")
    declared = table_of(table_of(table_of(held, "input"), "data"), "pixel_values").get("shape")
    sides = sides or (
        {declared[-1]} if isinstance(declared, list | tuple) and declared else {config.img_size[-1]}
    )
    (side,) = sides
    if not isinstance(side, int):
        raise ValueError(f"config.json: the side of a tile must be a whole number, not {side!r}")
    overlap = side - min(steps) if steps else side // 8
    return side, max(0, min(overlap, side // 2))


def _classes(names: list[Any], count: int) -> tuple[ClassLabel, ...]:
    if len(names) != count:
        names = [f"class {number}" for number in range(count)]
    return tuple(ClassLabel(name=str(name), colour=_colour(number)) for number, name in enumerate(names))


def _colour(number: int) -> tuple[int, int, int]:
    """Return a colour for a class: a quiet one for the first, then hues that are far apart."""
    if number == 0:
        return FIRST_COLOUR
    red, green, blue = colorsys.hsv_to_rgb((0.58 + (number - 1) * GOLDEN) % 1, 0.65, 0.8)
    return round(255 * red), round(255 * green), round(255 * blue)
