"""Plain vLLM's own server with only the distribution installed: the command and the clients of the plugin's README."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from support.geo_readme import blocks
from support.plain_servers import PlainServer
from support.raster_host import RasterHost
from support.rasters import RGB, geotiff, opened
from support.torch_pipeline import as_torch_says

from baton_geo.settings import GeoSettings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("plain", ["geo"], indirect=True),
]
ADDRESS = "http://127.0.0.1:8000"


class GeoServer:
    """What clients of the geospatial plugin do with the server.

    Attributes:
        url: where it answers.
        model: the folder of its model.
    """

    def __init__(self, plain: PlainServer) -> None:
        self._plain = plain
        self.url, self.model = plain.url, Path(plain.model)

    def ask(self, content: bytes, **fields: object) -> httpx.Response:
        """What vLLM's example client sends, but for the raster itself in place of its address."""
        data = {"data": base64.b64encode(content).decode(), "data_format": "b64_json"}
        data |= {"image_format": "tiff", "out_data_format": "b64_json"}
        body = {"data": data | fields, "priority": 0, "softmax": False}
        return httpx.post(f"{self.url}/pooling", json=body, timeout=120)

    def hang_up(self, content: bytes) -> bool:
        """Ask, and go before the answer; whether it was so."""
        body = {"data": {"data": base64.b64encode(content).decode(), "data_format": "b64_json"}}
        try:
            httpx.post(f"{self.url}/pooling", json=body, timeout=httpx.Timeout(60, read=0.3))
        except httpx.ReadTimeout:
            return True
        return False

    def scenes(self) -> list[str]:
        """The files and processes of scenes under way."""
        servers = [
            process
            for process in psutil.Process(self._plain.process.pid).children()
            if "baton_geo.raster.fork_server" in process.cmdline()
        ]
        children = [str(child.pid) for server in servers for child in server.children()]
        return children + self._plain.spooled()


@pytest.fixture
def server(plain: PlainServer) -> GeoServer:
    return GeoServer(plain)


@pytest.fixture
def rgb(server: GeoServer) -> Path:
    return server.model


def noise(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (3, height, width)).astype(np.uint8)


def mask_of(answer: httpx.Response) -> tuple[NDArray[Any], dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    (mask,), profile = opened(base64.b64decode(answer.json()["data"]["data"]))
    return mask, profile


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def test_the_example_client_gets_its_mask(server: GeoServer, raster_host: RasterHost, rgb: Path) -> None:
    """vLLM's published request, an address and all; the answer is what plain torch says, on every pixel."""
    pixels = noise(300, 250, 1)
    pixels[:, 100:150, :60] = 0
    content = geotiff(pixels, RGB, nodata=0)
    raster_host.files["/scene.tif"] = content
    body = {
        "data": {
            "data": f"{raster_host.url}/scene.tif",
            "data_format": "url",
            "image_format": "tiff",
            "out_data_format": "b64_json",
        },
        "priority": 0,
        "model": str(rgb),
        "softmax": False,
    }
    answer = httpx.post(f"{server.url}/pooling", json=body, timeout=120)
    mask, profile = mask_of(answer)
    assert as_torch_says(mask, rgb, content)
    assert set(np.unique(mask)) == {0, 1, 2, 255}
    assert (profile["crs"].to_epsg(), profile["nodata"]) == (32633, 255)
    assert answer.json().keys() == {"request_id", "created_at", "data"}
    assert answer.json()["data"]["request_id"] == answer.json()["request_id"]


def test_concurrent_requests_each_get_their_own_answer(server: GeoServer, rgb: Path) -> None:
    """Scenes of different sizes and places, one smaller than a tile, all at once."""
    sizes = [(40, 50), (64, 64), (130, 70), (90, 200), (256, 256), (310, 100)]
    asked = [
        geotiff(noise(height, width, 10 + n), RGB, crs=f"EPSG:{32601 + n}", origin=(400_000.0 + n, 1e6))
        for n, (height, width) in enumerate(sizes)
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        futures = [pool.submit(server.ask, content) for content in asked]
        seen: set[str] = set()
        while not all(future.done() for future in futures):
            seen.update(server.scenes())
        answers = [future.result() for future in futures]
    assert len(seen) >= len(asked)  # they were there to be seen
    for content, answer in zip(asked, answers, strict=True):
        mask, profile = mask_of(answer)
        _, given = opened(content)
        assert as_torch_says(mask, rgb, content)
        assert (profile["crs"], profile["transform"]) == (given["crs"], given["transform"])
    assert server.scenes() == []


def test_more_scenes_than_decoders_are_all_answered(server: GeoServer, rgb: Path) -> None:
    """None waits for a place that only the others' end would free: vLLM would never come to end them."""
    asked = [geotiff(noise(400, 400, 30 + n), RGB) for n in range(GeoSettings().decoders + 4)]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(server.ask, asked))
    for content, answer in zip(asked, answers, strict=True):
        assert as_torch_says(mask_of(answer)[0], rgb, content)
    assert server.scenes() == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": "!!"}, "not base64"),
        ({"data": "AAAA"}, "this is no known raster format"),
        (
            {"data_format": "url", "data": "https://example.com/x.tif"},
            "host 'example.com' is not one this server fetches from",
        ),
        ({"data_format": "path", "data": "/etc/passwd"}, "not under a folder this server reads from"),
        ({"indices": [0, 1, 9]}, "band 10, which indices asks for as 'BLUE', is missing"),
        ({"out_path": "/tmp"}, "this server writes no files for clients"),
        ({"image_fromat": "tiff"}, "did you mean 'image_format'"),
        ({"out_data_format": "path"}, "ask for b64_json"),
    ],
)
def test_a_bad_request_is_a_400_with_our_reason(
    server: GeoServer, fields: dict[str, object], said: str
) -> None:
    """vLLM answers any ValueError so."""
    assert re.search(said, refusal(server.ask(geotiff(noise(30, 30, 2), RGB), **fields)))
    assert server.scenes() == []


