"""Compute a scene's mask with plain torch, as the plugin does: normalised, tiled, blended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

import baton_geo
from baton_geo.card import Card
from baton_geo.prithvi import PrithviConfig, PrithviSegmenter, load
from training.flood_scenes.scenes import WATER
from training.flood_tiny.measure import Mask

SHIPPED: Final = Path(baton_geo.__file__).parent / "flood_tiny"


class Predictor:
    """A model and its card; a `measure.Method` when called.

    Args:
        model: with one time step; computes in the dtype of its parameters.
        card: of the model; its integer scale is used.
    """

    def __init__(self, model: PrithviSegmenter, card: Card) -> None:
        self.model = model.eval()
        self.card = card

    @classmethod
    def of_folder(cls, folder: Path = SHIPPED) -> Predictor:
        """Load the model of a folder with config.json and model.safetensors, computing in float32.

        Raises:
            ValueError: the configuration is wrong, or the weights do not fit it.
            OSError: a file is missing.
        """
        config = json.loads((folder / "config.json").read_text())
        model = PrithviSegmenter(PrithviConfig.from_hf(config))
        load(model, load_file(folder / "model.safetensors").items())
        return cls(model, Card.model_validate(config["baton_geo"]))

    def __call__(self, pixels: npt.NDArray[np.int16]) -> Mask:
        """Return the mask of the water: (6, height, width) to (height, width)."""
        return np.asarray(self.probabilities(pixels).argmax(axis=0) == WATER)

    def probabilities(self, pixels: npt.NDArray[np.int16]) -> npt.NDArray[np.float32]:
        """Return class probabilities of each pixel: the mean over the tiles it is in, weighted by ramps.

        Args:
            pixels: (bands, height, width), at least one tile high and wide.

        Returns:
            (classes, height, width); the sum over the classes is 1.
        """
        tile, overlap = self.card.tile, self.card.overlap
        image = normalised(pixels, self.card)
        total = torch.zeros(len(self.card.classes), *image.shape[1:])
        weight = torch.zeros(image.shape[1:])
        ramp = _ramp(tile, overlap)
        for top in _starts(image.shape[1], tile, overlap):
            for left in _starts(image.shape[2], tile, overlap):
                where = (..., slice(top, top + tile), slice(left, left + tile))
                total[where] += self._tile(image[where]) * ramp
                weight[where] += ramp
        return np.asarray((total / weight).numpy())

    def _tile(self, tile: Tensor) -> Tensor:
        """Return probabilities (classes, height, width) of one tile (bands, height, width)."""
        with torch.inference_mode():
            scores: Tensor = self.model(tile[None, :, None])
        return scores.softmax(dim=1)[0]


def normalised(pixels: npt.NDArray[np.int16], card: Card) -> Tensor:
    """Normalise digital numbers: each band to mean 0 and standard deviation 1, nodata to 0.

    Args:
        pixels: (bands, height, width).
        card: has the scale, the means and the deviations.

    Returns:
        float32 of the same shape.
    """
    mean = torch.tensor([band.mean for band in card.bands])[:, None, None]
    std = torch.tensor([band.std for band in card.bands])[:, None, None]
    values = torch.from_numpy(pixels.astype(np.float32)) * card.scale + card.offset
    missing = torch.from_numpy((pixels == card.nodata).any(axis=0))
    return ((values - mean) / std).masked_fill(missing, 0.0)


def _starts(length: int, tile: int, overlap: int) -> list[int]:
    """Return the first pixel of each tile along one axis; the last tile ends with the scene."""
    starts = list(range(0, length - tile, tile - overlap))
    return [*starts, length - tile]


def _ramp(tile: int, overlap: int) -> Tensor:
    """Return the weights of a tile's pixels, (tile, tile): 1 inside, falling linearly to its edges."""
    rise = torch.arange(1, tile + 1) / (overlap + 1)
    line = torch.minimum(rise, rise.flip(0)).clamp(max=1)
    return line[:, None] * line[None, :]
