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
from geo.raster.made import write_tiff
from geo.sources.hosts import left

from baton_geo.plugin import GeoProcessor
from training.flood_tiny.predict import SHIPPED

Start = Callable[[Path], GeoProcessor]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start the processor of the shipped model with a spool folder, as vLLM does."""
    started: list[GeoProcessor] = []

    def starting(spool: Path) -> GeoProcessor:
        config = json.loads((SHIPPED / "config.json").read_text())
        model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config))
        settings = {"baton_geo": {"spool": str(spool)}}
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

    def seen(request: Any) -> Any:
        (prompt,) = processor.pre_process(request)
        return prompt["multi_modal_data"]["image"]["pixel_values"].numpy()

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
