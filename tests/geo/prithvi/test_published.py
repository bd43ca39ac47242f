"""TerraTorch's published Prithvi configurations: their names, shapes and outputs, and the cards they give."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from geo.prithvi.page_of_torch import Page
from geo.prithvi.published import REFUSED, REGRESSION, SEGMENTATION, SIX

from baton_geo.prithvi import PrithviConfig, PrithviSegmenter, card_of, load

TOLERANCE = 1e-5
EVERY = {
    **{name: (config, "segmentation") for name, config in SEGMENTATION.items()},
    **{name: (config, "regression") for name, config in REGRESSION.items()},
}


def args_of(config: Mapping[str, Any]) -> dict[str, Any]:
    args: dict[str, Any] = config["pretrained_cfg"]["model"]["init_args"]["model_args"]
    return args


def with_args(config: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    held = config["pretrained_cfg"]
    model = held["model"] | {"init_args": held["model"]["init_args"] | {"model_args": dict(args)}}
    return {**config, "pretrained_cfg": {**held, "model": model}}


def narrow(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same model, a few channels wide, and of few tiles' pixels."""
    args = dict(args_of(config))
    channels = args.get("decoder_channels", 256)
    args |= {
        "backbone_embed_dim": 32, "backbone_num_heads": 2,
        "backbone_img_size": 56 if "600" in args["backbone"] else 64,
        "decoder_channels": 16 if isinstance(channels, int) else [32, 16, 16, 8],
    }  # fmt: skip
    if args.get("head_channel_list"):
        args["head_channel_list"] = [12, 8][: len(args["head_channel_list"])]
    return with_args(config, args)


@pytest.mark.parametrize("name", EVERY)
def test_names_and_shapes_are_the_published(name: str) -> None:
    """Each published model must have the parameters that its description gives it, none more, none fewer."""
    config, task = EVERY[name]
    with torch.device("meta"):
        model = PrithviSegmenter(PrithviConfig.from_hf(config))
    ours = {
        key: tuple(value.shape)
        for key, value in model.state_dict().items()
        if not key.endswith(("num_batches_tracked", "pos_embed"))
        and not (key.endswith("_enc.scale") and key not in dict(model.named_parameters()))
    }
    assert ours == Page(args_of(config), task).shapes()


@pytest.mark.fault("F12")
@pytest.mark.parametrize("name", EVERY)
@torch.inference_mode()
def test_outputs_are_those_of_a_page_of_torch(name: str) -> None:
    """Scores and values of every pixel must be those that the published description gives, also of odd sizes."""
    config, task = EVERY[name]
    config = narrow(config)
    page = Page(args_of(config), task)
    weights = page.random()
    model = PrithviSegmenter(PrithviConfig.from_hf(config)).eval()
    wrapped = {f"model.{key}": value for key, value in weights.items()}
    wrapped |= {"model.aux_heads.aux_head.0.convs.0.0.weight": torch.zeros(1)}
    assert load(model, {"state_dict": wrapped}.items()) == set(weights)
    random = torch.Generator().manual_seed(1)
    for height, width in ((page.size, page.size), (page.size + 9, page.size + 24)):
        pixels = torch.randn(2, page.bands, page.frames, height, width, generator=random)
        dates = torch.tensor([[2021.0, 100.0], [2023.0, 7.0]])[:, None].repeat(1, page.frames, 1)
        places = torch.tensor([[39.4, -0.3], [-33.0, 151.2]])
        ours = model(pixels, dates, places)
        theirs = page.output(weights, pixels, dates, places)
        assert ours.shape == theirs.shape
        assert theirs.std() > 0.05  # outputs that hardly differ would show nothing
        scale = max(1.0, float(theirs.abs().max()))
        assert float((ours - theirs).abs().max()) < TOLERANCE * scale


@pytest.mark.fault("F12")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(name: str) -> None:
    """A published model of another kind must be refused with the key that makes it one."""
    config, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^config.json: {re.escape(message)}"):
        PrithviConfig.from_hf(config)


def test_without_rescaling_the_scores_must_fit() -> None:
    """`rescale: false` is right only where the decoder's image has the input's size."""
    config = SEGMENTATION["multi_temporal_crop"]
    assert PrithviConfig.from_hf(config).decoder is not None
    short = with_args(config, args_of(config) | {"decoder_num_convs": 3})
    with pytest.raises(ValueError, match=r"model_args\.rescale: must be true: .* 8 times .* 16 x 16 pixels"):
        PrithviConfig.from_hf(short)


