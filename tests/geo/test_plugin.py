"""The IO processor by itself, without an engine: its start, and what of a request reaches the raster."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from geo.prithvi.published import REGRESSION, SIX
from geo.raster.made import seen_by_the_model, write_tiff
from geo.sources.hosts import hosting, left

from baton_geo.contract import LASTING, GeoAnswer, UploadRequest
from baton_geo.errors import RequestInvalid
from baton_geo.plugin import GeoProcessor, Prepared, with_fingerprint
from baton_geo.prithvi import card_of
from training.flood_tiny.predict import SHIPPED

Start = Callable[..., GeoProcessor]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start the processor of the shipped model with a spool folder, as vLLM does."""
    started: list[GeoProcessor] = []

    def starting(spool: Path, config: dict[str, Any] | None = None, **given: Any) -> GeoProcessor:
        config = config or json.loads((SHIPPED / "config.json").read_text())
        model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config))
        settings = {"baton_geo": {"spool": str(spool), **given}}
        vllm: Any = SimpleNamespace(model_config=model, additional_config=settings)
        renderer: Any = None
        started.append(GeoProcessor(vllm, renderer))
        return started[-1]

    yield starting
    for processor in started:
        processor.close()


@pytest.mark.fault("A8")
@pytest.mark.fault("A11")
def test_a_start_sweeps_what_was_left(start: Start, tmp_path: Path) -> None:
    """The spool folder holds nothing of a server that was killed."""
    scene = tmp_path / "baton-geo-scene-0123456789abcdef"
    scene.mkdir(0o700)
    (scene / "mask.draft.tif").write_bytes(b"half")
    raster = tmp_path / "baton-geo-0123456789abcdef.raster"
    raster.write_bytes(b"II*")
    raster.chmod(0o600)
    start(tmp_path)
    assert left(tmp_path) == []


@pytest.mark.fault("B14")
@pytest.mark.timeout(60)
def test_a_start_in_a_folder_that_is_not_ours_is_refused(start: Start, tmp_path: Path) -> None:
    """In words for the operator."""
    os.mkfifo(tmp_path / "spool")
    with pytest.raises(ValueError, match=r"baton_geo\.spool: .* is no folder"):
        start(tmp_path / "spool")


def test_scale_and_offset_reach_the_raster(start: Start, tmp_path: Path) -> None:
    """Of JSON and of an upload's query alike: with 1,000 added and said, the model sees what it saw before."""
    spool = tmp_path / "spool"
    spool.mkdir()
    processor = start(spool)
    numbers = np.random.default_rng(0).integers(0, 9000, (6, 40, 40)).astype("int16")
    plain = write_tiff(tmp_path / "plain.tif", numbers)
    shifted = write_tiff(tmp_path / "shifted.tif", numbers + np.int16(1000))

    side = card_of(json.loads((SHIPPED / "config.json").read_text())).tile

    def seen(request: Any) -> Any:
        (prompt,) = processor.pre_process(request)
        return seen_by_the_model(prompt, (6, 1, side, side)).numpy()

    def by_json(path: Path, **said: float) -> Any:
        data = {"data": base64.b64encode(path.read_bytes()).decode(), "data_format": "b64_json"}
        return seen(processor.parse_data(data | said))

    def by_query(path: Path, **said: str) -> Any:
        return seen(processor.parse_upload(path, "image/tiff", said, ()))

    expected = by_json(plain)
    assert not np.allclose(by_json(shifted), expected, atol=0.5)
    for got in (
        by_json(shifted, offset=-1000),
        by_json(shifted, scale=0.0001, offset=-0.1),
        by_query(shifted, offset="-1000"),
        by_query(shifted, scale="1e-4", offset="-0.1"),
    ):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def regression() -> dict[str, Any]:
    """A published regression, of small tiles."""
    config: dict[str, Any] = json.loads(json.dumps(REGRESSION["biomassters"]))
    args = config["pretrained_cfg"]["model"]["init_args"]["model_args"]
    args |= {"backbone": "prithvi_eo_v1_100", "backbone_img_size": 64, "backbone_num_frames": 1}
    args["necks"] = [{"name": "ReshapeTokensToImage"}]
    return config


def outputs(data: GeoAnswer) -> list[str]:
    return [data.format, *(file.name for file in data.files)]


def test_a_regressions_answer_is_its_values(start: Start, tmp_path: Path) -> None:
    """Asked for as a mask, as published clients do, or by name; with unit and range, and pictures of it."""
    processor = start(tmp_path, regression())
    path = write_tiff(tmp_path / "a.tif", np.full((6, 64, 64), 1500, "int16"))
    for asked in (["mask"], ["value", "preview", "classes"]):
        request = {"data": path.read_bytes(), "data_format": "bytes", "outputs": asked}
        (prompt,) = processor.pre_process(processor.parse_data(request))
        serial = prompt["prompt_token_ids"]
        made: Any = SimpleNamespace(data=torch.full((1, 1, 64, 64), 0.5))
        output: Any = SimpleNamespace(prompt_token_ids=serial, outputs=made)
        answer = processor.post_process([output])
        assert answer.value is not None
        assert (answer.value.unit, answer.classes) == ("Mg/ha", ())
        assert answer.value.mean == pytest.approx(0.5 * 72.21242 + 63.4584)
        assert outputs(answer) == ["tiff", *(f"{name}.png" for name in asked[1:])]
        with rasterio.MemoryFile(base64.b64decode(answer.data)) as memory, memory.open() as file:
            assert file.dtypes == ("float32",)


