"""Rasters named by path: only regular files under the operator's folders are read."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from geo.sources.hosts import RASTER, settings
from geo.sources.reading import b64, read, refused

from baton_geo import sources
from baton_geo.contract import GeoRequest
from baton_geo.errors import (
    GeoError,
    RasterTooLarge,
    SourceFailed,
    SourceRefused,
)
from baton_geo.sources import Sources
from baton_geo.spool import Spool


def path(name: object) -> GeoRequest:
    return GeoRequest(data=str(name), data_format="path")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "scenes"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.tif").write_bytes(RASTER)
    (folder / "deep" / "b.tif").write_bytes(RASTER * 300)
    (tmp_path / "secret.tif").write_bytes(b"secret")
    (tmp_path / "scenes-2").mkdir()
    (tmp_path / "scenes-2" / "c.tif").write_bytes(b"secret")
    return folder


def test_files_under_a_root_are_read(spool_folder: Path, root: Path, tmp_path: Path) -> None:
    """A file in an allowed folder, or below, must be taken, also through links that stay inside."""
    (root / "link.tif").symlink_to("deep/b.tif")
    (root / "folder").symlink_to("deep")
    (tmp_path / "alias").symlink_to(root)
    roots = {"allowed_roots": [tmp_path / "elsewhere", tmp_path / "alias"]}
    assert read(spool_folder, path(root / "a.tif"), **roots) == RASTER
    for name in ("deep/b.tif", "deep/../deep/./b.tif", "link.tif", "folder/b.tif"):
        assert read(spool_folder, path(root / name), **roots) == RASTER * 300
    assert (root / "a.tif").exists()


@pytest.mark.fault("F6")
def test_without_allowed_roots_every_path_is_refused(spool_folder: Path, root: Path) -> None:
    """Where the operator lists no folder, every path must be refused, and what to send instead be said."""
    error = refused(spool_folder, path(root / "a.tif"), SourceRefused)
    assert "takes no paths" in error.message
    assert error.status == 400


@pytest.mark.fault("F6")
def test_paths_outside_are_refused(spool_folder: Path, root: Path, tmp_path: Path) -> None:
    """No spelling and no link may lead outside; whether the file exists must not show."""
    (root / "out.tif").symlink_to("../secret.tif")
    (root / "absolute.tif").symlink_to("/etc/passwd")
    (root / "up").symlink_to("..")
    (root / "chain.tif").symlink_to("up/secret.tif")
    said = set()
    for name in [
        "/etc/passwd",
        "/etc/no-such-file",
        "/proc/self/environ",
        tmp_path / "secret.tif",
        tmp_path / "missing.tif",
        tmp_path / "scenes-2" / "c.tif",
        root,
        f"{root}/../secret.tif",
        f"{root}/deep/../../secret.tif",
        root / "out.tif",
        root / "absolute.tif",
        root / "up" / "secret.tif",
        root / "chain.tif",
        "/vsicurl/http://127.0.0.1/a.tif",
        "/vsizip//etc/x.zip",
        "//etc/passwd",
        "/" + "a/" * 2000,
    ]:
        error = refused(spool_folder, path(name), SourceRefused, allowed_roots=[root])
        said.add(error.message.split("'")[-1])
        assert len(error.message) < 300
    assert len(said) <= 2  # one ending, and that of a name cut short


@pytest.mark.fault("F6")
@pytest.mark.parametrize(
    "name",
    [
        "a.tif",
        "./a.tif",
        "../secret.tif",
        "file:///etc/passwd",
        "GTIFF_DIR:1:/etc/passwd",
        "",
        "/a\0.tif",
        "\ud800",
    ],
)
def test_paths_that_are_not_absolute_are_refused(spool_folder: Path, root: Path, name: str) -> None:
    """A relative path, an address and GDAL's own names must be refused as what they are."""
    error = refused(spool_folder, path(name), SourceRefused, allowed_roots=[root])
    assert "not an absolute path" in error.message


@pytest.mark.fault("F6")
def test_what_is_not_a_regular_file_is_refused(spool_folder: Path, root: Path) -> None:
    """A FIFO, a socket, a folder and a device must be refused at once: nothing may wait for a writer."""
    os.mkfifo(root / "fifo.tif")
    server = socket.socket(socket.AF_UNIX)
    with server:
        server.bind(str(root / "s"))
        start = time.perf_counter()
        for name in ("fifo.tif", "deep"):
            error = refused(spool_folder, path(root / name), SourceRefused, allowed_roots=[root])
            assert "not a regular file" in error.message
        refused(spool_folder, path(root / "s"), SourceFailed, allowed_roots=[root])
        refused(spool_folder, path("/dev/zero"), SourceRefused, allowed_roots=["/dev"])
        assert time.perf_counter() - start < 15


def test_missing_and_locked_files_under_a_root(spool_folder: Path, root: Path) -> None:
    """Inside an allowed folder a missing file is a 422 that says so, and so is a loop of links."""
    error = refused(spool_folder, path(root / "none.tif"), SourceFailed, allowed_roots=[root])
    assert "there is no file" in error.message
    assert error.status == 422
    (root / "loop.tif").symlink_to("loop.tif")
    refused(spool_folder, path(root / "loop.tif"), SourceFailed, allowed_roots=[root])
    refused(spool_folder, path(root / "a.tif" / "b"), SourceFailed, allowed_roots=[root])


@pytest.mark.fault("F6")
def test_a_folder_swapped_for_a_link_is_not_followed(
    spool_folder: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check and the opening a folder may become a link to elsewhere; it must not be followed."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.tif").write_bytes(b"secret")
    real = sources._walk

    def swap(*args: Any) -> int:
        (root / "deep").rename(root / "moved")
        (root / "deep").symlink_to(tmp_path / "other")
        try:
            return real(*args)
        finally:
            (root / "deep").unlink()
            (root / "moved").rename(root / "deep")

    monkeypatch.setattr(sources, "_walk", swap)
    refused(spool_folder, path(root / "deep" / "b.tif"), SourceFailed, allowed_roots=[root])


def test_files_over_the_cap_are_refused_unread(spool_folder: Path, root: Path) -> None:
    """A file of 100 GB, sparse or not, must be a 413 before it is copied."""
    with (root / "huge.tif").open("wb") as file:
        file.truncate(100 << 30)
    start = time.perf_counter()
    refused(spool_folder, path(root / "huge.tif"), RasterTooLarge, allowed_roots=[root])
    assert time.perf_counter() - start < 15


def open_under(folder: Path) -> list[str]:
    """The files and folders below that this process holds open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in found if name.startswith(str(folder))]


def test_no_descriptor_is_left_open(spool_folder: Path, root: Path, tmp_path: Path) -> None:
    """A thousand good and bad requests must leave no file or folder open."""
    made = Sources(settings(spool_folder, allowed_roots=[root]))
    requests = [path(root / name) for name in ("a.tif", "deep/b.tif", "deep/none", "a.tif/x", "deep", "../x")]
    requests += [b64(b"x"), GeoRequest(data="!", data_format="b64_json")]
    for request in requests * 125:
        with contextlib.suppress(GeoError):
            made.open_sync(request).close()
    assert open_under(tmp_path) == []
    with Spool(spool_folder, 1):
        assert len(open_under(tmp_path)) == 1
