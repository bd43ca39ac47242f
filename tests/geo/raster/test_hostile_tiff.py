"""Hostile GeoTIFFs: each is refused within 2 s with an error of a known kind, and the decoders keep working."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import rasterio
from geo.raster.made import make_card, plain_tags, raw_tiff, run, sign_model, write_strips, write_tiff
from geo.raster.refusals import LIMITS, REQUEST, refusal, refuse_bytes

from baton_geo.errors import GeoError, NotARaster, RasterBroken, RasterTooLarge, RasterUnusable
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest
from baton_geo.settings import GeoLimits

pytestmark = pytest.mark.fault("F3")

VRT = """<VRTDataset rasterXSize="40" rasterYSize="30"><VRTRasterBand dataType="Byte" band="1">
<SimpleSource><SourceFilename relativeToVRT="0">{}</SourceFilename><SourceBand>1</SourceBand></SimpleSource>
</VRTRasterBand></VRTDataset>"""


@pytest.mark.parametrize(
    ("data", "looks_like"),
    [
        (b"", "an empty file"),
        (b"%PDF-1.7\n", "a PDF"),
        (b"PK\x03\x04" + b"\0" * 60, "ZIP"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 60, "HDF5"),
        (b"\x0e\x03\x13\x01", "HDF4"),
        (b"CDF\x01", "netCDF"),
        (b"GIF89a", "GIF"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "WebP"),
        (b"BM\0\0", "BMP"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"GRIB", "GRIB"),
        (b"SQLite format 3\0", "GeoPackage"),
        (b"\0\0\0\x20ftypavif", "AVIF"),
        (b"<?xml version='1.0'?><WMS_Capabilities/>", "XML"),
        (b'{"type": "FeatureCollection"}', "JSON"),
        (b"ncols 4\nnrows 4\n", "text"),
        (b"\x80\x02}q\0.", "no known raster format"),
        (b"II", "text"),
    ],
)
def test_other_formats_are_refused_by_name(
    decoders: Decoders, tmp_path: Path, data: bytes, looks_like: str
) -> None:
    """What is no TIFF, JPEG 2000, PNG or JPEG is refused by its first bytes, and called what it looks like."""
    error = refuse_bytes(decoders, tmp_path, data)
    assert isinstance(error, NotARaster)
    assert looks_like in error.message


@pytest.mark.parametrize("lead", ["", "\n  ", "\ufeff"])
def test_a_vrt_named_tif_is_refused(decoders: Decoders, tmp_path: Path, lead: str) -> None:
    """A virtual raster named .tif that points at another file is refused; the other file is not shown."""
    canary = write_tiff(tmp_path / "canary.tif", np.full((1, 30, 40), 77, "uint8"))
    error = refuse_bytes(decoders, tmp_path, (lead + VRT.format(canary)).encode())
    assert isinstance(error, NotARaster)
    assert "VRT" in error.message


@contextmanager
def listening() -> Iterator[tuple[int, list[object]]]:
    """A port of this machine, and who connected to it."""
    seen: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        stop = threading.Event()

        def accept() -> None:
            while not stop.is_set():
                try:
                    connection, peer = server.accept()
                except TimeoutError:
                    continue
                connection.close()
                seen.append(peer)

        thread = threading.Thread(target=accept)
        thread.start()
        yield server.getsockname()[1], seen
        stop.set()
        thread.join()


def test_names_inside_tags_are_not_opened(decoders: Decoders, tmp_path: Path) -> None:
    """Names of other files and addresses in the tags are only text: nothing is opened, nothing connected to."""
    path = write_tiff(tmp_path / "a.tif", np.ones((1, 30, 40), "uint8"))
    with listening() as (port, seen):
        names = (
            f"/vsicurl/http://127.0.0.1:{port}/x.tif",
            "GTIFF_DIR:1:/etc/passwd",
            "/vsizip//etc/x.zip",
            VRT.format("/etc/passwd"),
        )
        with rasterio.open(path, "r+") as file:
            file.update_tags(TIFFTAG_IMAGEDESCRIPTION=names[0], SOURCE=names[1], OVERVIEW_FILE=names[0])
            file.update_tags(ns="xml:VRT", VRT=names[3])
            file.update_tags(ns="OVERVIEWS", OVERVIEW_FILE=names[2])
            file.set_band_description(1, names[0])
        with decoders.open(path, REQUEST) as scene:
            assert run(scene, sign_model).areas[1].pixels == 1200
        assert not seen


@pytest.mark.parametrize(
    "name", ["GTIFF_DIR:2:x.tif", "GTIFF_RAW:x.tif", "x.vrt", "HTTP:x.tif", "a;b $(c).tif"]
)
def test_file_names_never_reach_gdal(decoders: Decoders, tmp_path: Path, name: str) -> None:
    """A file's name never reaches GDAL: one that is an order elsewhere is a name here."""
    path = write_tiff(tmp_path / "plain.tif", np.ones((1, 30, 40), "uint8"))
    path = path.rename(tmp_path / name)
    with decoders.open(path, REQUEST) as scene:
        assert (scene.info.width, scene.info.height) == (40, 30)


