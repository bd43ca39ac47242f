"""Scenes through the real engine over HTTP, on the shipped weights and on a small random model."""

from __future__ import annotations

import base64
import io
import json
import re
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from support.gateways import RealGateway
from support.geo_requests import code_of, colourful, decoders, flood_folder, send, until
from support.raster_host import RasterHost
from support.rasters import RGB, SIX, geotiff, opened, written
from support.steady_requests import asked_all_the_time
from support.torch_pipeline import HALF_TIE, as_torch_says, torch_mask

from training.flood_scenes.scenes import make_scene

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def shipped(real_gateway: RealGateway) -> Iterator[httpx.Client]:
    """A client of the gateway that serves the shipped model."""
    with real_gateway.client() as client:
        yield client


@pytest.fixture
def client(geo_gateway: RealGateway) -> Iterator[httpx.Client]:
    with geo_gateway.client() as client:
        yield client


def test_the_shipped_model_finds_the_water(shipped: httpx.Client) -> None:
    """A made-up scene it has not seen: the mask's water is the scene's."""
    scene = make_scene(9001, 512, 512)
    response = send(shipped, geotiff(scene.pixels, nodata=-9999), "flood-tiny")
    assert response.status_code == 200
    mask, _ = opened(response.content)
    known = scene.label != 255
    water, found = (scene.label == 1) & known, (mask[0] == 1) & known
    assert (water & found).sum() / (water | found).sum() > 0.93


def test_the_mask_is_a_plain_torch_pipelines(shipped: httpx.Client) -> None:
    """Decoding, tiles, engine, blending and nodata, against the same in a page of torch."""
    scene = make_scene(9002, 430, 610)
    content = geotiff(scene.pixels, nodata=-9999, compress="deflate")
    mask, profile = opened(send(shipped, content, "flood-tiny").content)
    assert as_torch_says(mask[0], flood_folder(), content)
    assert (mask[0] != torch_mask(flood_folder(), content)).mean() < 1e-4
    assert (profile["crs"].to_epsg(), profile["nodata"]) == (32633, 255)
    assert (profile["transform"].a, profile["transform"].c, profile["transform"].f) == (
        10,
        500_000,
        5_000_000,
    )


def test_sixteen_scenes_at_once_each_get_their_own_answer(client: httpx.Client, geo_folder: Path) -> None:
    """Different sizes, types and reference systems; the published plugin mixes such requests up."""
    asked = [
        geotiff(
            colourful(60 + 37 * n, 210 - 9 * n, n).astype(("uint8", "float32", "int16", "uint16")[n % 4]),
            RGB,
            crs=f"EPSG:{32601 + n}",
            origin=(300_000.0 + n, 1_000_000.0 * (n % 9 + 1)),
        )
        for n in range(16)
    ]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda content: send(client, content), asked))
    for content, answer in zip(asked, answers, strict=True):
        assert answer.status_code == 200, answer.text
        mask, profile = opened(answer.content)
        _, wanted = opened(content)
        for key in ("crs", "transform", "width", "height"):
            assert profile[key] == wanted[key]
        assert as_torch_says(mask[0], geo_folder / "rgb", content, HALF_TIE)
        assert len(np.unique(mask)) > 1


def test_the_published_client_works_unmodified(client: httpx.Client, raster_host: RasterHost) -> None:
    """The request of vLLM's example, word for word but for the address, and what it reads of the answer."""
    content = geotiff(colourful(100, 120), RGB)
    raster_host.files["/valencia_example.tif"] = content
    payload = {
        "data": {
            "data": f"{raster_host.url}/valencia_example.tif",
            "data_format": "url",
            "image_format": "tiff",
            "out_data_format": "b64_json",
        },
        "priority": 0,
        "model": "rgb",
        "softmax": False,
    }
    answer = client.post("/pooling", json=payload).json()
    mask, profile = opened(base64.b64decode(answer["data"]["data"]))
    assert (mask.shape, profile["dtype"]) == ((1, 100, 120), "uint8")


