"""Shapes, sizes and refusals of the segmentation model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from baton_geo.prithvi import PrithviConfig, PrithviSegmenter


def small(*, frames: int = 1, segmentation: dict[str, Any] | None = None, **changes: Any) -> PrithviSegmenter:
    """A model of two blocks over 4 bands and 8-pixel patches."""
    sizes = {
        "img_size": 32, "num_frames": frames, "patch_size": [1, 8, 8], "in_chans": 4, "embed_dim": 32,
        "depth": 2, "num_heads": 4, "mlp_ratio": 2, "coords_encoding": [],
    }  # fmt: skip
    decoder = {"num_classes": 3, "channels": 8, "num_convs": 3, **(segmentation or {})}
    torch.manual_seed(3)
    config = PrithviConfig.from_hf({"pretrained_cfg": {**sizes, **changes, "segmentation": decoder}})
    return PrithviSegmenter(config).eval()


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 64), (48, 24), (16, 16)])
@torch.inference_mode()
def test_every_pixel_gets_a_score_for_each_class(frames: int, height: int, width: int) -> None:
    """Scores must have the input's height and width at any size the patches divide, and tokens theirs."""
    model = small(frames=frames)
    pixels = torch.randn(2, 4, frames, height, width)
    assert model(pixels).shape == (2, 3, height, width)
    assert model.encode(pixels).shape == (2, 1 + frames * (height // 8) * (width // 8), 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_sides_of_half_a_patch_are_filled_up(dtype: torch.dtype) -> None:
    """Sides that are no multiple of two patches are reflected, as published, and the filling is cut off."""
    model = small().to(dtype)
    pixels = torch.randn(1, 4, 1, 37, 48, dtype=dtype)
    filled = torch.cat((pixels, pixels[..., -12:-1, :].flip(-2)), dim=-2)
    assert torch.equal(model(pixels), model(filled)[..., :37, :])


@torch.inference_mode()
def test_patches_may_span_time() -> None:
    """Patches of two time steps must halve the tokens and the decoder's input."""
    model = small(frames=4, patch_size=[2, 8, 8])
    pixels = torch.randn(1, 4, 4, 32, 32)
    assert model.encode(pixels).shape == (1, 1 + 2 * 4 * 4, 32)
    assert model.decoder.convs[0][0].in_channels == 2 * 32
    assert model(pixels).shape == (1, 3, 32, 32)


@pytest.mark.parametrize("num_convs", [2, 4])
@torch.inference_mode()
def test_a_decoder_that_ends_elsewhere_is_rescaled(num_convs: int) -> None:
    """Too few or too many doublings must still give scores of the input's size."""
    assert small(segmentation={"num_convs": num_convs})(torch.randn(1, 4, 1, 32, 32)).shape == (1, 3, 32, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [32, 48])
@torch.inference_mode()
def test_half_precision_works_at_every_size(dtype: torch.dtype, size: int) -> None:
    """Half precision must give finite scores in its own dtype, interpolated positions and skip included."""
    model = small(segmentation={"skip": True}, coords_encoding=["time", "location"]).to(dtype)
    pixels = torch.randn(1, 4, 1, size, size, dtype=dtype)
    logits = model(pixels, torch.tensor([[[2024.0, 299.0]]]), torch.tensor([[39.5, -0.4]]))
    assert logits.dtype == dtype
    assert logits.isfinite().all()


def test_skip_is_off_unless_asked_for() -> None:
    """Only a model that asks for `skip` may have parameters a published checkpoint lacks."""
    plain = {name.partition(".")[0] for name, _ in small().named_parameters()}
    assert plain == {"encoder", "decoder", "head"}
    skipping = {name.partition(".")[0] for name, _ in small(segmentation={"skip": True}).named_parameters()}
    assert skipping == {"encoder", "decoder", "head", "skip"}


def test_skip_lets_a_single_pixel_through() -> None:
    """With `skip` a score must follow its pixel alone, which tokens of 8 by 8 pixels share."""
    model = small(segmentation={"skip": True, "skip_channels": 4})
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.zero_()
    pixels = torch.zeros(1, 4, 1, 32, 32)
    changed = pixels.clone()
    changed[..., 11, 17] = 5
    with torch.inference_mode():
        moved = (model(changed) - model(pixels)).abs().amax(dim=(0, 1)) > 1e-6
    rows, columns = torch.nonzero(moved, as_tuple=True)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (10, 12, 16, 18)


def test_a_list_of_channels_makes_the_decoder_narrower() -> None:
    """Each doubling must have the channels the list gives it, the head the last one's."""
    model = small(segmentation={"channels": [16, 8, 4], "num_convs": None, "head_channels": [6]})
    assert [stage[0].out_channels for stage in model.decoder.convs] == [16, 8, 4]
    assert [layer.in_channels for layer in (model.head.head[0][0][0], model.head.head[2])] == [4, 6]


def test_training_lowers_the_loss_and_reaches_every_parameter() -> None:
    """Gradients must reach all parameters, and a few steps must lower the loss."""
    model = small(segmentation={"skip": True}, coords_encoding=["time", "location"], coords_scale_learn=True)
    model.train()
    pixels = torch.randn(2, 4, 1, 32, 32)
    labels = (pixels[:, 0, 0] > 0).long()
    coords = (torch.tensor([[[2024.0, 10.0]], [[2023.0, 200.0]]]), torch.tensor([[10.0, 20.0], [-5.0, 60.0]]))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(pixels, *coords), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 32, 32), r"must be \(batch, 4 bands, time, height, width\)"),
        ((1, 4, 32, 32), r"must be \(batch, 4 bands, time, height, width\)"),
        ((1, 6, 1, 32, 32), r"shape \(1, 6, 1, 32, 32\), must be \(batch, 4 bands"),
        ((1, 4, 1, 8, 32), "height 8 must be larger than the patch size 8"),
        ((1, 4, 1, 32, 4), "width 4 must be larger than the patch size 8"),
        ((1, 4, 0, 32, 32), "time 0 is not a multiple of the patch size 1"),
        ((1, 4, 2, 32, 32), "2 time steps, must be 1"),
    ],
)
def test_pixels_that_do_not_fit_are_refused(shape: tuple[int, ...], message: str) -> None:
    """A shape the model was not made for must be refused in its own words, not by a layer deep inside."""
    with pytest.raises(ValueError, match=f"pixel_values: .*{message}"):
        small()(torch.zeros(shape))


