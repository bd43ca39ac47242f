"""What the published source answered (`reference/`), and small models to ask."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from baton_geo.prithvi import PrithviConfig, PrithviSegmenter

REFERENCE = Path(__file__).parent / "reference"


@dataclass(frozen=True)
class Reference:
    """One case of `make_reference.py`.

    Attributes:
        config: its config.json.
        weights: of TerraTorch's segmentation model, under its names.
        pretraining: of the masked auto-encoder's decoder, under its names.
        given: inputs; pixels normalised.
        answered: the published code's outputs.
        norm_eps: what the layer norms of its encoder and its decoder add to a variance.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    pretraining: dict[str, Tensor]
    given: dict[str, Tensor]
    answered: dict[str, Tensor]
    norm_eps: dict[str, list[float]]

    @property
    def coords(self) -> tuple[Tensor | None, Tensor | None]:
        """Dates and places, where the case has them."""
        return self.given.get("temporal_coords"), self.given.get("location_coords")

    def fresh(self) -> PrithviSegmenter:
        """A model of this configuration with weights of its own."""
        torch.manual_seed(1)
        return PrithviSegmenter(PrithviConfig.from_hf(self.config)).eval()


def read_reference(name: str) -> Reference:
    """Reads `reference/<name>.safetensors`."""
    groups: dict[str, dict[str, Tensor]] = {"weights": {}, "pretraining": {}, "input": {}, "output": {}}
    with safe_open(REFERENCE / f"{name}.safetensors", framework="pt") as file:
        metadata = file.metadata()
        for key in file.keys():  # noqa: SIM118 - not a dict: it cannot be iterated over
            group, _, rest = key.partition("/")
            groups[group][rest] = file.get_tensor(key)
    scale = int(metadata["pixel_scale"])
    given = {
        key: value.float() / scale if key.startswith("pixels") else value
        for key, value in groups["input"].items()
    }
    return Reference(
        config=json.loads(metadata["config"]),
        weights=groups["weights"],
        pretraining=groups["pretraining"],
        given=given,
        answered=groups["output"],
        norm_eps=json.loads(metadata["norm_eps"]),
    )


@pytest.fixture(params=["v1", "v2_tl"])
def reference(request: pytest.FixtureRequest) -> Reference:
    """Both cases: 1.0 with three time steps; 2.0-TL with two, dates and place."""
    return read_reference(request.param)


@pytest.fixture
def v1() -> Reference:
    """The 1.0 case."""
    return read_reference("v1")


@pytest.fixture
def v2_tl() -> Reference:
    """The 2.0-TL case."""
    return read_reference("v2_tl")
