"""Make the engine's prompt for a tile, with the dates and places that some models need."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton_geo.card import Band, Card, ClassLabel
from baton_geo.contract import GeoOptions
from baton_geo.errors import RasterUnusable, RequestInvalid
from baton_geo.prithvi import PrithviConfig
from baton_geo.raster.messages import SceneInfo

GREYS = 220
"""The lightest grey of classes without a colour."""


def card_of(hf_config: Mapping[str, Any]) -> Card:
    """Return the card in a model's config.json, or make a plain one from a published configuration.

    Raises:
        ValueError: config.json has neither a `baton_geo` table nor means, deviations and a decoder.
    """
    if (table := hf_config.get("baton_geo")) is not None:
        return Card.model_validate(table)
    config = PrithviConfig.from_hf(hf_config)
    published = hf_config["pretrained_cfg"]
    names = published.get("bands") or [f"band {number + 1}" for number in range(config.in_chans)]
    means, stds = published.get("mean"), published.get("std")
    if means is None or stds is None or config.decoder is None:
        raise ValueError("config.json: has neither a `baton_geo` table nor `mean`, `std` and a decoder")
    bands = tuple(
        Band(name=str(name), mean=mean, std=std) for name, mean, std in zip(names, means, stds, strict=True)
    )
    count = config.decoder.num_classes
    labels = tuple(
        ClassLabel(name=f"class {value}", colour=(GREYS - GREYS * value // count,) * 3)
        for value in range(count)
    )
    tile = config.img_size[-1]
    return Card(bands=bands, classes=labels, frames=config.num_frames, tile=tile, overlap=tile // 8)


class Coordinates:
    """Dates and places for models with temporal or location embeddings.

    Args:
        config: of the model.
    """

    def __init__(self, config: PrithviConfig) -> None:
        self._frames = config.num_frames
        self._time = "time" in config.coords_encoding
        self._place = "location" in config.coords_encoding

    def of(self, options: GeoOptions, info: SceneInfo) -> dict[str, torch.Tensor]:
        """Return the fields for every tile of a scene: from the request, else from the file.

        Raises:
            RequestInvalid: the number of dates is not the number of the model's time steps.
            RasterUnusable: neither the request nor the file has the date or place.
        """
        fields = {}
        if self._time:
            fields["temporal_coords"] = torch.tensor(self._days(options, info), dtype=torch.float32)
        if self._place:
            fields["location_coords"] = torch.tensor(_place(options, info), dtype=torch.float32)
        return fields

    def _days(self, options: GeoOptions, info: SceneInfo) -> list[tuple[int, int]]:
        days = options.dates
        if days is None and self._frames == 1 and info.acquired is not None:
            days = (date.fromisoformat(info.acquired[:10]),)
        if days is None:
            raise RasterUnusable(
                f"This model needs the dates of its {self._frames} time steps, and the file has none: "
                "add data.dates to the request.",
                param="data.dates",
            )
        if len(days) != self._frames:
            raise RequestInvalid(
                f"data.dates: {len(days)} given; this model has {self._frames} time steps.",
                param="data.dates",
            )
        return [(day.year, day.timetuple().tm_yday) for day in days]


def _place(options: GeoOptions, info: SceneInfo) -> tuple[float, float]:
    if options.location is not None:
        return options.location.latitude, options.location.longitude
    if info.latitude is None or info.longitude is None:
        raise RasterUnusable(
            "This model needs the place of the scene, and the file has no coordinate system: "
            "add data.location to the request.",
            param="data.location",
        )
    return info.latitude, info.longitude


def prompt(serial: int, pixels: NDArray[np.float32], fields: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Make vLLM's prompt for one tile.

    Args:
        serial: serial number of the tile; see `scenes`.
        pixels: (C, T, H, W) float32, normalised.
        fields: dates and place, see `Coordinates`.
    """
    image = {"pixel_values": torch.from_numpy(pixels), **fields}
    return {
        "prompt_token_ids": [serial],
        "multi_modal_data": {"image": image},
        # With a name given, vLLM does not hash the pixels of a tile that it has never seen before.
        "multi_modal_uuids": {"image": [f"tile-{serial}"]},
    }
