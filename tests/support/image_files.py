"""Image files of every kind, good and bad, made on the spot."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def image(width: int = 24, height: int = 16, mode: str = "RGB") -> Image.Image:
    """Four colours, one in each quarter: its orientation can be told."""
    made = Image.new("RGB", (width, height), (200, 30, 30))
    made.paste((30, 200, 30), (width // 2, 0, width, height // 2))
    made.paste((30, 30, 200), (0, height // 2, width // 2, height))
    made.paste((220, 220, 60), (width // 2, height // 2, width, height))
    return made.convert(mode)


def file_of(made: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    if kind == "WEBP":
        options = {"lossless": True} | options
    made.save(written, kind, **options)
    return written.getvalue()


def opened(data: bytes) -> Image.Image:
    found = Image.open(io.BytesIO(data))
    found.load()
    return found


def url_of(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def part_of(data: bytes) -> dict[str, Any]:
    """As OpenAI's clients send an image in a chat."""
    return {"type": "image_url", "image_url": {"url": url_of(data)}}


def oriented(orientation: int, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    return file_of(image(), kind, exif=exif.tobytes(), **options)


def photo(width: int, height: int, kind: str, **options: Any) -> bytes:
    """An image with the noise of a camera, which lies on its side."""
    rows, columns = np.mgrid[0:height, 0:width]
    slopes = np.stack([columns * 255 / width, rows * 255 / height, rows * 0 + 128], -1)
    noise = np.random.default_rng(1).normal(0, 18, (height, width, 3))
    exif = Image.Exif()
    exif[0x0112] = 6
    made = Image.fromarray(np.clip(slopes + noise, 0, 255).astype(np.uint8))
    return file_of(made, kind, exif=exif.tobytes(), **options)


def animated(kind: str, frames: int = 3) -> bytes:
    shown = [Image.new("RGB", (24, 16), (50 * number, 0, 0)) for number in range(frames)]
    return file_of(shown[0], kind, save_all=True, append_images=shown[1:])


def two_pictures_in_one() -> bytes:
    """A JPEG with a second picture after it, as phones write them for bright screens."""
    return file_of(image(), "MPO", save_all=True, append_images=[image(12, 8)])


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG by its chunks; without any it says its size and has no pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")


def pixels_of(width: int, height: int) -> bytes:
    """The chunk of a black picture: a thousandth of it."""
    return chunk(b"IDAT", zlib.compress(bytes((3 * width + 1) * height), 9))


def text_bomb() -> bytes:
    """A PNG whose text unpacks to 64 MiB."""
    info = PngImagePlugin.PngInfo()
    info.add_text("a", "b" * (1 << 26), zip=True)
    return file_of(image(), "PNG", pnginfo=info)


def profile_bomb() -> bytes:
    """A PNG whose colour profile does."""
    return file_of(image(), "PNG", icc_profile=bytes(1 << 26))


def many_chunks(count: int) -> bytes:
    return png(24, 16, *[chunk(b"teXt", b"")] * count, pixels_of(24, 16))


def many_pixel_chunks(count: int) -> bytes:
    """They hold nothing, but for the last one."""
    return png(24, 16, *[chunk(b"IDAT", b"")] * count, pixels_of(24, 16))


def many_segments(count: int) -> bytes:
    whole = file_of(image(), "JPEG")
    return whole[:2] + b"\xff\xfe\x00\x02" * count + whole[2:]


def many_scans(count: int) -> bytes:
    """A progressive JPEG whose last pass is repeated."""
    whole = file_of(image(), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * count + b"\xff\xd9"


def many_extensions(count: int) -> bytes:
    whole = file_of(image(), "GIF")
    at = whole.index(b"\x2c", 13 + 3 * 2 ** ((whole[10] & 7) + 1))
    return whole[:at] + b"!\xfe\x01a\x00" * count + whole[at:]


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
DISGUISED = {
    "svg": SVG,
    "html": b"<!doctype html><img src=x>",
    "text": b"hello",
    "nothing": b"",
    "zip": b"PK\x03\x04" + bytes(64),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "bmp": file_of(image(), "BMP"),
    "tiff": file_of(image(), "TIFF"),
    "ico": file_of(image(32, 32), "ICO"),
    "numpy": b"\x93NUMPY\x01\x00" + bytes(128),
    "half a signature": b"\x89PNG",
    "riff that is sound": b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(32),
    "magic alone": b"\xff\xd8\xff",
    "gif of nothing": b"GIF89a",
    "png of a tiff": b"\x89PNG\r\n\x1a\n" + file_of(image(), "TIFF"),
}
"""What is no image of ours, whatever it is called."""
