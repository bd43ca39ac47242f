"""What a model with temporal and location embeddings gets beside the pixels, and the prompt of a tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from geo.raster.made import make_card, write_tiff
from transformers import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from baton_geo.contract import GeoOptions, Location
from baton_geo.errors import RequestInvalid
from baton_geo.model import PrithviForSegmentation, StripShapes
from baton_geo.prithvi import PrithviConfig
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import CARRIED, SceneInfo, SceneRequest
from baton_geo.scenes import Coordinates, prompt


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoders]:
    decoders = Decoders(1, 30.0, tmp_path_factory.mktemp("scenes"))
    yield decoders
    decoders.close()


def coordinates(frames: int = 1, embeddings: Sequence[str] = ("time", "location")) -> Coordinates:
    sizes = {
        "img_size": 32,
        "patch_size": [1, 8, 8],
        "in_chans": 1,
        "embed_dim": 32,
        "depth": 1,
        "num_heads": 2,
    }
    published = sizes | {"mlp_ratio": 2, "num_frames": frames, "coords_encoding": list(embeddings)}
    return Coordinates(PrithviConfig.from_hf({"pretrained_cfg": published}))


def scene(acquired: str | None = None, place: tuple[float, float] | None = None) -> SceneInfo:
    latitude, longitude = place or (None, None)
    return SceneInfo(
        width=9,
        height=9,
        count=1,
        dtype="uint8",
        tiles=1,
        latitude=latitude,
        longitude=longitude,
        acquired=acquired,
    )


def days(*dates: date) -> list[list[float]]:
    fields = coordinates(len(dates), ["time"]).of(GeoOptions(dates=dates), scene())[0]
    assert fields["temporal_coords"].dtype == torch.float32
    days: list[list[float]] = fields["temporal_coords"].tolist()
    return days


def test_a_day_is_its_year_and_its_number_in_it() -> None:
    """The first of January is day 1; the last of December 365, or 366 of a leap year; one row a time step."""
    assert days(date(2023, 1, 1)) == [[2023, 1]]
    assert days(date(2023, 12, 31)) == [[2023, 365]]
    assert days(date(2024, 2, 29), date(2024, 3, 1), date(2024, 12, 31)) == [
        [2024, 60],
        [2024, 61],
        [2024, 366],
    ]


def test_one_time_step_has_the_files_date_where_the_request_has_none() -> None:
    """Of a date with or without an hour; the request's goes before it."""
    for acquired in ("2024-05-06", "2024-05-06T23:59:59"):
        fields = coordinates(embeddings=["time"]).of(GeoOptions(), scene(acquired))[0]
        assert fields["temporal_coords"].tolist() == [[2024, 127]]
    fields = coordinates(embeddings=["time"]).of(GeoOptions(dates=(date(2020, 1, 2),)), scene("2024-05-06"))[
        0
    ]
    assert fields["temporal_coords"].tolist() == [[2020, 2]]


def test_a_place_is_latitude_and_longitude() -> None:
    """The request's, else the centre of the scene."""
    fields = coordinates(embeddings=["location"]).of(GeoOptions(), scene(place=(45.5, -8.25)))[0]
    assert fields["location_coords"].tolist() == [45.5, -8.25]
    options = GeoOptions(location=Location(latitude=-33.5, longitude=151.25))
    fields = coordinates(embeddings=["location"]).of(options, scene(place=(45.5, -8.25)))[0]
    assert fields["location_coords"].tolist() == [-33.5, 151.25]


@pytest.mark.parametrize(
    ("embeddings", "names"),
    [((), set()), (("time",), {"temporal_coords"}), (("location",), {"location_coords"})],
)
def test_a_model_gets_the_coordinates_it_encodes(embeddings: tuple[str, ...], names: set[str]) -> None:
    """And nothing that it does not."""
    fields = coordinates(embeddings=embeddings).of(GeoOptions(), scene("2024-05-06", (1.0, 2.0)))[0]
    assert fields.keys() == names


def test_a_wrong_number_of_dates_is_refused() -> None:
    """By the name of the field."""
    one = GeoOptions(dates=(date(2024, 1, 1),))
    with pytest.raises(RequestInvalid) as caught:
        coordinates(2).require_dates(one)
    assert caught.value.param == "data.dates"
    coordinates(1).require_dates(one)
    coordinates(2, []).require_dates(one)


@pytest.mark.fault("F16")
def test_what_nobody_says_is_left_out_with_a_note() -> None:
    """Published clients send neither; of several time steps the file's one date is not enough."""
    fields, notes = coordinates(2).of(GeoOptions(), scene("2024-01-01"))
    assert fields["temporal_coords"].tolist() == [[0, 0], [0, 0]]
    assert fields["location_coords"].tolist() == [999, 999]
    assert [text.partition(":")[0] for text in notes] == ["no_dates", "no_location"]
    fields, notes = coordinates(1).of(GeoOptions(), scene("2024-01-01", (1.0, 2.0)))
    assert notes == ()


