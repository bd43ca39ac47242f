"""The training loop: what it feeds the model, what it minimises, and that it learns."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from baton_geo.card import Card
from baton_geo.prithvi import PrithviConfig, PrithviSegmenter
from training.flood_scenes.scenes import UNKNOWN, make_scene
from training.flood_scenes.sensor import NODATA
from training.flood_tiny.architecture import card, config_json
from training.flood_tiny.measure import figures
from training.flood_tiny.predict import Predictor, normalised
from training.flood_tiny.train import Recipe, band_statistics, crops, loss_of, save, train

RECIPE = Recipe(steps=30, batch=4, tile=64, memory=0.5, rate=2e-3)


@pytest.fixture(scope="module")
def scenes():
    return {seed: make_scene(seed, 128, 128) for seed in (9, 11, 12)}


@pytest.fixture(scope="module")
def rasters(scenes) -> Card:
    return card(*band_statistics(scenes))


def small_model(rasters: Card) -> PrithviSegmenter:
    config = config_json(rasters)
    config["pretrained_cfg"] |= {"img_size": 64, "embed_dim": 48, "depth": 1, "num_heads": 3}
    torch.manual_seed(1)
    return PrithviSegmenter(PrithviConfig.from_hf(config))


def test_statistics_leave_nodata_out(scenes, rasters):
    """The card's means are those of the pixels that hold data, in reflectance."""
    known = np.concatenate([s.pixels[3][s.pixels[3] != NODATA] for s in scenes.values()]) / 10_000
    assert rasters.bands[3].mean == pytest.approx(known.mean(), abs=1e-5)
    assert rasters.bands[3].std == pytest.approx(known.std(), abs=1e-5)
    assert any((s.pixels == NODATA).any() for s in scenes.values())


def test_nodata_reaches_the_model_as_the_mean(rasters):
    """A pixel without data is 0 in every band after normalising; a mean pixel is 0 too, others are not."""
    pixels = np.full((6, 1, 3), 5000, dtype=np.int16)
    pixels[:, 0, 0] = NODATA
    pixels[2, 0, 1] = NODATA  # in one band only
    seen = normalised(pixels, rasters)
    assert (seen[:, 0, :2] == 0).all()
    for index, band in enumerate(rasters.bands):
        assert seen[index, 0, 2].item() == pytest.approx((0.5 - band.mean) / band.std, rel=1e-5)


def test_crops_are_reproducible_and_aligned(scenes, rasters):
    """The same recipe gives the same crops; truth is unknown exactly where the pixels are nodata."""
    once, again = (list(itertools.islice(crops(scenes, rasters, RECIPE), 8)) for _ in range(2))
    for (pixels, label), (same_pixels, same_label) in zip(once, again, strict=True):
        assert torch.equal(pixels, same_pixels)
        assert torch.equal(label, same_label)
        assert pixels.shape == (4, 6, 1, 64, 64)
        assert torch.equal((pixels == 0).all(dim=(1, 2)), label == UNKNOWN)
    assert any((label == UNKNOWN).any() for _, label in once)


def test_unknown_pixels_count_for_nothing():
    """What the model says where nothing is known changes no loss; what it says elsewhere does."""
    label = torch.tensor([[[0, 1, 1, UNKNOWN]]])
    scores = torch.zeros(1, 2, 1, 4)
    elsewhere, known = scores.clone(), scores.clone()
    elsewhere[..., 3], known[0, 1, 0, 1] = 7.0, 7.0
    assert loss_of(elsewhere, label) == loss_of(scores, label)
    assert loss_of(known, label) < loss_of(scores, label)


@pytest.mark.chaos
def test_training_learns_and_repeats(scenes, rasters, tmp_path):
    """A few steps bring the loss down, twice the same way; what is saved is what predicts."""
    runs = [train(small_model(rasters), crops(scenes, rasters, RECIPE), RECIPE) for _ in range(2)]
    (kept, losses), (_, repeated) = runs
    assert losses == repeated
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    save(kept, rasters, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float16}
    assert torch.equal(saved["head.head.2.bias"], kept.state_dict()["head.head.2.bias"].half())


@pytest.mark.parametrize("size", [(64, 64), (97, 160)])
def test_a_constant_model_gives_a_constant_mosaic(rasters, size):
    """Blending leaves no seams: where every tile says the same, so does the scene."""
    model = small_model(rasters)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        model.head.head[2].bias.copy_(torch.tensor([0.0, 1.0]))
    predictor = Predictor(model, rasters.model_copy(update={"tile": 64, "overlap": 16}))
    seen = predictor.probabilities(np.full((6, *size), 900, dtype=np.int16))
    np.testing.assert_allclose(seen[1], torch.sigmoid(torch.tensor(1.0)).item(), rtol=1e-6)
    assert seen.shape == (2, *size)


@pytest.mark.chaos
def test_predicts_better_than_nothing_after_a_few_steps(scenes, rasters):
    """The whole chain, from scenes to figures, carries the label through: a model that learnt a little shows it."""
    kept, _ = train(small_model(rasters), crops(scenes, rasters, RECIPE), RECIPE)
    predictor = Predictor(kept, rasters.model_copy(update={"tile": 64, "overlap": 16}))
    everything = figures(lambda pixels: np.ones(pixels.shape[1:], dtype=bool), scenes)
    assert figures(predictor, scenes).pooled > everything.pooled + 0.1
