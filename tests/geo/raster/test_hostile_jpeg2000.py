"""Hostile JPEG 2000 files: each is refused in time with an error of a known kind, or read."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import rasterio
from geo.raster.made import make_card, run, sign_model, write_jp2
from geo.raster.refusals import LIMITS, REQUEST, outcome, refusal, refuse_bytes
from geo.raster.test_hostile_tiff import listening

from baton_geo.errors import GeoError, NotARaster, RasterBroken, RasterTooLarge, RasterUnusable
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest
from baton_geo.settings import GeoLimits

pytestmark = pytest.mark.fault("F3")

SIZ = b"\xff\x4f\xff\x51"
# Places in SIZ from the codestream's begin: ISO/IEC 15444-1, annex A.5.1.
LENGTH, WIDTH, HEIGHT, LEFT, TOP, ACROSS, DOWN, TILES_LEFT, COUNT, DEPTH, STEP = (
    4, 8, 12, 16, 20, 24, 28, 32, 40, 42, 43
)  # fmt: skip
Change = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A JP2 file of 100 x 70 pixels in tiles of 64, with a CRS in both boxes."""
    return made(tmp_path_factory.mktemp("sound"), "uint8", 1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The same as a codestream without boxes."""
    return made(tmp_path_factory.mktemp("alone"), "uint8", 1, CODEC="J2K")


def made(folder: Path, dtype: str, bands: int, **options: object) -> bytes:
    pixels = np.random.default_rng(0).integers(1, 250, (bands, 70, 100)).astype(dtype)
    return write_jp2(folder / "a.jp2", pixels, blockxsize=64, blockysize=64, **options).read_bytes()


def put(place: int, form: str, *numbers: int) -> Change:
    """Change SIZ at a place of the codestream."""

    def change(data: bytes) -> bytes:
        at = data.index(SIZ) + place
        return data[:at] + struct.pack(form, *numbers) + data[at + struct.calcsize(form) :]

    return change


def size(width: int, height: int, tile: int = 64) -> Change:
    """Claim a size, in SIZ and in the image header."""

    def change(data: bytes) -> bytes:
        data = put(WIDTH, ">IIIIII", width, height, 0, 0, tile, tile)(data)
        at = data.find(b"ihdr") + 4
        return data if at < 4 else data[:at] + struct.pack(">II", height, width) + data[at + 8 :]

    return change


def cut(data: bytes) -> bytes:
    return data[: data.index(SIZ)]


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", 8 + len(content)) + kind + content


def before_stream(*boxes: bytes) -> Change:
    """Put boxes before the box of the codestream."""

    def change(data: bytes) -> bytes:
        at = data.index(b"jp2c") - 4
        return data[:at] + b"".join(boxes) + data[at:]

    return change


def lengths(kind: bytes, length: int) -> Change:
    def change(data: bytes) -> bytes:
        at = data.index(kind) - 4
        return data[:at] + struct.pack(">I", length) + data[at + 4 :]

    return change


def without(marker: bytes) -> Change:
    return lambda data: data.replace(marker, b"\0" * len(marker), 1)


PALETTE = box(b"pclr", b"\0\1\1\7\0")
FALSE: dict[str, tuple[Change, type[GeoError], str]] = {
    "no codestream": (cut, RasterBroken, "beyond its end|no JPEG 2000 codestream"),
    "no size": (put(2, ">H", 0xFF52), RasterBroken, "does not begin with its size"),
    "a long SIZ": (put(LENGTH, ">H", 400), RasterBroken, "1 components in a SIZ of 400 bytes"),
    "no width": (put(WIDTH, ">I", 0), RasterBroken, "an image from 0, 0 to 0, 70"),
    "no tiles": (put(DOWN, ">I", 0), RasterBroken, "tiles of 64 x 0"),
    "another size than its box": (put(WIDTH, ">I", 99), RasterBroken, "another size than SIZ"),
    "an image that begins elsewhere": (put(LEFT, ">I", 3), RasterBroken, "another size than SIZ"),
    "tiles that begin elsewhere": (put(TILES_LEFT, ">I", 3), RasterUnusable, "begin at 0, 0"),
    "subsampled": (put(STEP, ">BB", 2, 2), RasterUnusable, "subsampled"),
    "no step": (put(STEP, ">BB", 0, 1), RasterUnusable, "subsampled"),
    "17 bits": (put(DEPTH, ">B", 16), RasterUnusable, "17-bit integers; supported are"),
    "38 bits": (put(DEPTH, ">B", 37), RasterUnusable, "38-bit integers"),
    "8 bits with a sign": (put(DEPTH, ">B", 0x87), RasterUnusable, "8-bit signed integers"),
    "no bands": (put(LENGTH, ">H", 38), RasterBroken, "1 components in a SIZ of 38 bytes"),
    "many bands": (put(COUNT, ">H", 9000), RasterBroken, "9000 components in a SIZ"),
    "many pixels": (size(100_000, 100_000, 1024), RasterTooLarge, "100000 x 100000 pixels; at most"),
    "all pixels": (size(2**32 - 1, 2**32 - 1), RasterTooLarge, "at most 144000000 pixels"),
    "tiles that are not there": (size(200, 70), RasterBroken, "4 of the 8 tiles are not in the file"),
    "fewer tiles than there are": (size(60, 60), RasterBroken, "is damaged at byte"),
    "a palette": (before_stream(PALETTE), RasterUnusable, "colour table"),
    "a palette in its place": (
        before_stream(box(b"jp2h", PALETTE)), RasterUnusable, "colour table",
    ),
    "another image header": (
        before_stream(box(b"ihdr", struct.pack(">IIHBBBB", 70, 101, 1, 7, 7, 0, 0))), RasterBroken, "another size",
    ),
    "a box beyond the end": (lengths(b"jp2c", 10**9), RasterBroken, "a box of it lies beyond"),
    "a box without end": (lengths(b"jp2h", 7), RasterBroken, "a box of it lies beyond"),
    "a header to the end": (lengths(b"jp2h", 0), RasterBroken, "beyond its end|no JPEG 2000"),
    "a box of 2**64": (
        before_stream(struct.pack(">I4sQ", 1, b"free", 2**64 - 1)), RasterBroken, "a box of it lies beyond",
    ),
    "a box in a circle": (
        before_stream(struct.pack(">I4sQ", 1, b"free", 0)), RasterBroken, "a box of it lies beyond",
    ),
    "5,000 boxes": (before_stream(box(b"free", b"") * 5000), RasterBroken, "more than 4096 boxes"),
    "5,000 boxes in its header": (
        before_stream(box(b"jp2h", box(b"free", b"") * 5000)), RasterBroken, "more than 4096 boxes",
    ),
    "no tile": (without(b"\xff\x90\x00\x0a"), RasterBroken, "does not lead to a tile"),
    "no end": (lambda data: data[:-2] + b"\0\0", RasterBroken, "is damaged at byte|beyond its end"),
}  # fmt: skip


@pytest.mark.parametrize("name", FALSE)
def test_a_false_header_is_refused(decoders: Decoders, tmp_path: Path, sound: bytes, name: str) -> None:
    """Sizes, tiles, depths, boxes that cannot be, or are not supported, in words with the number."""
    change, kind, words = FALSE[name]
    error = refuse_bytes(decoders, tmp_path, change(sound))
    assert isinstance(error, kind), error.message
    assert re.search(words, error.message), error.message


def test_a_codestream_alone_that_begins_elsewhere_is_refused(
    decoders: Decoders, tmp_path: Path, alone: bytes
) -> None:
    """The image's own offset, which no box contradicts."""
    error = refuse_bytes(decoders, tmp_path, put(LEFT, ">II", 3, 5)(alone))
    assert isinstance(error, RasterUnusable)
    assert "begin at 0, 0" in error.message


def test_a_large_file_without_tiles_is_refused(decoders: Decoders, tmp_path: Path, sound: bytes) -> None:
    """By what a tile takes in OpenJPEG, with what to do about it."""
    request = SceneRequest(card=make_card(tile=512), limits=LIMITS)
    error = refuse_bytes(decoders, tmp_path, size(10_980, 10_980, 10_980)(sound), request)
    assert isinstance(error, RasterTooLarge)
    assert error.message == (
        "its tiles take 482241600 bytes each while they are decoded; at most 134217728 are allowed: rewrite it "
        "with tiles of 256 to 1024 pixels, or as a Cloud Optimized GeoTIFF"
    )


def test_bands_of_different_depths_are_refused(decoders: Decoders, tmp_path: Path) -> None:
    """One type is needed for all."""
    data = put(DEPTH + 3, ">B", 11)(made(tmp_path, "uint16", 3, CODEC="J2K"))
    error = refuse_bytes(decoders, tmp_path, data)
    assert isinstance(error, RasterUnusable)
    assert "of different types" in error.message


def test_a_file_of_very_many_bands_is_refused(decoders: Decoders, tmp_path: Path, alone: bytes) -> None:
    """As of a TIFF."""
    at = alone.index(SIZ)
    data = put(COUNT, ">H", 10_000)(put(LENGTH, ">H", 38 + 30_000)(alone))
    error = refuse_bytes(decoders, tmp_path, data[: at + 45] + b"\7\1\1" * 9_999 + data[at + 45 :])
    assert isinstance(error, RasterTooLarge)
    assert "10000 bands; at most 4096" in error.message


def test_the_file_behind_the_false_ones_is_accepted(
    decoders: Decoders, tmp_path: Path, sound: bytes, alone: bytes
) -> None:
    """Nor do unknown boxes, or one whose length is given in 64 bits or as the rest, make it false."""
    at = sound.index(b"jp2c") - 4
    to_the_end = sound[:at] + struct.pack(">I", 0) + sound[at + 4 :]
    long = sound[:at] + struct.pack(">I4sQ", 1, b"jp2c", len(sound) - at + 8) + sound[at + 8 :]
    for data in (sound, alone, to_the_end, long, before_stream(box(b"free", b"x" * 100))(sound)):
        path = tmp_path / "a.jp2"
        path.write_bytes(data)
        with decoders.open(path, REQUEST) as scene:
            assert run(scene, sign_model).areas[1].pixels == 7000


@pytest.mark.parametrize("window", [None, (0, 0, 64, 64)])
@pytest.mark.parametrize("tile", [64, 1024, 100_000])
def test_a_bomb_is_refused(
    decoders: Decoders, tmp_path: Path, sound: bytes, window: tuple[int, int, int, int] | None, tile: int
) -> None:
    """A file of 8 KB that claims 100,000 x 100,000 pixels; a part of it is no way around."""
    request = SceneRequest(card=make_card(tile=512), limits=LIMITS, window=window)
    error = refuse_bytes(decoders, tmp_path, size(100_000, 100_000, tile)(sound), request)
    assert isinstance(error, RasterTooLarge | RasterBroken), error.message
    assert window is not None or isinstance(error, RasterTooLarge)


def test_a_file_truncated_anywhere_is_refused(
    decoders: Decoders, tmp_path: Path, sound: bytes, alone: bytes
) -> None:
    """In the boxes, in the header, in the pixels, and before the last byte."""

    def ended(part: tuple[int, bytes]) -> GeoError | None:
        path = tmp_path / f"{part[0]}.jp2"
        path.write_bytes(part[1])
        return outcome(decoders, path)

    places = [*range(8, 200, 3), *range(200, len(sound), 97), len(sound) - 2, len(sound) - 1]
    parts = [sound[:place] for place in places]
    parts += [alone[:place] for place in (*range(4, 120, 3), *range(120, len(alone), 97), len(alone) - 1)]
    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(ended, enumerate(parts)))
    assert {type(error) for error in errors} == {RasterBroken}
    assert isinstance(refuse_bytes(decoders, tmp_path, sound[:7]), NotARaster)