def test_files_beside_the_raster_are_ignored(decoders: Decoders, tmp_path: Path) -> None:
    """No .aux.xml, .ovr, .msk, .tfw or .prj beside the raster changes what is seen."""
    path = write_tiff(tmp_path / "a.tif", np.ones((1, 30, 40), "uint8"))
    write_tiff(tmp_path / "a.tif.msk", np.zeros((1, 30, 40), "uint8"))
    write_tiff(tmp_path / "a.tif.ovr", np.zeros((1, 15, 20), "uint8"))
    (tmp_path / "a.tfw").write_text("1\n0\n0\n-1\n7\n7\n")
    aux = "<PAMDataset><SRS>EPSG:3857</SRS><PAMRasterBand band='1'><NoDataValue>1</NoDataValue></PAMRasterBand></PAMDataset>"
    (tmp_path / "a.tif.aux.xml").write_text(aux)
    with decoders.open(path, REQUEST) as scene:
        assert (scene.info.crs, scene.info.nodata) == ("EPSG:32633", None)
        assert run(scene, sign_model).nodata_pixels == 0


def test_a_sparse_file_of_too_many_pixels_is_refused(decoders: Decoders, tmp_path: Path) -> None:
    """A file of some kilobytes that claims 10 980 x 10 980 pixels is refused, and the message names its size."""
    path = tmp_path / "bomb.tif"
    profile = {
        "driver": "GTiff",
        "width": 10980,
        "height": 10980,
        "count": 1,
        "dtype": "uint8",
        "crs": "EPSG:32633",
    }
    with rasterio.open(
        path, "w", tiled=True, sparse_ok=True, transform=rasterio.Affine(10, 0, 0, 0, -10, 0), **profile
    ):
        pass
    size = path.stat().st_size
    request = SceneRequest(card=make_card(tile=256, overlap=32))
    error = refusal(decoders, path, request)
    assert isinstance(error, RasterTooLarge)
    assert error.message == (
        f"{size} bytes claim to hold 10980 x 10980 pixels, which is 2401 tiles; a file has to have 64 bytes for each tile beyond 64"
    )


