"""Our model against what the published source answered on the same weights (`make_reference.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from baton_geo.prithvi import PrithviConfig, PrithviEmbedder, PrithviSegmenter, load

if TYPE_CHECKING:
    from conftest import Reference

TOLERANCE = 1e-5  # of values whose spread is about 1 (tokens) or 0.3 to 0.8 (logits)


@pytest.fixture
def model(reference: Reference) -> PrithviSegmenter:
    """Ours, with the published weights."""
    ours = reference.fresh()
    load(ours, reference.weights.items())
    return ours


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.2  # a reference of nearly equal numbers would show nothing
    return float((ours - theirs).abs().max())


@torch.inference_mode()
def test_the_encoder_gives_the_published_tokens(reference: Reference, model: PrithviSegmenter) -> None:
    """All tokens of two scenes, with dates and places where the model takes them, must be the published."""
    tokens = model.encode(reference.given["pixels"], *reference.coords)
    assert difference(tokens, reference.answered["tokens"]) < TOLERANCE


@torch.inference_mode()
def test_the_decoder_gives_the_published_scores(reference: Reference, model: PrithviSegmenter) -> None:
    """The class scores of every pixel must be those of the published neck, FCN decoder, head and rescaling."""
    logits = model(reference.given["pixels"], *reference.coords)
    assert difference(logits, reference.answered["logits"]) < TOLERANCE


@torch.inference_mode()
def test_another_size_gives_the_published_tokens(reference: Reference, model: PrithviSegmenter) -> None:
    """Positions of a scene wider than `img_size` must be interpolated as published."""
    tokens = model.encode(reference.given["pixels_wide"])
    assert difference(tokens, reference.answered["tokens_wide"]) < TOLERANCE


@torch.inference_mode()
def test_another_number_of_time_steps_gives_the_published_tokens(
    reference: Reference, model: PrithviSegmenter
) -> None:
    """Positions of one time step, of a model made for more, must be computed anew as published."""
    tokens = model.encode(reference.given["pixels_one_frame"])
    assert difference(tokens, reference.answered["tokens_one_frame"]) < TOLERANCE


@torch.inference_mode()
def test_coordinates_may_be_left_out(v2_tl: Reference) -> None:
    """Without dates and place a -TL model must answer as published, which is not what it answers with them."""
    model = v2_tl.fresh()
    load(model, v2_tl.weights.items())
    pixels = v2_tl.given["pixels"]
    without = model.encode(pixels)
    assert difference(without, v2_tl.answered["tokens_without_coords"]) < TOLERANCE
    assert (without - v2_tl.answered["tokens"]).abs().max() > 0.1
    unknown = torch.zeros_like(v2_tl.given["temporal_coords"]), torch.full((len(pixels), 2), 999.0)
    assert torch.equal(model.encode(pixels, *unknown), without)
    only_dates = model.encode(pixels, v2_tl.given["temporal_coords"])
    only_places = model.encode(pixels, None, v2_tl.given["location_coords"])
    for one in (only_dates, only_places):
        assert (one - v2_tl.answered["tokens"]).abs().max() > 0.1
        assert (one - without).abs().max() > 0.1


@torch.inference_mode()
def test_scenes_of_a_batch_do_not_mix(reference: Reference, model: PrithviSegmenter) -> None:
    """Each scene of a batch must get the scores it gets alone."""
    pixels = reference.given["pixels"]
    for scene in range(len(pixels)):
        one = slice(scene, scene + 1)
        coords = [given if given is None else given[one] for given in reference.coords]
        assert difference(model(pixels[one], *coords), reference.answered["logits"][one]) < TOLERANCE


def test_layer_norms_have_the_published_constant(reference: Reference, model: PrithviSegmenter) -> None:
    """The layer norms' eps, which outputs of ordinary size hardly show, must be the published."""
    for part, published in reference.norm_eps.items():
        modules = model.get_submodule(part).modules()
        assert sorted({layer.eps for layer in modules if isinstance(layer, torch.nn.LayerNorm)}) == published


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.04), (torch.float16, 0.006)])
@torch.inference_mode()
def test_half_precision_stays_near(
    reference: Reference, model: PrithviSegmenter, dtype: torch.dtype, tolerance: float
) -> None:
    """In half precision the scores must be finite, in that precision, and near the published ones.

    The limit is twice what rounding alone makes of them; one bias left out of the encoder must be too far.
    """
    scores = in_precision(dtype, model, reference)
    assert scores.dtype == dtype
    assert scores.isfinite().all()
    assert difference(scores.float(), reference.answered["logits"]) < tolerance
    model.get_parameter("encoder.blocks.1.mlp.fc2.bias").zero_()
    without = in_precision(dtype, model, reference).float()
    assert difference(without, reference.answered["logits"]) > 2 * tolerance


def in_precision(dtype: torch.dtype, model: PrithviSegmenter, reference: Reference) -> torch.Tensor:
    scores: torch.Tensor = model.to(dtype)(reference.given["pixels"].to(dtype), *reference.coords)
    return scores


@torch.inference_mode()
def test_an_encoder_alone_gives_the_published_tokens(reference: Reference) -> None:
    """A pre-trained checkpoint, its own decoder and all, must load into the encoder; patches are means over time."""
    config = PrithviConfig.from_hf(reference.config).model_copy(update={"decoder": None})
    alone = PrithviEmbedder(config).eval()
    weights = {name: value for name, value in reference.weights.items() if name.startswith("encoder.")}
    assert load(alone, (weights | reference.pretraining).items()) == set(weights)
    found = alone(reference.given["pixels"], *reference.coords)
    times, rows, columns = config.grid
    tokens = reference.answered["tokens"][:, 1:]
    wanted = tokens.reshape(len(tokens), times, rows, columns, -1).mean(dim=1).permute(0, 3, 1, 2)
    assert difference(found, wanted) < TOLERANCE
