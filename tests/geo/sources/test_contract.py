"""The request and the answer, as the published clients send and read them."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from datetime import date
from typing import Any

import pytest

from baton_geo.contract import ClassArea, GeoAnswer, GeoFile, GeoRequest, geo_options, geo_request, quoted
from baton_geo.errors import RequestInvalid

SCENE = "https://rasters.example.org/valencia_example_2024-10-26.tiff"
URL = {"data": SCENE, "data_format": "url"}
B64 = {"data": "AAAA", "data_format": "b64_json"}


def test_vllms_example_client_is_understood() -> None:
    """What vLLM's published online and offline examples send must be taken as it is."""
    request = geo_request(
        {"data": SCENE, "data_format": "url", "image_format": "tiff", "out_data_format": "b64_json"}
    )
    assert request == GeoRequest(
        data=SCENE, data_format="url", image_format="tiff", out_data_format="b64_json"
    )
    assert (request.outputs, request.indices) == (("mask",), None)


@pytest.mark.parametrize("image_format", ["", "geoTiff", "tiff"])
@pytest.mark.parametrize("indices", [None, [1, 2, 3, 8, 11, 12]])
def test_terratorchs_requests_are_understood(image_format: str, indices: list[int] | None) -> None:
    """What TerraTorch's published tests and guide send must be taken, `indices` null included."""
    request = geo_request(
        URL | {"out_data_format": "b64_json", "image_format": image_format, "indices": indices}
    )
    assert request.indices == (None if indices is None else (1, 2, 3, 8, 11, 12))


@pytest.mark.parametrize("data_format", ["b64_json", "url", "path"])
def test_every_published_data_format_of_json_is_taken(data_format: str) -> None:
    """Each published way to name a raster must be understood; whether it is allowed is not the contract's."""
    assert geo_request({"data": "AAAA", "data_format": data_format}).data_format == data_format


def test_bytes_come_from_python_only() -> None:
    """Python callers may pass bytes; a text that claims to be bytes must be refused with what to do."""
    assert geo_request({"data": b"II*\0", "data_format": "bytes"}).data == b"II*\0"
    with pytest.raises(RequestInvalid, match=r"data\.data: JSON has no bytes"):
        geo_request({"data": "II*", "data_format": "bytes"})
    with pytest.raises(RequestInvalid, match=r"data\.data: bytes, but data_format is url"):
        geo_request({"data": b"II*\0", "data_format": "url"})


@pytest.mark.fault("F6")
@pytest.mark.parametrize("wanted", ["path", "url"])
def test_outputs_on_the_servers_disk_are_refused(wanted: str) -> None:
    """The published `path` and `url` answers write files for a client; both must be refused by name."""
    with pytest.raises(RequestInvalid, match="writes no files") as caught:
        geo_request(B64 | {"out_data_format": wanted})
    assert caught.value.param == "data.out_data_format"
    with pytest.raises(RequestInvalid, match="writes no files"):
        geo_request(B64 | {"out_path": "/etc"})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("indexes", "did you mean 'indices'?"),
        ("dataformat", "did you mean 'data_format'?"),
        ("output", "did you mean 'outputs'?"),
        ("zzz", "known fields: image_format"),
        ("x" * 5000, "known fields: "),
    ],
)
def test_unknown_fields_are_refused_with_the_nearest_name(key: str, hint: str) -> None:
    """A field nobody reads must not be taken in silence, nor be echoed at length."""
    with pytest.raises(RequestInvalid) as caught:
        geo_request(B64 | {key: 1})
    assert hint in caught.value.message
    assert len(caught.value.message) < 300


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"data": "AAAA"}, "data.data_format"),
    ({"data_format": "url"}, "data.data"),
    (B64 | {"data_format": "ftp"}, "data.data_format"),
    (B64 | {"data": 7}, "data.data"),
    (B64 | {"data": None}, "data.data"),
    (B64 | {"indices": []}, "data.indices"),
    (B64 | {"indices": [True]}, "data.indices"),
    (B64 | {"indices": [-1]}, "data.indices"),
    (B64 | {"indices": [1.0]}, "data.indices"),
    (B64 | {"indices": ["1"]}, "data.indices"),
    (B64 | {"indices": [0] * 257}, "data.indices"),
    (B64 | {"indices": [10**30]}, "data.indices"),
    (B64 | {"outputs": []}, "data.outputs"),
    (B64 | {"outputs": "mask"}, "data.outputs"),
    (B64 | {"outputs": ["mask", "mask"]}, "data.outputs"),
    (B64 | {"outputs": ["masks"]}, "data.outputs"),
    (B64 | {"dates": ["2024-10-32"]}, "data.dates"),
    (B64 | {"dates": ["20241026"]}, "data.dates"),
    (B64 | {"dates": ["2024-W43-6"]}, "data.dates"),
    (B64 | {"dates": ["2024-10-26T00:00"]}, "data.dates"),
    (B64 | {"dates": [1729900800]}, "data.dates"),
    (B64 | {"location": {"latitude": 91, "longitude": 0}}, "data.location"),
    (B64 | {"location": {"latitude": float("nan"), "longitude": 0}}, "data.location"),
    (B64 | {"location": [1, 2]}, "data.location"),
    (B64 | {"scale": 0}, "data.scale"),
    (B64 | {"scale": -0.0001}, "data.scale"),
    (B64 | {"scale": float("nan")}, "data.scale"),
    (B64 | {"scale": float("inf")}, "data.scale"),
    (B64 | {"scale": 1e-10}, "data.scale"),
    (B64 | {"scale": "0.0001"}, "data.scale"),
    (B64 | {"scale": True}, "data.scale"),
    (B64 | {"scale": []}, "data.scale"),
    (B64 | {"scale": [0.0001, "0.0001"]}, "data.scale.1"),
    (B64 | {"scale": [0.0001, 0]}, "data.scale"),
    (B64 | {"offset": {"B02": -1000}}, "data.offset"),
    (B64 | {"offset": float("-inf")}, "data.offset"),
    (B64 | {"offset": 10**400}, "data.offset"),
    (B64 | {"offset": 1e10}, "data.offset"),
    (B64 | {"offset": "-1000"}, "data.offset"),
    (B64 | {"image_format": "t" * 65}, "data.image_format"),
    (URL | {"data": "https://h/" + "a" * 2048}, "data.data"),
    ({"data": "/" + "a" * 4096, "data_format": "path"}, "data.data"),
]