@pytest.mark.parametrize(
    ("tags", "kind", "words"),
    [
        (plain_tags(t256=(4, [0])), RasterBroken, "0 x 30 pixels"),
        (plain_tags(t257=(4, [0])), RasterBroken, "40 x 0 pixels"),
        (plain_tags(t256=None), RasterBroken, "0 x 30 pixels"),
        (plain_tags(t256=(4, [2**32 - 1]), t257=(4, [2**32 - 1])), RasterTooLarge, "at most 144000000 pixels"),
        (plain_tags(t256=(4, [60_000]), t257=(4, [2_000])), RasterTooLarge, "at most 8192 are allowed"),
        (plain_tags(t277=(3, [65535])), RasterTooLarge, "65535 bands; at most 4096"),
        (plain_tags(t277=(3, [0])), RasterBroken, "0 bands"),
        (plain_tags(t273=(4, [2**32 - 1])), RasterBroken, "beyond its end"),
        (plain_tags(t279=(4, [2**32 - 1])), RasterBroken, "beyond its end"),
        (plain_tags(t273=None), RasterBroken, "does not say where"),
        (plain_tags(t273=(4, [-1]), t278=(4, [1])), RasterBroken, "where 1 of 30 strips"),
        (plain_tags(t278=(4, [0])), RasterBroken, "no pixels"),
        (plain_tags(t322=(4, [0]), t323=(4, [16])), RasterBroken, "no pixels"),
        (plain_tags(t322=(4, [2**31]), t323=(4, [2**31]), t324=(4, [-1]), t325=(4, [99])), RasterTooLarge, "at most 134217728"),
        (plain_tags(t258=(3, [24]), t339=(3, [3])), RasterUnusable, "24-bit floats; supported are"),
        (plain_tags(t258=(3, [12]), t339=(3, [2])), RasterUnusable, "12-bit signed integers"),
        (plain_tags(t258=(3, [64]), t339=(3, [6])), RasterUnusable, "64-bit complex numbers"),
        (plain_tags(t258=(3, [32]), t339=(3, [5])), RasterUnusable, "32-bit complex integers"),
        (plain_tags(t258=(3, [1])), RasterUnusable, "1-bit integers"),
        (plain_tags(t258=(3, [12])), RasterUnusable, "12-bit integers"),
        (plain_tags(t277=(3, [2]), t258=(3, [8, 16])), RasterUnusable, "of different types"),
        (plain_tags(t262=(3, [3])), RasterUnusable, "colour table"),
        (plain_tags(t262=(3, [8])), RasterUnusable, "photometric interpretation 8"),
        (plain_tags(t259=(3, [34712])), RasterUnusable, "compression"),
        (plain_tags(t259=(3, [7])), RasterBroken, "could not"),
        (plain_tags(t259=(3, [8])), RasterBroken, "rows 1 to 30 could not be decoded"),
        (plain_tags(t256=(12, [3.5])), RasterBroken, "wrong type"),
        (plain_tags(t273=(4, [-1] * 2), t279=(4, [10**9, 10])), RasterBroken, "beyond its end"),
    ],
)  # fmt: skip
def test_a_false_header_is_refused(
    decoders: Decoders,
    tmp_path: Path,
    tags: dict[int, tuple[int, list[int]]],
    kind: type[GeoError],
    words: str,
) -> None:
    """Sizes, counts, types and places that cannot be are refused with the number that is wrong."""
    error = refuse_bytes(decoders, tmp_path, raw_tiff(tags, bytes(range(1, 201)) * 6))
    assert isinstance(error, kind), error.message
    assert re.search(words, error.message), error.message


def test_the_header_behind_the_false_ones_is_accepted(decoders: Decoders, tmp_path: Path) -> None:
    """The header those lies are made from is itself accepted."""
    path = tmp_path / "a.tif"
    path.write_bytes(raw_tiff(plain_tags(), bytes(range(1, 201)) * 6))
    with decoders.open(path, REQUEST) as scene:
        assert run(scene, sign_model).areas[1].pixels == 1200


@pytest.mark.parametrize("following", [8, 10, 2**32 - 1, 100])
def test_cyclic_or_stray_directories_are_refused(decoders: Decoders, tmp_path: Path, following: int) -> None:
    """A list of images that comes back to itself, or leads nowhere, ends."""
    error = refuse_bytes(decoders, tmp_path, raw_tiff(plain_tags(), b"\1" * 1200, following=following))
    assert isinstance(error, RasterBroken)


