"""Published checkpoints: their names and wrappings, and what is wrong with one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from baton_geo.prithvi import PrithviSegmenter, load

if TYPE_CHECKING:
    from conftest import Reference


def prefixed(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in weights.items()}


def same(model: PrithviSegmenter, weights: Mapping[str, Tensor]) -> bool:
    """Whether the model now holds exactly these."""
    state = model.state_dict()
    return state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in weights)


def test_our_names_are_the_published_names(reference: Reference) -> None:
    """Parameters and buffers must be called as in the published encoder, decoder and head, none more or less."""
    assert reference.fresh().state_dict().keys() == reference.weights.keys()


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda weights: weights, id="plain"),
        pytest.param(lambda weights: prefixed("model.", weights), id="lightning names"),
        pytest.param(lambda weights: prefixed("module.", weights), id="data parallel"),
        pytest.param(lambda weights: prefixed("module.model.", weights), id="both"),
        pytest.param(lambda weights: prefixed("_orig_mod.", weights), id="compiled"),
        pytest.param(
            lambda weights: {
                name.replace("encoder.", "encoder._timm_module."): value for name, value in weights.items()
            },
            id="timm's wrapper",
        ),
        pytest.param(lambda weights: {"state_dict": prefixed("model.", weights), "epoch": 7}, id="lightning"),
        pytest.param(lambda weights: {"model": weights, "optimizer": {"lr": 0.1}}, id="a table called model"),
        pytest.param(
            lambda weights: {"model.criterion.weight": torch.ones(2), **prefixed("model.", weights)},
            id="loss weights",
        ),
    ],
)
def test_every_wrapping_is_taken_off(reference: Reference, wrap: Any) -> None:
    """The same weights must be loaded, exactly, from every way they are saved in."""
    model = reference.fresh()
    assert not same(model, reference.weights)
    loaded = load(model, wrap(reference.weights).items())
    assert loaded == set(reference.weights)
    assert same(model, reference.weights)


def test_the_pretrainings_decoder_is_dropped(reference: Reference) -> None:
    """A checkpoint that still has the auto-encoder's decoder must load as one without."""
    model = reference.fresh()
    assert len(reference.pretraining) > 15
    loaded = load(model, (reference.weights | reference.pretraining).items())
    assert loaded == set(reference.weights)


def test_1_0s_flat_names_are_the_encoders(reference: Reference) -> None:
    """1.0 names the encoder's parameters, and those of the pre-training's decoder, without a prefix."""
    flat = {re.sub(r"^(encoder|decoder)\.", "", name): value for name, value in reference.pretraining.items()}
    assert {"mask_token", "decoder_embed.weight"} <= flat.keys()
    flat |= {name.removeprefix("encoder."): value for name, value in reference.weights.items()}
    model = reference.fresh()
    assert load(model, flat.items()) == set(reference.weights)
    assert same(model, reference.weights)


def test_positions_of_another_size_are_not_taken(v1: Reference) -> None:
    """A checkpoint trained with more time steps must load, with the position table computed for ours."""
    model = v1.fresh()
    weights = dict(v1.weights)
    weights["encoder.pos_embed"] = torch.zeros(1, 65, 32)
    loaded = load(model, weights.items())
    assert loaded == set(weights) - {"encoder.pos_embed"}
    assert torch.equal(model.encoder.pos_embed, v1.weights["encoder.pos_embed"])


def test_positions_and_fixed_scales_may_be_missing(v1: Reference) -> None:
    """What is computed, not trained, need not be in the checkpoint."""
    model = v1.fresh()
    weights = {name: value for name, value in v1.weights.items() if name != "encoder.pos_embed"}
    assert load(model, weights.items()) == set(weights)
    assert same(model, v1.weights)


def test_weights_take_the_models_dtype(v1: Reference) -> None:
    """Loading into a bfloat16 model must give bfloat16 parameters of the nearest values."""
    model = v1.fresh().bfloat16()
    load(model, v1.weights.items())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, v1.weights[name].bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder.norm.weight": None}, "encoder.norm.weight: missing"),
        ({"encoder.temporal_embed_enc.scale": torch.ones(1)}, "encoder.temporal_embed_enc.scale: unknown"),
        ({"model.head.head.3.weight": torch.ones(1)}, "model.head.head.3.weight: unknown"),
        ({"blocks.2.norm1.weight": torch.ones(32)}, "blocks.2.norm1.weight: unknown"),
        ({"module.encoder.norm.bias": torch.ones(32)}, "module.encoder.norm.bias: given twice"),
        (
            {"head.head.2.weight": torch.ones(3, 8, 1, 1)},
            "head.head.2.weight: shape (3, 8, 1, 1), must be (2, 8, 1, 1)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(v1: Reference, change: dict[str, Any], message: str) -> None:
    """Missing, unknown, repeated and mis-shaped parameters must be refused by the checkpoint's own names."""
    weights = {name: value for name, value in (v1.weights | change).items() if value is not None}
    with pytest.raises(ValueError, match=f"^checkpoint: .*{re.escape(message)}"):
        load(v1.fresh(), weights.items())


def test_a_long_list_is_cut(v1: Reference) -> None:
    """Another model's checkpoint must be refused with a few names and a count, not with hundreds."""
    others = {f"layers.{number}.weight": torch.ones(1) for number in range(300)}
    with pytest.raises(ValueError, match=r"layers\.4\.weight: unknown; and 344 more$") as caught:
        load(v1.fresh(), others.items())
    assert len(str(caught.value)) < 300
