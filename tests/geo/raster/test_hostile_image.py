"""Hostile PNG and JPEG. WebP and other formats are refused as no raster, see `test_hostile_tiff`."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from geo.raster.made import make_card, png_chunk, raw_png, read_tiff, read_tile, run, sign_model
from geo.raster.refusals import outcome, refuse_bytes
from PIL import Image

from baton_geo.card import Band
from baton_geo.errors import RasterBroken, RasterTooLarge, RasterUnusable
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest
from baton_geo.settings import GeoLimits

pytestmark = pytest.mark.fault("F4")

RGB = make_card().model_copy(
    update={"bands": tuple(Band(name=name, mean=0, std=1) for name in ("RED", "GREEN", "BLUE"))}
)
REQUEST = SceneRequest(card=RGB, limits=GeoLimits(tile_bytes=0))


def rows(width: int, height: int, pixel: bytes = b"\x01\x02\x03") -> bytes:
    """Unfiltered rows of a PNG."""
    return (b"\0" + pixel * width) * height


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    """An image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def first_tile(
    decoders: Decoders, tmp_path: Path, data: bytes
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """What the model sees of an image's first tile: shape (bands, tile, tile)."""
    path = tmp_path / "a.png"
    path.write_bytes(data)
    with decoders.open(path, REQUEST) as scene:
        tile = read_tile(scene, 0)
        assert tile is not None
        return tile[:, 0]


def test_png_and_jpeg_are_read(decoders: Decoders, tmp_path: Path) -> None:
    """Red, green and blue arrive by name; the mask has the image's pixel grid and no CRS, which a note says."""
    pixels = np.zeros((20, 50, 3), "uint8")
    pixels[:, 25:] = (200, 100, 50)
    for kind in ("PNG", "JPEG"):
        path = tmp_path / kind
        path.write_bytes(encode(Image.fromarray(pixels), kind))
        with decoders.open(path, REQUEST) as scene:
            assert scene.info.names == ("RED", "GREEN", "BLUE")
            assert "has no CRS" in scene.info.notes[0]
            products = run(scene, lambda tile: sign_model(tile - 100))
            assert products.mask is not None
            mask = read_tiff(products.mask)[0]
        assert mask.shape == (20, 50)
        assert (mask[:, :20] == 0).all()
        assert (mask[:, 30:] == 1).all()


def test_models_of_other_bands_take_no_images(decoders: Decoders, tmp_path: Path) -> None:
    """A model of six bands says why it takes no PNG."""
    request = SceneRequest(card=make_card(6), limits=GeoLimits(tile_bytes=0))
    error = refuse_bytes(decoders, tmp_path, raw_png(20, 20, rows=rows(20, 20)), request)
    assert isinstance(error, RasterUnusable)
    assert "models of three bands; this one takes 6: B1, B2" in error.message


def test_a_png_of_too_many_pixels_is_refused(decoders: Decoders, tmp_path: Path) -> None:
    """A PNG that claims 50 000 x 50 000 pixels is refused by its header."""
    error = refuse_bytes(decoders, tmp_path, raw_png(50_000, 50_000, rows=rows(1, 1)), REQUEST)
    assert isinstance(error, RasterTooLarge)
    assert "50000 x 50000 pixels; at most" in error.message


def test_a_png_that_does_not_fit_into_memory_is_refused(decoders: Decoders, tmp_path: Path) -> None:
    """An image that is decoded whole has to fit into a decoder."""
    request = SceneRequest(card=RGB.model_copy(update={"tile": 512}), limits=GeoLimits(tile_bytes=0))
    error = refuse_bytes(decoders, tmp_path, raw_png(12_000, 12_000, rows=rows(1, 1)), request)
    assert isinstance(error, RasterTooLarge)
    assert "send a GeoTIFF" in error.message


def test_a_small_image_of_many_tiles_is_refused(decoders: Decoders, tmp_path: Path) -> None:
    """The rule on bytes for each tile holds for images too."""
    error = refuse_bytes(decoders, tmp_path, raw_png(2000, 2000, rows=b""), SceneRequest(card=RGB))
    assert "claim to hold 2000 x 2000 pixels" in error.message


def test_a_large_colour_profile_is_not_unpacked(decoders: Decoders, tmp_path: Path) -> None:
    """A colour profile that unpacks to 200 MB is not unpacked."""
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()
    data = raw_png(20, 20, png_chunk(b"iCCP", b"x\0\0" + bomb), rows=rows(20, 20))
    error = outcome_of(decoders, tmp_path, data)
    assert error is None or isinstance(error, RasterBroken)


def test_large_png_texts_are_not_unpacked(decoders: Decoders, tmp_path: Path) -> None:
    """Nor are texts."""
    bomb = zlib.compress(bytes(100 << 20), 9)
    chunks = [png_chunk(b"zTXt", b"x\0\0" + bomb), png_chunk(b"iTXt", b"x\0\1\0\0\0" + bomb)]
    error = outcome_of(decoders, tmp_path, raw_png(20, 20, *chunks, rows=rows(20, 20)))
    assert error is None or isinstance(error, RasterBroken)


def outcome_of(decoders: Decoders, tmp_path: Path, data: bytes) -> Exception | None:
    path = tmp_path / "a.png"
    path.write_bytes(data)
    return outcome(decoders, path, REQUEST)


def test_the_first_frame_of_an_animated_png_is_used(decoders: Decoders, tmp_path: Path) -> None:
    """Of an animated PNG that claims 100 000 frames the first is used, at once, and that is said."""
    path = tmp_path / "a.png"
    frame = struct.pack(">IIIIIHHBB", 0, 20, 20, 0, 0, 1, 10, 0, 0)
    chunks = [png_chunk(b"acTL", struct.pack(">II", 100_000, 0)), png_chunk(b"fcTL", frame)]
    path.write_bytes(raw_png(20, 20, *chunks, rows=rows(20, 20)))
    with decoders.open(path, REQUEST) as scene:
        assert any("100000 frames; the first is used" in note for note in scene.info.notes)
        assert run(scene, sign_model).areas[1].pixels == 400


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_exif_orientation_is_applied(decoders: Decoders, tmp_path: Path, orientation: int, kind: str) -> None:
    """The model sees an image the way a viewer shows it, whichever of the eight ways it is stored."""
    upright = np.zeros((16, 30, 3), "uint8")
    upright[:8, :15], upright[:8, 15:], upright[8:, :15] = 250, 170, 90
    turns = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.transpose(1, 0, 2),
        6: np.rot90(upright), 7: upright[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(upright, -1),
    }  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(Image.fromarray(np.ascontiguousarray(turns[orientation])), kind, exif=exif)
    tile = first_tile(decoders, tmp_path, data)
    np.testing.assert_allclose(tile[:, 2:14:6, 2:28:18], upright[2:14:6, 2:28:18].transpose(2, 0, 1), atol=12)


@pytest.mark.parametrize("colour", ["alpha", "tRNS", "palette"])
def test_transparency_is_nodata(decoders: Decoders, tmp_path: Path, colour: str) -> None:
    """Transparent pixels are nodata, however the PNG says so."""
    if colour == "alpha":
        data = raw_png(20, 20, colour=6, rows=rows(10, 20, b"\1\2\3\xff\1\2\3\0"))
    elif colour == "tRNS":
        data = raw_png(
            20, 20, png_chunk(b"tRNS", struct.pack(">HHH", 9, 9, 9)), rows=rows(10, 20, b"\1\2\3\x09\x09\x09")
        )
    else:
        chunks = png_chunk(b"PLTE", b"\1\2\3\x09\x09\x09"), png_chunk(b"tRNS", b"\xff\0")
        data = raw_png(20, 20, *chunks, colour=3, rows=rows(10, 20, b"\0\1"))
    path = tmp_path / "a.png"
    path.write_bytes(data)
    with decoders.open(path, REQUEST) as scene:
        products = run(scene, sign_model)
    assert products.nodata_pixels == 200
    assert products.areas[1].pixels == 200


@pytest.mark.parametrize(
    "data",
    [
        raw_png(20, 20, depth=16, rows=rows(20, 20, b"\0\1\0\2\0\3")),
        raw_png(20, 20, colour=0, rows=rows(20, 20, b"\1")),
        encode(Image.new("CMYK", (20, 20)), "JPEG"),
        encode(Image.new("L", (20, 20)), "JPEG"),
    ],
)
def test_images_of_other_pixels_are_refused(decoders: Decoders, tmp_path: Path, data: bytes) -> None:
    """Sixteen bits, grey and CMYK are refused, not turned into something else."""
    error = refuse_bytes(decoders, tmp_path, data, REQUEST)
    assert isinstance(error, RasterUnusable)
    assert "three 8-bit colours are supported" in error.message


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_image_truncated_anywhere_is_refused(decoders: Decoders, tmp_path: Path, kind: str) -> None:
    """Cut anywhere before its last pixel, an image is refused as broken, or as no image; never half read."""
    noise = np.random.default_rng(0).integers(0, 255, (16, 16, 3)).astype("uint8")
    whole = encode(Image.fromarray(noise), kind)
    for length in [*range(4, 60, 4), *range(60, len(whole) - 20, 40)]:
        error = outcome_of(decoders, tmp_path, whole[:length])
        assert error is not None, length
        assert type(error).__name__ in ("RasterBroken", "NotARaster")