def test_an_unusable_scene_is_a_400_with_our_reason(server: GeoServer) -> None:
    """A missing band; nothing but nodata; more tiles than are held at once here."""
    one = geotiff(noise(30, 30, 3)[:1], ("RED",))
    assert "band 2 'GREEN' is missing; the file has 1 band: 1 'RED'" in refusal(server.ask(one))
    for side in (100, 900):
        empty = geotiff(np.full((3, side, side), 7, np.uint8), RGB, nodata=7)
        assert "every pixel is nodata" in refusal(server.ask(empty))
    large = geotiff(noise(1000, 1000, 4), RGB)
    assert "324 tiles; this server computes them all at once, and at most 256" in refusal(server.ask(large))
    assert server.scenes() == []


def test_the_clients_shown_run(server: GeoServer, rgb: Path, tmp_path: Path) -> None:
    """curl and Python, as the README has them, each leave the mask in a file."""
    content = geotiff(noise(100, 90, 5), RGB)
    (tmp_path / "scene.tif").write_bytes(content)
    (curl,) = [block for block in blocks("bash") if "request.json" in block]
    (python,) = [block for block in blocks("python") if "httpx" in block]
    for command in (["bash", "-ec", curl], [sys.executable, "-c", python]):
        command[-1] = command[-1].replace(ADDRESS, server.url)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (mask,), _ = opened((tmp_path / "mask.tif").read_bytes())
        assert as_torch_says(mask, rgb, content)
        (tmp_path / "mask.tif").unlink()
    assert "kind 0" in done.stdout


def test_clients_that_hang_up_take_no_place(server: GeoServer, rgb: Path) -> None:
    """vLLM does not tell the plugin; others are answered all the same, and files go with the server."""
    large = geotiff(noise(800, 800, 50), RGB)
    with ThreadPoolExecutor(GeoSettings().decoders + 2) as pool:
        hung_up = list(pool.map(server.hang_up, [large] * (GeoSettings().decoders + 2)))
    assert sum(hung_up) > GeoSettings().decoders
    assert server.scenes() != []
    content = geotiff(noise(70, 80, 51), RGB)
    began = time.monotonic()
    assert as_torch_says(mask_of(server.ask(content))[0], rgb, content)
    assert time.monotonic() - began < GeoSettings().decoder_wait_s / 2