def test_flipped_bytes_are_read_or_refused(
    decoders: Decoders, tmp_path: Path, sound: bytes, alone: bytes
) -> None:
    """Any byte of the file changed: taken or refused, never anything else."""
    random = np.random.default_rng(7)

    def flip(number: int) -> GeoError | None:
        data = bytearray((sound, alone)[number % 2])
        for place in random.integers(0, len(data) if number % 3 else 300, random.integers(1, 4)):
            data[place] = random.integers(0, 256)
        path = tmp_path / f"flip{number}.jp2"
        path.write_bytes(data)
        return outcome(decoders, path)

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(flip, range(200)))
    assert any(found is None for found in outcomes)
    assert any(found is not None for found in outcomes)


def test_places_and_names_in_gml_are_not_opened(decoders: Decoders, tmp_path: Path) -> None:
    """A CRS by a file's name or an address, an external entity, a link: none is read, nor by GDAL alone."""
    sound = made(tmp_path, "uint8", 1, GEOJP2="NO")
    canary = tmp_path / "canary.wkt"
    canary.write_text(rasterio.CRS.from_epsg(3857).to_wkt())
    begin, close = sound.index(b"<gml:FeatureCollection"), b"</gml:FeatureCollection>"
    text = sound[begin : sound.rindex(close) + len(close)].decode()
    name = "urn:ogc:def:crs:EPSG::32633"
    assert name in text
    with listening() as (port, seen):
        web = f"http://127.0.0.1:{port}/crs.wkt"
        entity = '<!DOCTYPE x [<!ENTITY crs SYSTEM "{}">]>\n'
        for number, gml in enumerate((
            *(text.replace(name, place) for place in (str(canary), f"file://{canary}", web, f"/vsicurl/{web}")),
            *(text.replace(name, f"{place}#1") for place in (str(canary), web)),
            *(entity.format(place) + text.replace(name, "&crs;") for place in (str(canary), web)),
            text.replace("<gml:boundedBy>", f'<gml:metaDataProperty xlink:href="{web}"/><gml:boundedBy>'),
            text.replace("gmljp2://codestream/0", web),
        )):  # fmt: skip
            path = tmp_path / f"{number}.jp2"
            path.write_bytes(with_gml(sound, gml))
            with rasterio.open(path, driver="JP2OpenJPEG") as file:
                assert file.crs != rasterio.CRS.from_epsg(3857)
            with decoders.open(path, REQUEST) as scene:
                assert scene.info.crs in (None, "EPSG:32633")
                assert run(scene, sign_model).areas[1].pixels == 7000
        assert not seen