def test_json_tells_what_is_where_and_how_much(client: httpx.Client, geo_folder: Path) -> None:
    """Hectares of every class, the grid, and further files beside the first."""
    content = geotiff(colourful(90, 110), RGB, size=20.0)
    path = written(geo_folder / "rasters", "scene.tif", content)
    data = {"data": str(path), "data_format": "path", "outputs": ["mask", "probabilities", "preview"]}
    answer = client.post("/pooling", json={"model": "rgb", "data": data}).json()["data"]
    mask, _ = opened(base64.b64decode(answer["data"]))
    assert [area["pixels"] for area in answer["classes"]] == [int((mask == n).sum()) for n in range(3)]
    assert sum(area["hectares"] for area in answer["classes"]) == pytest.approx(90 * 110 * 400 / 10_000)
    assert (answer["crs"], answer["width"], answer["height"]) == ("EPSG:32633", 110, 90)
    files = {file["name"]: base64.b64decode(file["data"]) for file in answer["files"]}
    chances, _ = opened(files["probabilities.tif"])
    of_the_mask = np.take_along_axis(chances, mask.astype(np.int64), axis=0)[0].astype(int)
    assert (of_the_mask >= chances.max(axis=0).astype(int) - 1).all()  # a byte of probability rounds ties
    assert Image.open(io.BytesIO(files["preview.png"])).format == "PNG"


@pytest.mark.parametrize(
    ("accept", "kind"), [("image/png", "image/png"), ("application/zip", "application/zip")]
)
def test_a_scene_comes_back_as_what_accept_names(client: httpx.Client, accept: str, kind: str) -> None:
    """A picture, or mask and picture in an archive."""
    response = send(client, geotiff(colourful(80, 80), RGB), accept=accept)
    assert response.headers["content-type"] == kind
    if kind == "image/png":
        assert Image.open(io.BytesIO(response.content)).size[0] >= 80
    else:
        with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
            assert sorted(archive.namelist()) == ["mask.tif", "preview.png"]


def test_a_photo_is_taken_by_a_model_of_three_bands(client: httpx.Client, geo_folder: Path) -> None:
    """PNG as GeoTIFF without a place on earth: said so, and areas in pixels only."""
    pixels = colourful(70, 90)
    packed = io.BytesIO()
    Image.fromarray(np.moveaxis(pixels, 0, 2)).save(packed, "PNG")
    answer = send(client, packed.getvalue(), accept="application/json").json()["data"]
    assert answer["crs"] is None
    assert answer["notes"]
    assert all(area["hectares"] is None for area in answer["classes"])
    mask, _ = opened(base64.b64decode(answer["data"]))
    assert as_torch_says(mask[0], geo_folder / "rgb", geotiff(pixels, RGB), HALF_TIE)


@pytest.mark.fault("F4")
def test_orientation_in_a_photo_is_applied(client: httpx.Client) -> None:
    """What the model sees is what a person sees."""
    pixels = np.moveaxis(colourful(64, 128), 0, 2)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    packed = io.BytesIO()
    Image.fromarray(pixels).save(packed, "JPEG", exif=exif, quality=95)
    answer = send(client, packed.getvalue(), accept="application/json").json()["data"]
    assert (answer["width"], answer["height"]) == (64, 128)


