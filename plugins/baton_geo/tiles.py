"""From a scene's tile to the engine's prompt, with the coordinates that some models want."""

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
from baton_geo.raster.ask import SceneInfo

GREYS = 220
"""Colours of classes nobody named: from light to dark."""


def card_of(hf_config: Mapping[str, Any]) -> Card:
    """The card in a model's config.json; a published config without one says enough for a plain one.

    Raises:
        ValueError: it says neither.
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
    """What a model with temporal or location embeddings is told beside the pixels.

    Args:
        config: of the model.
    """

    def __init__(self, config: PrithviConfig) -> None:
        self._frames = config.num_frames
        self._time = "time" in config.coords_encoding
        self._place = "location" in config.coords_encoding

    def of(self, options: GeoOptions, info: SceneInfo) -> dict[str, torch.Tensor]:
        """The fields for every tile of a scene: what the request says, else what the file says.

        Raises:
            RequestInvalid: another number of dates than the model has time steps.
            RasterUnusable: neither says it.
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
                f"This model wants the dates of its {self._frames} time steps, and the file does not say: "
                "give data.dates.",
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
            "This model wants to know where the scene is, and the file has no coordinate system: "
            "give data.location.",
            param="data.location",
        )
    return info.latitude, info.longitude


def prompt(serial: int, pixels: NDArray[np.float32], fields: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """vLLM's prompt for one tile.

    Args:
        serial: the number its output comes back with.
        pixels: (C, T, H, W) float32, normalised.
        fields: coordinates.
    """
    image = {"pixel_values": torch.from_numpy(pixels), **fields}
    return {
        "prompt_token_ids": [serial],
        "multi_modal_data": {"image": image},
        # Named, so that vLLM does not hash a megabyte a tile to find what it has never seen before.
        "multi_modal_uuids": {"image": [f"tile-{serial}"]},
    }