@pytest.mark.parametrize(
    ("west", "longitude"),
    [(0.0, 0.5), (179.0, 179.5), (180.0, -179.5), (350.0, -9.5), (359.0, -0.5), (-180.0, -179.5)],
)
def test_longitudes_of_a_grid_from_0_to_360_are_wrapped(
    decoders: Decoders, tmp_path: Path, west: float, longitude: float
) -> None:
    """The model was trained with -180 to 180: 350 degrees east is 10 degrees west."""
    grid = rasterio.Affine(0.1, 0, west, 0, -0.1, 46.0)
    path = write_tiff(tmp_path / "a.tif", np.ones((1, 10, 10), "uint8"), crs="EPSG:4326", transform=grid)
    with decoders.open(path, SceneRequest(card=make_card())) as opened:
        fields = coordinates(embeddings=["location"]).of(GeoOptions(), opened.info)[0]
    assert fields["location_coords"].tolist() == pytest.approx([45.5, longitude], abs=1e-4)


def test_a_prompt_is_a_number_and_its_tiles() -> None:
    """One token that the output comes back with, the tiles, and the coordinates beside them."""
    strip = np.arange(16, dtype=np.uint8).reshape(2, 8)
    info = scene().model_copy(update={"carried": "int16", "scaling": (2.0, 1.0, 0.0)})
    made = prompt(7, strip, info, {"location_coords": torch.tensor([1.0, 2.0])})
    image = made["multi_modal_data"]["image"]
    assert made["prompt_token_ids"] == [7]
    assert made["multi_modal_uuids"] == {"image": ["strip-7"]}
    assert np.array_equal(image["tiles"].numpy(), strip)
    assert CARRIED[image["carried"].item()] == "int16"
    assert image["scaling"].tolist() == [2.0, 1.0, 0.0]
    assert image["location_coords"].tolist() == [1.0, 2.0]


def strip_of(carried: str, count: int, seed: int) -> dict[str, torch.Tensor]:
    """A prompt's fields, of noise."""
    random, side = np.random.default_rng(seed), 32
    info = scene().model_copy(update={"carried": carried, "scaling": (0.01, 0.0, 0.5)})
    numbers = random.normal(40, 20, (count, side * side)).astype(carried).view(np.uint8)
    hidden = random.integers(0, 2, (count, 0 if carried == "float32" else side * side // 8), np.uint8)
    strip = np.concatenate([numbers, hidden], axis=1)
    fields: dict[str, torch.Tensor] = prompt(1, strip, info, {})["multi_modal_data"]["image"]
    return fields


def test_scenes_of_any_types_and_lengths_share_a_step() -> None:
    """vLLM makes one tensor of those of one shape, in the type of the first: each strip's answer is as alone."""
    sizes = {"img_size": 32, "patch_size": [1, 8, 8], "in_chans": 1, "embed_dim": 32, "depth": 1}
    decoder = {"decoder": "FCNDecoder", "num_classes": 2, "channels": [8, 8, 8], "head_channels": [8]}
    sizes |= {"num_heads": 2, "mlp_ratio": 2, "num_frames": 1, "coords_encoding": []}
    bands = [{"name": "A", "mean": 0.0, "std": 1.0}]
    classes = [{"name": name, "colour": [0, 0, 0]} for name in ("land", "water")]
    card = {"bands": bands, "classes": classes, "tile": 32, "overlap": 0}
    config = {"pretrained_cfg": sizes | {"segmentation": decoder}, "baton_geo": card}
    described = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: config), dtype=torch.float32, get_hidden_size=lambda: 32
    )
    engine: Any = SimpleNamespace(model_config=described, scheduler_config=SimpleNamespace(max_num_seqs=1))
    torch.manual_seed(0)
    model = PrithviForSegmentation(engine).eval()
    strips = [
        strip_of(carried, count, seed)
        for seed, (carried, count) in enumerate(
            [("int16", 8), ("float32", 3), ("uint8", 1), ("uint16", 8), ("int8", 5), ("float32", 3)]
        )
    ]
    names = StripShapes(model.config, 32).names
    fields = {name: MultiModalFieldConfig.batched("image") for name in names}

    def step(some: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        items = [
            MultiModalKwargsItems.from_hf_inputs(
                BatchFeature({name: value.unsqueeze(0) for name, value in strip.items()}), fields
            )["image"][0]
            for strip in some
        ]
        ((_, count, given),) = group_and_batch_mm_kwargs([("image", item) for item in items])
        assert count == len(some)
        with torch.inference_mode():
            answers: torch.Tensor = model(None, torch.zeros(count, dtype=torch.int64), **given)
        return answers

    together = step(strips)
    assert together.shape == (6, 8, 2, 32, 32)
    assert together.dtype == torch.uint8
    for strip, answer in zip(strips, together, strict=True):
        count = len(strip["tiles"])
        alone = step([strip])[0]
        assert len(alone) == count
        assert (answer[:count].int() - alone.int()).abs().max() <= 1  # of other batches
        assert not answer[count:].any()
    assert len(step([strips[0], strips[3]])) == 2