def test_a_cycle_of_two_directories_is_refused(decoders: Decoders, tmp_path: Path) -> None:
    """A circle is found where it closes, not only at the first image."""
    data = raw_tiff(plain_tags(), b"\1" * 1200, following=2000).ljust(2000, b"\0")
    data += struct.pack("<HHHIII", 1, 256, 4, 1, 5, 2000)
    assert "in a circle" in refuse_bytes(decoders, tmp_path, data).message


def test_a_file_of_a_thousand_images_is_refused(decoders: Decoders, tmp_path: Path) -> None:
    """A file of a thousand tiny images is refused before GDAL lists them."""
    data = raw_tiff(plain_tags(), b"\1" * 1200, following=2000).ljust(2000, b"\0")
    for number in range(1000):
        data += struct.pack("<HHHIII", 1, 256, 4, 1, 5, 2000 + 18 * (number + 1) if number < 999 else 0)
    assert "more than 256 images" in refuse_bytes(decoders, tmp_path, data).message


@pytest.mark.parametrize(
    "transform",
    [(float("nan"), 0, 0, 0, -10, 0), (10, 0, float("inf"), 0, -10, 0), (10, 10, 0, 10, 10, 0)],
)
def test_an_impossible_geotransform_is_refused(
    decoders: Decoders, tmp_path: Path, transform: tuple[float, ...]
) -> None:
    """NaN, infinity and pixels without size in the geotransform are refused as such."""
    a, b, c, d, e, f = transform
    matrix = struct.pack("<16d", a, b, 0, c, d, e, 0, f, 0, 0, 0, 0, 0, 0, 0, 1)
    keys = struct.pack("<8H", 1, 1, 0, 1, 1024, 0, 1, 1)
    tags = plain_tags() | {
        34264: (16, list(struct.unpack("<16Q", matrix))),
        34735: (3, list(struct.unpack("<8H", keys))),
    }
    data = bytearray(raw_tiff(tags, b"\1" * 1200))
    data[data.index(struct.pack("<HHI", 34264, 16, 16)) + 2] = 12  # those 64 bits are doubles
    error = refuse_bytes(decoders, tmp_path, bytes(data))
    assert isinstance(error, RasterBroken)
    assert "geotransform" in error.message


def test_a_huge_strip_is_refused(decoders: Decoders, tmp_path: Path) -> None:
    """A strip of 480 MB uncompressed is refused by its declared size."""
    tags = plain_tags(12_000, 10_000, t259=(3, [8]), t258=(3, [32]), t279=(4, [1200]))
    request = SceneRequest(card=make_card(tile=512), limits=LIMITS)
    error = refuse_bytes(decoders, tmp_path, raw_tiff(tags, b"\1" * 1200), request)
    assert isinstance(error, RasterTooLarge)
    assert "its strips hold 480000000 bytes each; at most 134217728 are allowed" in error.message


def test_strips_too_tall_for_memory_are_refused(decoders: Decoders, tmp_path: Path) -> None:
    """Strips so tall that the rows do not fit into a decoder are refused, with what to do about it."""
    path = write_strips(tmp_path / "a.tif", np.ones((1, 6000, 6000), "uint8"), 6000)
    request = SceneRequest(
        card=make_card(tile=128, overlap=0), limits=GeoLimits(tile_bytes=0, memory=96_000_000)
    )
    error = refusal(decoders, path, request)
    assert isinstance(error, RasterTooLarge)
    assert "rewrite it with tiles" in error.message


def test_a_file_over_the_size_limit_is_refused(decoders: Decoders, tmp_path: Path) -> None:
    """A file beyond the limit on files is refused before it is looked into."""
    error = refuse_bytes(
        decoders,
        tmp_path,
        b"II*\0" + bytes(5000),
        SceneRequest(card=make_card(), limits=GeoLimits(file_bytes=5000)),
    )
    assert isinstance(error, RasterTooLarge)
    assert error.message == "the file has 5004 bytes; at most 5000 are allowed"
