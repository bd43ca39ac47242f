"""A small random geospatial model whose masks tell scenes apart."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from engine.geo_models import make
from safetensors.torch import load_file, save_file

from baton_geo.prithvi import PrithviConfig, PrithviSegmenter, load
from support.rasters import RGB

GAIN = 4


def make_rgb(folder: Path) -> None:
    """A model of three bands that gives each of its three classes a good part of any scene."""
    make(folder, RGB)
    spread(folder)


def spread(folder: Path) -> None:
    """Weights larger, scores centred: as made, one class wins nearly everywhere, whatever the scene."""
    weights = {
        name: tensor * GAIN if tensor.ndim > 1 else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    model = PrithviSegmenter(PrithviConfig.from_hf(json.loads((folder / "config.json").read_text()))).eval()
    load(model, weights.items())
    tiles = torch.randn(8, len(RGB), 1, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        scores = model(tiles)
    last = "head.head.2.bias"
    weights[last] = weights[last] - scores.mean((0, 2, 3))
    save_file(weights, folder / "model.safetensors")
    assert load_file(folder / "model.safetensors").keys() == weights.keys()