@pytest.mark.parametrize(
    ("dates", "place", "message"),
    [
        ((1, 2), None, r"temporal_coords: shape \(1, 2\), must be \(1, 2, 2\)"),
        ((1, 1, 2), None, r"temporal_coords: shape \(1, 1, 2\), must be \(1, 2, 2\)"),
        (None, (2, 2), r"location_coords: shape \(2, 2\), must be \(1, 2\)"),
        (None, (1, 1, 2), r"location_coords: shape \(1, 1, 2\), must be \(1, 2\)"),
    ],
)
def test_coordinates_that_do_not_fit_are_refused(
    dates: tuple[int, ...] | None, place: tuple[int, ...] | None, message: str
) -> None:
    """Coordinates of another number of scenes or time steps must be refused, never spread over tokens."""
    model = small(frames=2, coords_encoding=["time", "location"])
    with pytest.raises(ValueError, match=message):
        model(
            torch.zeros(1, 4, 2, 32, 32),
            None if dates is None else torch.zeros(dates),
            None if place is None else torch.zeros(place),
        )


def test_an_encoder_alone_is_no_segmenter() -> None:
    """A pre-trained model's config, which has no decoder, must be refused when a segmenter is built."""
    config = PrithviConfig.from_hf(
        {
            "pretrained_cfg": {
                "img_size": 32, "num_frames": 1, "patch_size": [1, 8, 8], "in_chans": 4, "embed_dim": 32,
                "depth": 1, "num_heads": 4,
            }
        }
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"pretrained_cfg\.segmentation: missing"):
        PrithviSegmenter(config)


def test_a_model_is_made_where_torch_says() -> None:
    """Under torch's default device every parameter and buffer must be made there, as vLLM's loaders expect."""
    with torch.device("meta"):
        model = small(coords_encoding=["time"], segmentation={"skip": True})
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.fixture
def bfloat16_by_default() -> Iterator[None]:
    """Torch makes bfloat16 parameters, as while vLLM builds a model of that dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("bfloat16_by_default")
@torch.inference_mode()
def test_a_model_is_made_in_the_default_dtype() -> None:
    """A model built under another default dtype must have its parameters in it, and answer in it."""
    model = small(coords_encoding=["time", "location"], segmentation={"skip": True})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.encoder.pos_embed.dtype == torch.float32
    logits = model(torch.randn(1, 4, 1, 32, 32), torch.zeros(1, 1, 2), torch.zeros(1, 2))
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()
