"""The model that vLLM's examples name, in a real engine: untouched config.json and `.pt`, the published request."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import rasterio
import torch
from geo.prithvi.page_of_torch import Page
from geo.prithvi.published import SIX
from support import published_model
from support.gateways import RealGateway
from support.published_model import NAME, TILE, make_published
from support.raster_host import RasterHost
from support.rasters import geotiff

from baton_geo.prithvi import card_of

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return make_published(tmp_path / "model")


@pytest.fixture
def client(page: Page, tmp_path: Path, raster_host: RasterHost) -> Iterator[httpx.Client]:
    """A client of a gateway that serves the folder as it was published."""
    (tmp_path / "baton.toml").write_text(
        f"""
        [[engines]]
        name = "{NAME}"
        model = "{tmp_path}/model"
        runner = "pooling"
        io_processor = "baton_geo"
        [engines.args]
        config_format = "baton_prithvi"
        dtype = "float32"
        skip_tokenizer_init = true
        mm_processor_cache_gb = 0
        [engines.args.additional_config.baton_geo]
        allowed_hosts = ["127.0.0.1:{raster_host.port}"]
        allow_http = true
        """
    )
    with RealGateway(["--config", str(tmp_path / "baton.toml")], tmp_path, forked=True) as gateway:
        gateway.wait_until_ready()
        with gateway.client() as client:
            yield client


@pytest.mark.fault("F12")
def test_the_published_model_answers_the_published_request(
    client: httpx.Client, page: Page, raster_host: RasterHost
) -> None:
    """The mask must be that of a page of torch: published names, normalisation, place, and no dates."""
    pixels = np.random.default_rng(3).integers(200, 4000, (6, TILE, TILE)).astype(np.int16)
    content = geotiff(pixels, tuple(SIX))
    raster_host.files["/valencia_example.tiff"] = content
    data = {
        "data": f"{raster_host.url}/valencia_example.tiff",
        "data_format": "url",
        "image_format": "tiff",
        "out_data_format": "b64_json",
    }
    answer = client.post("/pooling", json={"data": data, "priority": 0, "model": NAME})
    assert answer.status_code == 200, answer.text
    found = answer.json()["data"]
    assert any(text.startswith("no_dates: ") for text in found["notes"])
    with rasterio.open(io.BytesIO(base64.b64decode(found["data"]))) as file:
        mask = file.read(1)
    card = card_of(published_model.narrow_config())
    mean = np.array([band.mean for band in card.bands])[:, None, None]
    std = np.array([band.std for band in card.bands])[:, None, None]
    given = torch.tensor((pixels * 0.0001 - mean) / std, dtype=torch.float32)[None, :, None]
    with rasterio.open(io.BytesIO(content)) as file:
        place = torch.tensor([list(reversed(file.lnglat()))], dtype=torch.float32)
    with torch.inference_mode():
        scores = page.output(page.random(), given, None, place)[0]
    sure = (scores[0] - scores[1]).abs().numpy() > 1e-3
    assert 0.05 < mask.mean() < 0.95
    assert np.array_equal(mask[sure], scores.argmax(0).numpy()[sure])