def with_gml(data: bytes, gml: str) -> bytes:
    """Put GML in place of a file's, and correct the lengths of the boxes around it."""
    content = gml.encode() + b"\0"
    label = box(b"lbl ", b"gml.data")
    instance = box(b"asoc", box(b"lbl ", b"gml.root-instance") + box(b"xml ", content))
    at = data.index(b"asoc") - 4
    (length,) = struct.unpack_from(">I", data, at)
    return data[:at] + box(b"asoc", label + instance) + data[at + length :]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound scene of noise in one tile, which takes a second or two to decode."""
    pixels = np.random.default_rng(0).integers(1, 60_000, (1, 3000, 3000)).astype("uint16")
    path = tmp_path_factory.mktemp("slow") / "a.jp2"
    return write_jp2(path, pixels, blockxsize=3000, blockysize=3000)


def test_decoding_ends_at_its_deadline(decoders: Decoders, slow: Path) -> None:
    """Though OpenJPEG does not look up while it decodes."""
    limits = GeoLimits(seconds=0.9, open_seconds=20)
    error = refusal(decoders, slow, SceneRequest(card=make_card(tile=512), limits=limits))
    assert isinstance(error, RasterTooLarge)
    assert "longer than the 0.9 s allowed" in error.message


def test_looking_at_a_small_file_ends_at_its_deadline(decoders: Decoders, tmp_path: Path) -> None:
    """A small scene is decoded before it is accepted: within `open_seconds` of processor time."""
    pixels = np.random.default_rng(0).integers(1, 60_000, (1, 1200, 1200)).astype("uint16")
    path = write_jp2(tmp_path / "a.jp2", pixels)
    limits = GeoLimits(open_seconds=0.05)
    error = refusal(decoders, path, SceneRequest(card=make_card(tile=512), limits=limits))
    assert isinstance(error, RasterBroken)
    assert "could not be read within 0.05 s" in error.message


def test_memory_is_bounded(decoders: Decoders, slow: Path) -> None:
    """A tile that a decoder of little memory cannot hold is refused before; 36 MB fit into 256."""
    for memory, fits in ((96_000_000, False), (128_000_000, False), (256_000_000, True)):
        limits = GeoLimits(memory=memory, tile_bytes=0, open_seconds=20)
        error = outcome(decoders, slow, SceneRequest(card=make_card(tile=512), limits=limits))
        assert (error is None) == fits, error
        if error is not None:
            assert isinstance(error, RasterTooLarge)
            assert "36000000 bytes each while they are decoded" in error.message


def test_many_tiles_are_bounded(decoders: Decoders, tmp_path: Path, alone: bytes) -> None:
    """Nor more than the standard has; each is in the file, or it is refused before GDAL makes room for it."""
    window = {"window": (0, 0, 64, 64)}
    for side, kind in itertools.product((200, 300), (RasterTooLarge, RasterBroken)):
        tile = 1 if kind is RasterTooLarge else 2
        request = SceneRequest(card=make_card(), limits=LIMITS, **window)
        error = refuse_bytes(decoders, tmp_path, size(side * 2, side, tile)(alone), request)
        expected = RasterTooLarge if side * 2 * side // tile**2 > 65_535 else RasterBroken
        assert isinstance(error, expected), error.message