@pytest.mark.parametrize(("data", "param"), WRONG)
def test_wrong_values_name_their_field(data: dict[str, Any], param: str) -> None:
    """Each wrong value must be refused, naming the field at fault, without repeating what was sent."""
    with pytest.raises(RequestInvalid) as caught:
        geo_request(data)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert caught.value.message.startswith(caught.value.param)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("data", [None, 5, [1], SCENE])
def test_data_that_is_no_object_is_refused(data: object) -> None:
    """`data` must be an object; vLLM before 0.16 took the fields one level higher, so a text says so."""
    with pytest.raises(RequestInvalid) as caught:
        geo_request(data)
    assert caught.value.param == "data"
    assert ("is a text" in caught.value.message) == isinstance(data, str)


@pytest.mark.parametrize("field", ["indices", "outputs", "dates"])
def test_long_lists_are_refused_at_once(field: str) -> None:
    """A list of a million wrong items must not become a million complaints: as soon as one of a thousand."""

    def took(items: int) -> float:
        data = B64 | {field: ["x"] * items}
        start = time.perf_counter()
        with pytest.raises(RequestInvalid):
            geo_request(data)
        return time.perf_counter() - start

    assert min(took(1_000_000) for _ in range(3)) < 0.5 + 10 * took(1000)


def test_a_refusal_keeps_no_raster() -> None:
    """An error may outlive its request in a log; the raster must not hang on it."""
    raster = "QUJD" * 300_000
    with pytest.raises(RequestInvalid) as caught:
        geo_request({"data": raster, "data_format": "b64"})
    assert caught.value.__context__ is None
    assert len(str(caught.value)) < 300
    assert raster[:100] not in repr(geo_request({"data": raster, "data_format": "b64_json"}))


def test_our_own_fields() -> None:
    """Outputs, dates and a location must arrive typed and in order."""
    request = geo_request(
        B64
        | {
            "outputs": ["preview", "mask"],
            "dates": ["2024-10-26", "2024-10-31"],
            "location": {"latitude": 39.4, "longitude": -0.4},
        }
    )
    assert request.outputs == ("preview", "mask")
    assert request.dates == (date(2024, 10, 26), date(2024, 10, 31))
    assert request.location is not None
    assert (request.location.latitude, request.location.longitude) == (39.4, -0.4)


def test_an_upload_takes_the_same_options() -> None:
    """An upload's options must be the request's without the raster, and checked alike."""
    assert geo_options({"outputs": ["preview"], "indices": [3]}).indices == (3,)
    with pytest.raises(RequestInvalid, match=r"did you mean 'indices'"):
        geo_options({"indice": [3]})


def test_the_published_clients_can_read_the_answer() -> None:
    """vLLM's client decodes `data`; vLLM's tests read type and format, TerraTorch's clients data_format."""
    answer = GeoAnswer(
        data=base64.b64encode(b"II*\0").decode(),
        request_id="pool-1",
        crs="EPSG:32630",
        transform=(10.0, 0.0, 7e5, 0.0, -10.0, 4.3e6),
        width=2,
        height=2,
        classes=(ClassArea(value=1, name="water", pixels=4, share=1.0, hectares=0.04),),
        nodata_pixels=0,
        files=(GeoFile(name="preview.png", media_type="image/png", data="AAAA"),),
    )
    response = json.loads(json.dumps({"data": answer.model_dump(mode="json")}))
    assert base64.b64decode(response["data"]["data"]) == b"II*\0"
    assert all(response["data"].get(field) for field in ("type", "format", "data", "request_id"))
    assert response["data"]["data_format"] == "b64_json"
    assert base64.b64decode(answer.data) == b"II*\0"


def test_texts_in_messages_are_short_and_plain() -> None:
    """A client's text in a message must be one line of ASCII, cut to length."""
    assert quoted("a\n\u202eb") == r"'a\n\u202eb'"
    assert len(quoted("\U0010ffff" * 10_000)) < 1300


def test_the_contract_needs_no_library_but_pydantic() -> None:
    """The gateway imports the contract; nothing heavy may come with it."""
    script = (
        "import sys, baton_geo.contract;"
        "print([m for m in ('httpx', 'numpy', 'torch', 'vllm', 'rasterio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