@pytest.mark.fault("F12")
def test_batch_norms_need_what_training_measured() -> None:
    """A checkpoint without a batch norm's mean must be refused: its scores would be nonsense."""
    config = narrow(SEGMENTATION["vllm_guide"])
    weights = Page(args_of(config)).random()
    del weights["decoder.bottleneck.norm.running_mean"]
    model = PrithviSegmenter(PrithviConfig.from_hf(config))
    with pytest.raises(ValueError, match=r"decoder\.bottleneck\.norm\.running_mean: missing"):
        load(model, weights.items())


@pytest.mark.parametrize("name", [name for name in EVERY if name != "burnintensity"])
def test_each_config_gives_a_card(name: str) -> None:
    """Where a config has no card one must be made: bands, numbers, tiles, and classes or a value."""
    config, task = EVERY[name]
    model, card = PrithviConfig.from_hf(config), card_of(config)
    assert (len(card.bands), card.frames) == (model.in_chans, model.num_frames)
    assert 2 * card.overlap <= card.tile
    if task == "segmentation":
        assert len(card.classes) == model.decoder.num_classes  # type: ignore[union-attr]
        assert len({label.colour for label in card.classes}) == len(card.classes)
    else:
        assert (card.classes, card.channels) == ((), 1)
        assert card.value is not None


def test_the_numbers_of_a_card_are_the_configs() -> None:
    """Means, deviations, scale, tiles, classes and replacement of nodata, of four ways of saying them."""
    floods = card_of(SEGMENTATION["sen1floods11_vit"])
    named = card_of(SEGMENTATION["vllm_guide"])
    assert [band.name for band in floods.bands] == SIX
    assert floods.bands == named.bands
    assert (floods.bands[3].mean, floods.bands[3].std) == (0.30902815, 0.11798815)
    assert (floods.scale, floods.float_scale, floods.nodata_replace) == (0.0001, 1.0, 0.0)
    burns = card_of(SEGMENTATION["burn_scars"])
    assert (burns.tile, burns.overlap, burns.scale) == (512, 16, 0.0001)
    crops = card_of(SEGMENTATION["multi_temporal_crop"])
    assert (crops.tile, crops.overlap, crops.frames, crops.scale) == (224, 28, 3, 1.0)
    assert [label.name for label in crops.classes][2:4] == ["Corn", "Soybeans"]
    assert crops.reflectance is not None
    tutorial = card_of(SEGMENTATION["tutorial_multitemporal_crop"])
    assert tutorial.bands == crops.bands
    biomass = card_of(REGRESSION["biomassters"])
    assert biomass.value is not None
    assert (biomass.value.unit, biomass.value.scale, biomass.value.offset) == ("Mg/ha", 72.21242, 63.4584)


def test_radar_in_decibels_has_a_unit_of_its_own() -> None:
    """The radar bands beside optical ones keep their numbers, whatever an optical number is worth."""
    card = card_of(SEGMENTATION["multimodal_prithvi_sen1floods11"])
    vv, vh = card.bands[-2:]
    assert (vv.name, vv.mean, vv.scale, vv.valid_range) == ("VV", -12.577, 1.0, (-100.0, 50.0))
    assert (vh.name, vh.std) == ("VH", 5.872)
    assert {band.scale for band in card.bands[:-2]} == {None}


def test_the_declared_input_is_the_tile() -> None:
    """Without tiled inference the shape that a vLLM config declares must be a tile's."""
    config = SEGMENTATION["vllm_guide"]
    shaped = {"input": {"target": "pixel_values", "data": {"pixel_values": {"shape": [6, 512, 512]}}}}
    card = card_of({**config, "pretrained_cfg": {**config["pretrained_cfg"], **shaped}})
    assert (card.tile, card.overlap) == (512, 64)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("burnintensity", "has neither a `baton_geo` table nor the means and deviations"),
    ],
)
def test_a_config_that_does_not_say_enough_is_refused(name: str, message: str) -> None:
    """Numbers that are nowhere, or of another shape, must be asked for by their place."""
    with pytest.raises(ValueError, match=message):
        card_of(SEGMENTATION[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"means": [1.0]}, "6 bands, 1 means and 6 deviations for a model of 6 bands"),
        ({"means": "means.yaml"}, r"data\.init_args\.means: must be a list"),
        ({"means": {"S2": [1.0] * 6}}, r"data\.init_args\.means: of several modalities"),
    ],
)
def test_numbers_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    """Means that are a file, of modalities, or too few must be refused by their key."""
    config = SEGMENTATION["burn_scars"]
    data = config["pretrained_cfg"]["data"]
    data = data | {"init_args": data["init_args"] | changes}
    with pytest.raises(ValueError, match=message):
        card_of({**config, "pretrained_cfg": {**config["pretrained_cfg"], "data": data}})
