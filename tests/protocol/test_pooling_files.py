"""Files to and from IO processor plugins: uploads, and answers as the file that `Accept` names."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.plugin_gateways import served, until, upload
from support.sample_plugins import Current, Files


@pytest.mark.parametrize(
    ("accept", "kind", "content"),
    [
        (None, "image/tiff", b"sum 0.1"),
        ("*/*", "image/tiff", b"sum 0.1"),
        ("image/*", "image/tiff", b"sum 0.1"),
        ("image/png", "image/png", b"a picture"),
        ("text/html, image/png;q=0.5, image/tiff;q=0.4", "image/png", b"a picture"),
    ],
)
def test_a_file_sent_as_it_is_comes_back_as_the_file_accept_names(
    tmp_path: Path, accept: str | None, kind: str, content: bytes
) -> None:
    """And nothing of it is left on disk afterwards."""
    instance = Files(tmp_path)
    with served(instance) as gateway:
        response = upload(gateway, accept)
        assert (response.status_code, response.headers["content-type"], response.content) == (
            200,
            kind,
            content,
        )
        assert until(lambda: not list(tmp_path.iterdir()))
    assert len(instance.forgotten) == 1


def test_an_upload_may_be_answered_in_json_or_as_an_archive(tmp_path: Path) -> None:
    """JSON as of a JSON request; the archive holds every file under its name."""
    with served(Files(tmp_path)) as gateway:
        assert upload(gateway, "application/json").json()["data"]["sum"] == pytest.approx(0.1)
        packed = upload(gateway, "application/zip")
        assert packed.headers["content-type"] == "application/zip"
        with zipfile.ZipFile(io.BytesIO(packed.content)) as archive:
            assert archive.read("mask.tif") == b"sum 0.1"
            assert archive.read("preview.png") == b"a picture"
        assert until(lambda: not list(tmp_path.iterdir()))


def test_a_json_request_may_be_answered_as_a_file(tmp_path: Path) -> None:
    """`Accept` decides there too."""
    with served(Files(tmp_path)) as gateway, gateway.client() as client:
        body = {"model": "geo", "data": {"numbers": [0.03, 0.01, 0.02]}}
        assert client.post("/pooling", json=body, headers={"accept": "image/tiff"}).content == b"sum 0.06"
        refused = client.post("/pooling", json=body, headers={"accept": "text/html"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (406, "not_acceptable")
        assert "image/tiff" in refused.json()["error"]["message"]
        assert until(lambda: not list(tmp_path.iterdir()))


def test_the_plugin_sees_an_uploads_query_and_what_is_accepted(tmp_path: Path) -> None:
    """But not the parameters that are the gateway's own."""
    instance = Files(tmp_path)
    with served(instance) as gateway:
        upload(gateway, "image/png", "&priority=2&indices=0,1")
    (seen,) = instance.uploads
    assert (seen["type"], seen["query"], seen["accept"]) == ("image/tiff", {"indices": "0,1"}, ("image/png",))


def test_an_upload_is_refused_before_it_is_read_where_it_can_be(tmp_path: Path) -> None:
    """A plugin that takes JSON only, an unknown model, too large a file, an empty one."""
    with served(Current()) as gateway:
        assert upload(gateway).json()["error"]["code"] == "operation_unsupported"
    with served(Files(tmp_path), upload_bytes=2048) as gateway:
        with gateway.client() as client:
            unknown = client.post("/pooling?model=x", content=b"1", headers={"content-type": "image/tiff"})
            assert unknown.status_code == 404
        assert upload(gateway, content=b"").json()["error"]["code"] == "invalid_request"
        too_large = upload(gateway, content=b"x" * 4096)
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "body_too_large")

        def drip() -> Iterator[bytes]:
            yield from [b"x" * 512] * 16

        assert upload(gateway, content=drip()).status_code == 413
        assert upload(gateway).status_code == 200


def test_an_upload_above_the_json_limit_is_taken_and_does_not_stay_in_memory(tmp_path: Path) -> None:
    """The limit of JSON bodies is not that of files."""
    instance = Files(tmp_path)
    with served(instance) as gateway:
        size = 40 * 1024 * 1024
        assert upload(gateway, content=b"\1\2\3\4" + bytes(size)).content == b"sum 0.1"
        assert instance.uploads[0]["size"] == size + 4


def test_an_upload_that_breaks_off_reaches_no_plugin(tmp_path: Path) -> None:
    """A client that goes away in the midst leaves nothing."""
    instance = Files(tmp_path)
    with served(instance) as gateway:
        gone = threading.Event()

        def broken() -> Iterator[bytes]:
            yield b"x" * 65536
            gone.set()
            raise RuntimeError("the cable is out")

        with pytest.raises(RuntimeError, match="cable"):
            upload(gateway, content=broken())
        assert gone.is_set()
        assert upload(gateway).status_code == 200
        assert len(instance.uploads) == 1


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "image/x-tiff", None])
def test_a_file_of_an_unknown_type_is_told_the_known_ones(tmp_path: Path, kind: str | None) -> None:
    """A form, another name for TIFF, or no type at all: 415 that names `image/tiff`, not JSON alone."""
    headers = {} if kind is None else {"content-type": kind}
    with served(Files(tmp_path)) as gateway, gateway.client() as client:
        refused = client.post("/pooling", content=b"II*", headers=headers)
        assert refused.status_code == 415
        assert "'Content-Type: image/tiff'" in refused.json()["error"]["message"]