@pytest.mark.fault("F16")
@pytest.mark.parametrize(("of_values", "output"), [(True, "probabilities"), (False, "value")])
def test_an_output_of_the_other_kind_is_refused(
    start: Start, tmp_path: Path, of_values: bool, output: str
) -> None:
    """A regression has no probabilities, a segmentation no values; the file is not kept."""
    (tmp_path / "spool").mkdir()
    processor = start(tmp_path / "spool", regression() if of_values else None)
    path = write_tiff(tmp_path / "a.tif", np.full((6, 64, 64), 1500, "int16"))
    request = {"data": path.read_bytes(), "data_format": "bytes", "outputs": [output]}
    with pytest.raises(RequestInvalid, match=f"data.outputs: {output} is not among what this model gives"):
        processor.pre_process(processor.parse_data(request))
    assert left(tmp_path / "spool") == []


def test_polygons_that_nobody_named_may_be_left_out(start: Start, tmp_path: Path) -> None:
    """Of JSON and of an upload; who names them gets them or a refusal."""
    processor = start(tmp_path)
    for named in (False, True):
        asked = {"outputs": ["mask", "polygons"]} if named else {}
        query = {"outputs": "mask,polygons"} if named else {}
        for request in (
            processor.parse_data({"data": "AAAA", "data_format": "b64_json", **asked}),
            processor.parse_upload(tmp_path, "image/tiff", query, ()),
        ):
            wider = processor.for_files(request)
            if named:
                assert wider is request
                continue
            assert isinstance(wider, Prepared)
            assert wider.if_few
            options = wider.request.options if isinstance(wider.request, UploadRequest) else wider.request
            assert options.outputs == LASTING


@pytest.mark.fault("F16")
@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"outputs": ["mask", "polygons"]}, "data.outputs"),
        ({"indices": [0, 1]}, "indices"),
        ({"scale": [1.0, 2.0]}, "scale"),
        ({"offset": [0.0] * 7}, "offset"),
        ({"dates": ["2024-05-01", "2024-06-01"]}, "data.dates"),
    ],
)
async def test_what_the_card_alone_refuses_asks_no_host(
    start: Start, tmp_path: Path, wrong: dict[str, Any], param: str
) -> None:
    """Of one file, a part of it, several, and an item at an address: nothing is fetched for the refusal."""
    config = encoder()
    config["pretrained_cfg"]["coords_encoding"] = ["time"]
    with hosting() as host:
        url = f"http://127.0.0.1:{host.port}/scene.tif"
        given = {"allowed_hosts": [f"127.0.0.1:{host.port}"], "allow_http": True}
        processor = start(tmp_path, config, **given)
        one = {"data": url, "data_format": "url"}
        for named in (one, one | {"window": [0, 0, 8, 8]}, {"assets": {"B02": url}}, {"item": url}):
            if "item" in named and "indices" in wrong:
                continue  # an item has none
            request = processor.parse_data(named | wrong)
            with pytest.raises(RequestInvalid) as caught:
                processor.pre_process(request)
            assert caught.value.param == param
            with pytest.raises(RequestInvalid):
                await processor.pre_process_async(request)
        assert (host.connects, left(tmp_path)) == (0, [])


def encoder() -> dict[str, Any]:
    """A published pre-trained model's config.json, narrow."""
    sizes = {"img_size": 32, "num_frames": 1, "patch_size": [1, 8, 8], "in_chans": 6, "embed_dim": 32}
    numbers = {"bands": SIX, "mean": [1000.0] * 6, "std": [500.0] * 6, "coords_encoding": []}
    return {"pretrained_cfg": sizes | {"depth": 2, "num_heads": 2} | numbers}


def test_an_encoder_alone_gives_embeddings(start: Start, tmp_path: Path) -> None:
    """Table and raster, whatever is asked for; with a fingerprint that follows configuration and weights."""
    processor = start(tmp_path, encoder())
    path = write_tiff(tmp_path / "a.tif", np.full((6, 40, 64), 1500, "int16"), tuple(SIX))
    for asked, pictures in ({}, 0), ({"outputs": ["embeddings"]}, 0), ({"outputs": ["mask", "preview"]}, 1):
        request = {"data": path.read_bytes(), "data_format": "bytes", **asked}
        prompts = processor.pre_process(processor.parse_data(request))
        assert len(prompts) == 1
        made: Any = SimpleNamespace(data=torch.randn(4, 32, 4, 4))
        outputs_: Any = [
            SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=made) for prompt in prompts
        ]
        answer = processor.post_process(outputs_)
        assert (answer.format, answer.classes, answer.value) == ("parquet", (), None)
        assert base64.b64decode(answer.data).startswith(b"PAR1")
        raster, *others = answer.files
        assert [file.name for file in others] == ["scene.png"] * pictures
        with rasterio.MemoryFile(base64.b64decode(raster.data)) as memory, memory.open() as file:
            assert (file.count, file.width, file.height) == (32, 8, 5)
            assert len(file.tags()["MODEL"]) == 64


def test_a_fingerprint_follows_configuration_and_weights(tmp_path: Path) -> None:
    """Another weight or another size is another model."""
    config = encoder()

    def fingerprint(described: dict[str, Any]) -> str:
        card = with_fingerprint(card_of(described), described, SimpleNamespace(model=str(tmp_path)))
        assert card.embedding is not None
        return card.embedding.model

    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = fingerprint(config)
    assert fingerprint(config) == first
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert fingerprint(config) != first
    deeper = {"pretrained_cfg": config["pretrained_cfg"] | {"depth": 3}}
    (tmp_path / "model.safetensors").write_bytes(b"one")
    assert fingerprint(deeper) != first