BAD: dict[str, tuple[bytes, int, str, str]] = {
    "text": (b"hello, this is no raster", 415, "raster_unsupported", "GeoTIFF"),
    "vrt": (b"<VRTDataset rasterXSize='1' rasterYSize='1'></VRTDataset>", 415, "raster_unsupported", "VRT"),
    "pdf": (b"%PDF-1.7 ....................", 415, "raster_unsupported", "PDF"),
    "truncated": (geotiff(colourful(80, 80), RGB)[:900], 400, "raster_broken", "truncated"),
    "one band": (geotiff(colourful(80, 80)[:1], ("GREEN",)), 422, "raster_unusable", "missing"),
    "complex": (geotiff(np.ones((3, 70, 70), np.complex64), RGB), 422, "raster_unusable", "complex"),
    "all nodata": (geotiff(np.zeros((3, 70, 70), np.uint8), RGB, nodata=0), 422, "raster_unusable", "nodata"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.fault("F3")
def test_bad_rasters_are_refused_with_a_reason_at_once(
    client: httpx.Client, geo_gateway: RealGateway, kind: str
) -> None:
    """A stable code, words a GIS person knows, and nothing of the server's insides (row F7)."""
    content, status, code, words = BAD[kind]
    began = time.monotonic()
    response = send(client, content)
    assert time.monotonic() - began < 10
    assert code_of(response) == (status, code)
    assert words.lower() in response.json()["error"]["message"].lower()
    assert until(lambda: not decoders(geo_gateway))
    assert send(client, geotiff(colourful(64, 64), RGB)).status_code == 200


REFUSED_SOURCES: dict[str, dict[str, str]] = {
    "file url": {"data": "file:///etc/passwd", "data_format": "url"},
    "gopher": {"data": "gopher://127.0.0.1:{port}/1", "data_format": "url"},
    "metadata": {"data": "http://169.254.169.254/latest/meta-data", "data_format": "url"},
    "user info": {"data": "http://127.0.0.1:{port}@example.org/x", "data_format": "url"},
    "backslash": {"data": "http://a\\@127.0.0.1:{port}/x", "data_format": "url"},
    "other port": {"data": "http://127.0.0.1:1/x", "data_format": "url"},
    "decimal": {"data": "http://2130706433:{port}/x", "data_format": "url"},
    "vsicurl": {"data": "/vsicurl/http://127.0.0.1:{port}/x.tif", "data_format": "path"},
    "passwd": {"data": "/etc/passwd", "data_format": "path"},
    "dots": {"data": "{folder}/rasters/../baton.toml", "data_format": "path"},
    "gdal name": {"data": "GTIFF_DIR:1:{folder}/rasters/scene.tif", "data_format": "path"},
    "write path": {"data": "AAAA", "data_format": "b64_json", "out_data_format": "path"},
    "write url": {"data": "AAAA", "data_format": "b64_json", "out_data_format": "url"},
}


@pytest.mark.parametrize("kind", REFUSED_SOURCES)
@pytest.mark.fault("F6")
def test_urls_and_paths_that_are_not_allowed_are_not_opened(
    client: httpx.Client, raster_host: RasterHost, geo_folder: Path, kind: str
) -> None:
    """400, and the host that counts connections counts none."""
    data = {
        key: value.format(port=raster_host.port, folder=geo_folder)
        for key, value in REFUSED_SOURCES[kind].items()
    }
    before = raster_host.connects
    response = client.post("/pooling", json={"model": "rgb", "data": data})
    assert response.status_code == 400
    assert response.json()["error"]["code"] in ("source_refused", "invalid_request")
    assert raster_host.connects == before


@pytest.mark.fault("F6")
def test_a_redirect_out_of_the_allowed_hosts_is_not_followed(
    client: httpx.Client, raster_host: RasterHost
) -> None:
    """The first connection is allowed; the second is not made."""
    raster_host.files["/away"] = "http://169.254.169.254/latest"
    before = raster_host.connects
    data = {"data": f"{raster_host.url}/away", "data_format": "url"}
    response = client.post("/pooling", json={"model": "rgb", "data": data})
    assert code_of(response) == (400, "source_refused")
    assert raster_host.connects == before + 1


def test_the_shipped_model_takes_neither_addresses_nor_paths(shipped: httpx.Client, geo_folder: Path) -> None:
    """Nobody allowed them there."""
    for data in (
        {"data": "https://example.org/x.tif", "data_format": "url"},
        {"data": str(geo_folder / "rasters"), "data_format": "path"},
    ):
        assert code_of(shipped.post("/pooling", json={"model": "flood-tiny", "data": data})) == (
            400,
            "source_refused",
        )


def test_a_client_that_leaves_in_the_midst_leaves_nothing(geo_gateway: RealGateway, geo_folder: Path) -> None:
    """Its decoder ends, its files go, and the engine has nothing of it under way."""
    content = geotiff(np.tile(colourful(512, 512), (1, 3, 3)), RGB)
    with geo_gateway.client(timeout=1.0) as client, pytest.raises(httpx.ReadTimeout):
        send(client, content)
    assert until(lambda: not decoders(geo_gateway))
    assert until(lambda: not list((geo_folder / "spool").glob("baton-geo-*")))
    with geo_gateway.client() as client:
        page = client.get("/metrics").text
        assert 'baton_pooling_requests_running{engine="rgb"} 0.0' in page
        assert until(
            lambda: (
                'vllm:num_requests_running{engine="0",model_name="rgb"} 0.0' in client.get("/metrics").text
            )
        )
        assert send(client, geotiff(colourful(64, 64), RGB)).status_code == 200


@pytest.mark.fault("E11")
def test_fifty_megabytes_of_base64_delay_no_other_request(geo_gateway: RealGateway) -> None:
    """`/livez` goes on answering while it is decoded; and then the scene is answered."""
    pixels = np.tile(colourful(512, 512), (1, 8, 8))  # 50 MB, of which the engine is spared most by a refusal
    content = geotiff(pixels, ("RED", "GREEN", "OTHER"))
    body = {"model": "rgb", "data": {"data": base64.b64encode(content).decode(), "data_format": "b64_json"}}
    sent = json.dumps(body).encode()  # not meanwhile: who asks is in this process
    with geo_gateway.client() as client, asked_all_the_time(geo_gateway, "E11, 50 MB of base64, three times"):
        headers = {"Content-Type": "application/json"}
        responses = [client.post("/pooling", content=sent, headers=headers) for _ in range(3)]
    assert [code_of(response) for response in responses] == [(422, "raster_unusable")] * 3


def test_a_classic_plugin_runs_on_a_real_engine(client: httpx.Client) -> None:
    """Written for vLLM 0.11, importing what moved since: one vector a text."""
    body = {"model": "classic", "data": {"text": ["the sea", "a river", "rain"]}}
    answer = client.post("/pooling", json=body).json()
    assert answer["data"]["lengths"] == [64, 64, 64]
    assert answer["data"]["norms"] == pytest.approx([1.0, 1.0, 1.0], abs=0.02)


@pytest.mark.parametrize("step", ["parse", "pre", "post"])
@pytest.mark.fault("F5")
def test_a_classic_plugin_that_raises_fails_only_its_own_request(client: httpx.Client, step: str) -> None:
    """On the real engine too."""
    body = {"model": "classic", "data": {"text": ["x"], "raise_in": step}}
    assert code_of(client.post("/pooling", json=body)) == (500, "plugin_failed")
    assert client.post("/pooling", json={"model": "classic", "data": {"text": ["x"]}}).status_code == 200


def test_input_to_a_plugin_model_is_a_400(client: httpx.Client) -> None:
    """Plain vLLM answers an empty 500."""
    response = client.post("/pooling", json={"model": "rgb", "input": "where is the water?"})
    assert code_of(response) == (400, "invalid_request")


def test_the_plugins_are_listed_with_who_runs_them(client: httpx.Client) -> None:
    """The shipped one, and the test's."""
    rows = {(row["group"], row["name"]): row for row in client.get("/v1/plugins").json()["data"]}
    assert rows["vllm.io_processor_plugins", "baton_geo"]["engines"] == ["rgb"]
    assert rows["vllm.io_processor_plugins", "classic_echo"]["distribution"] == "classic-echo"
    assert rows["vllm.general_plugins", "baton_geo"]["loaded"] is True


def test_the_fleet_runs_on_the_platform_that_is_installed(client: httpx.Client) -> None:
    """Discovered and chosen by vLLM, listed here, and what it sets is what the engines have: blocks of 64, not 128."""
    rows = {(row["group"], row["name"]): row for row in client.get("/v1/plugins").json()["data"]}
    row = rows["vllm.platform_plugins", "house_platform"]
    assert (row["loaded"], row["reason"], row["distribution"]) == (True, None, "house-platform")
    page = client.get("/metrics").text
    assert set(re.findall(r'^vllm:cache_config_info\{.*block_size="(\d+)"', page, re.MULTILINE)) == {"64"}


def test_nothing_of_all_this_left_a_traceback_in_the_log(geo_gateway: RealGateway) -> None:
    """The last test of this file: what went wrong was told in one line each."""
    assert "Traceback" not in geo_gateway.log


def test_files_one_a_band_are_mapped_as_a_job(shipped: httpx.Client) -> None:
    """A part of them, on the shipped weights: the mask is torch's of the cut-out file, the polygons add up to it."""
    scene = make_scene(9003, 300, 320)
    assets = {
        name: {
            "data": base64.b64encode(geotiff(scene.pixels[n : n + 1], (name,), nodata=-9999)).decode(),
            "data_format": "b64_json",
        }
        for n, name in enumerate(SIX)
    }
    data = {"assets": assets, "window": [20, 30, 250, 240]}
    begun = shipped.post("/v1/scenes", json={"model": "flood-tiny", "data": data})
    where = begun.headers["location"]
    assert until(lambda: shipped.get(where).json()["state"] in ("done", "failed"))
    assert shipped.get(where).json()["error"] is None
    mask, profile = opened(shipped.get(f"{where}/mask.tif").content)
    cut = geotiff(scene.pixels[:, 30:270, 20:270], origin=(500_200.0, 4_999_700.0), nodata=-9999)
    assert as_torch_says(mask[0], flood_folder(), cut)
    assert (profile["transform"].c, profile["transform"].f) == (500_200, 4_999_700)
    polygons = shipped.get(f"{where}/mask.geojson").json()["features"]
    for value in (0, 1):
        pixels = [p["properties"]["pixels"] for p in polygons if p["properties"]["value"] == value]
        assert sum(pixels) == (mask == value).sum()
    assert shipped.delete(where).status_code == 200
