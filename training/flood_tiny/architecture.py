"""The architecture and the card of `flood-tiny`, as its config.json states them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from baton_geo.card import Band, Card, ClassLabel
from training.flood_scenes.sensor import NODATA, UNIT
from training.flood_scenes.spectra import BANDS

TILE: Final = 256
OVERLAP: Final = 32
# The names of Sentinel-2's and Landsat 8-9's bands, as HLS and most providers write them.
ALIASES: Final = {
    "BLUE": ("B02", "B2"),
    "GREEN": ("B03", "B3"),
    "RED": ("B04", "B4"),
    "NIR_NARROW": ("NIR08", "B8A"),
    "SWIR_1": ("SWIR1", "SWIR16", "B11"),
    "SWIR_2": ("SWIR2", "SWIR22", "B12"),
}
SIZES: Final = {
    "img_size": TILE,
    "num_frames": 1,
    "patch_size": [1, 8, 8],
    "in_chans": len(BANDS),
    "embed_dim": 192,
    "depth": 4,
    "num_heads": 6,
    "mlp_ratio": 4,
    "coords_encoding": [],
    "coords_scale_learn": False,
}
SEGMENTATION: Final = {
    "decoder": "FCNDecoder",
    "num_classes": 2,
    "channels": [96, 48, 24],
    "head_channels": [24],
    "skip": True,
    "skip_channels": 24,
}


OF_SEVERAL_FILES: dict[str, Any] = {"bands": {"__all__": {"grid", "resampling"}}}
"""What a card says of scenes of one file a band, for which this model's says nothing."""


def card(mean: Sequence[float], std: Sequence[float]) -> Card:
    """Return the card of the model.

    Args:
        mean: of each band, reflectance.
        std: standard deviation of each band, reflectance.
    """
    return Card(
        bands=tuple(
            Band(name=name, aliases=ALIASES[name], mean=m, std=s)
            for name, m, s in zip(BANDS, mean, std, strict=True)
        ),
        classes=(
            ClassLabel(name="land", colour=(196, 180, 138)),
            ClassLabel(name="water", colour=(33, 102, 172)),
        ),
        tile=TILE,
        overlap=OVERLAP,
        scale=1 / UNIT,
        valid_range=(-0.2, 2.0),
        nodata=NODATA,
    )


def config_json(rasters: Card) -> dict[str, Any]:
    """Return the contents of config.json."""
    return {
        "model_type": "baton_prithvi",
        "architectures": ["BatonPrithviSegmenter"],
        "num_classes": SEGMENTATION["num_classes"],
        "num_labels": SEGMENTATION["num_classes"],
        "id2label": {str(value): label.name for value, label in enumerate(rasters.classes)},
        "label2id": {label.name: value for value, label in enumerate(rasters.classes)},
        "hidden_size": SIZES["embed_dim"],
        "num_hidden_layers": SIZES["depth"],
        "num_attention_heads": SIZES["num_heads"],
        "torch_dtype": "float32",
        "io_processor_plugin": "baton_geo",
        "pretrained_cfg": {
            **SIZES,
            "bands": [band.name for band in rasters.bands],
            "mean": [band.mean for band in rasters.bands],
            "std": [band.std for band in rasters.bands],
            "segmentation": SEGMENTATION,
        },
        "baton_geo": rasters.model_dump(mode="json", exclude_none=True, exclude=OF_SEVERAL_FILES),
    }
