"""The shipped model: above its bar on held-out scenes, and exactly the one its record tells of."""

from __future__ import annotations

import json

import pytest

from training.flood_tiny.architecture import card, config_json
from training.flood_tiny.baselines import RECORD, ndwi
from training.flood_tiny.measure import draw_scenes, figures
from training.flood_tiny.predict import SHIPPED, Predictor
from training.flood_tiny.record import digest, generator_digest
from training.flood_tiny.seeds import HELD_OUT_SEEDS, TRAINING_SEEDS

POOLED_BAR, WORST_BAR = 0.97, 0.93


@pytest.fixture
def record():
    return json.loads((SHIPPED / "training.json").read_text())


def test_record_is_of_the_shipped_weights(record):
    """The record has the digest of the shipped weights, and of the scenes that the generator draws today."""
    weights = SHIPPED / "model.safetensors"
    assert record["weights"]["sha256"] == digest(weights)
    assert record["weights"]["bytes"] == weights.stat().st_size
    assert record["scenes_sha256"] == generator_digest()


def test_small_enough():
    """The whole folder is at most 5 MB."""
    assert sum(file.stat().st_size for file in SHIPPED.iterdir() if file.is_file()) <= 5_000_000


def test_record_meets_the_bar(record):
    """On record: pooled and worst scene above the bar, pooled ahead of every baseline."""
    rows = record["held_out"]
    ours = rows.pop("flood-tiny")
    assert ours["pooled"] > POOLED_BAR
    assert ours["worst"] > WORST_BAR
    assert ours["worst"] == min(ours["scenes"].values())
    assert {int(seed) for seed in ours["scenes"]} == set(HELD_OUT_SEEDS)
    assert len(rows) == 4
    for row in rows.values():
        assert row["pooled"] < ours["pooled"]
        assert row["worst"] < ours["worst"]


def test_seeds_are_disjoint(record):
    """No held-out scene was trained on or chosen by."""
    seeds = {name: set(values) for name, values in record["seeds"].items()}
    assert seeds["held_out"] == set(HELD_OUT_SEEDS)
    assert seeds["training"] == set(TRAINING_SEEDS)
    assert not seeds["held_out"] & (seeds["training"] | seeds["validation"])


def test_baselines_are_those_committed_before(record):
    """The baselines measured beside the model are the ones of the record made before training."""
    before = json.loads(RECORD.read_text())["held_out"]
    for name, row in before.items():
        assert record["held_out"][name]["pooled"] == pytest.approx(row["pooled"], abs=0.003)


def test_config_says_what_the_code_says():
    """config.json is the one the code writes for its bands' statistics."""
    held = json.loads((SHIPPED / "config.json").read_text())
    bands = held["baton_geo"]["bands"]
    rasters = card([band["mean"] for band in bands], [band["std"] for band in bands])
    written = json.loads(json.dumps(config_json(rasters)))
    assert {key: held[key] for key in written} == written


@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.chaos)])
def test_shipped_weights_reach_their_figures(record, count):
    """The weights as they lie here, on held-out scenes: each scene's figure on record, ahead of NDWI."""
    scenes = draw_scenes(HELD_OUT_SEEDS[:count])
    reached = figures(Predictor.of_folder(), scenes)
    assert reached.pooled > POOLED_BAR
    assert reached.worst > WORST_BAR
    on_record = record["held_out"]["flood-tiny"]["scenes"]
    for seed, figure in reached.scenes.items():
        assert figure == pytest.approx(on_record[str(seed)], abs=0.001)
        assert figure > figures(ndwi, {seed: scenes[seed]}).worst
