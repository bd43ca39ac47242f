"""The measure and the baselines: right on cases worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from training.flood_scenes.scenes import LAND, UNKNOWN, WATER, SyntheticScene, make_scene
from training.flood_tiny import baselines
from training.flood_tiny.measure import figures
from training.flood_tiny.seeds import HELD_OUT_SEEDS


def scene(label: list[list[int]], green: int = 1000, nir: int = 500, swir: int = 500) -> SyntheticScene:
    """Every pixel with the same three bands."""
    truth = np.array(label, dtype=np.uint8)
    pixels = np.zeros((6, *truth.shape), dtype=np.int16)
    pixels[1], pixels[3], pixels[4] = green, nir, swir
    return SyntheticScene(pixels, truth)


def test_figures_by_hand():
    """Pooled counts pixels, worst counts scenes, and the unknown counts for neither."""
    scenes = {
        1: scene([[WATER, WATER, WATER, LAND]]),  # all said to be water: 3 of 4
        2: scene([[WATER, UNKNOWN, LAND, LAND]]),  # 1 of 3
    }
    reached = figures(baselines.everything, scenes)
    assert reached.scenes == {1: pytest.approx(3 / 4), 2: pytest.approx(1 / 3)}
    assert reached.worst == pytest.approx(1 / 3)
    assert reached.pooled == pytest.approx(4 / 7)


def test_no_scenes_no_figures():
    """Nothing measured is an error, not a perfect score."""
    with pytest.raises(ValueError, match="no scenes"):
        figures(baselines.everything, {})


@pytest.mark.parametrize(("green", "nir", "water"), [(1000, 999, True), (1000, 1000, False), (0, 0, False)])
def test_ndwi_by_hand(green, nir, water):
    """NDWI is above 0 where green is brighter than near infrared, also where both are 0."""
    assert baselines.ndwi(scene([[LAND]], green, nir).pixels).item() == water


def test_mndwi_threshold_is_tuned():
    """The threshold falls between water and land that lie apart."""
    scenes = {1: scene([[WATER] * 8], 1000, swir=250), 2: scene([[LAND] * 8], 1000, swir=500)}
    method, threshold = baselines.tuned_mndwi(scenes)
    assert 1 / 3 < threshold <= 0.6
    assert method(scenes[1].pixels).all()
    assert not method(scenes[2].pixels).any()


def test_mlp_learns():
    """The perceptron beats NDWI on the scenes it was fitted on."""
    scenes = {seed: make_scene(seed, 128, 128) for seed in (1, 2, 3)}
    method = baselines.pixel_mlp(scenes, steps=150, batch=2048)
    assert figures(method, scenes).pooled > figures(baselines.ndwi, scenes).pooled + 0.05


def test_record_holds_every_held_out_scene():
    """The record checked in before training has each baseline's figure for each held-out scene."""
    record = json.loads(baselines.RECORD.read_text())
    assert not set(record["fitted_on"]) & set(HELD_OUT_SEEDS)
    assert len(record["held_out"]) == 4
    for row in record["held_out"].values():
        assert {int(seed) for seed in row["scenes"]} == set(HELD_OUT_SEEDS)
        assert row["worst"] == min(row["scenes"].values())
    assert record["held_out"]["NDWI > 0"]["pooled"] < 0.93
