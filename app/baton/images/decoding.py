"""Decode and check an image file under limits, before an engine gets it.

The format is read from the file, not from the media type that the client gave. Every pixel is decoded once
here, so that a broken file is refused before a model's own processor reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import structlog
from PIL import ExifTags, Image, ImageOps

from baton.config.groups import ImageSettings
from baton.errors import ImageTooLarge, InvalidImage
from baton.images.image import ClientImage

PLAIN_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA"})
"""Pillow's modes that every image processor converts to RGB in the same way."""
SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I")
JPEG_QUALITY = 95
PNG_COMPRESSION = 1
UPRIGHT = 1

log = structlog.get_logger("baton.images")
MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""The media types of the accepted formats, by Pillow's names."""
PARTS = 2048
"""Chunks, segments or extensions that a file may have beside its pixels; more only cost time."""
PIXEL_PARTS = 32_768
"""Chunks of pixels that a file may have; encoders write at least 8 KiB into each."""
SCANS = 100
"""Scans that a progressive JPEG may have; ten are usual, and each costs as much as all pixels."""
PNG_HEAD = b"\x89PNG\r\n\x1a\n"
START_OF_SCAN = b"\xff\xda"
LOSSY_WEBP = b"VP8 "
GIF_EXTENSION = b"\x00!"


def decode_image(data: bytes, limits: ImageSettings, where: str) -> ClientImage:
    """Decode an image file; rewrite it if it is not upright, or in a mode that processors read differently.

    Args:
        where: the image's place in the request, for messages.

    Raises:
        InvalidImage: the file is no still PNG, JPEG, WebP or GIF, or is damaged.
        ImageTooLarge: the image exceeds a limit.
    """
    if len(data) > limits.file_bytes:
        raise ImageTooLarge(
            f"{where}: the image file has {len(data)} bytes; at most {limits.file_bytes} are "
            "allowed (setting images.file_bytes).",
            param=where,
        )
    kind = format_of(data)
    if kind is None:
        raise InvalidImage(
            f"{where}: the file is no PNG, JPEG, WebP or GIF, whatever its media type; send one of these.",
            param=where,
        )
    refuse_endless_headers(kind, data, where)
    with _errors_of_pillow(kind, limits, where), Image.open(BytesIO(data), formats=[kind]) as image:
        _require_size(image, limits, where)
        _require_still(image, where)
        image.load()
        _require_size(image, limits, where)  # a GIF's first frame may be larger than its header says
        return _as_client_image(image, kind, data, int(limits.file_bytes))


@contextmanager
def _errors_of_pillow(kind: str, limits: ImageSettings, where: str) -> Iterator[None]:
    """Turn what is raised while an image is decoded and rewritten into the client's error."""
    try:
        yield
    except _TooMuchWritten:
        raise ImageTooLarge(
            f"{where}: the image takes more than {limits.file_bytes} bytes when it is rewritten upright with "
            "8 bits a channel (setting images.file_bytes): send it in that form, or make it smaller.",
            param=where,
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageTooLarge(
            f"{where}: the image has far more than the {limits.pixels} pixels that are allowed "
            "(setting images.pixels).",
            param=where,
        ) from None
    except InvalidImage:
        raise
    except Exception as error:  # noqa: BLE001  # the border to Pillow, whose decoders may raise anything
        log.debug("image_undecodable", format=kind, cause=str(error))
        raise InvalidImage(
            f"{where}: the {kind} file is damaged or incomplete and cannot be decoded; send it whole.",
            param=where,
        ) from None


def _require_size(image: Image.Image, limits: ImageSettings, where: str) -> None:
    width, height = image.size
    shorter, longer = min(width, height), max(width, height)
    found = f"{where}: the image is {width}x{height} pixels"
    if longer > limits.side_max or width * height > limits.pixels:
        raise ImageTooLarge(
            f"{found}; at most {limits.side_max} a side and {limits.pixels} in all are allowed: make it "
            "smaller (settings images.side_max and images.pixels).",
            param=where,
        )
    if shorter < limits.side_min:
        raise InvalidImage(
            f"{found}; each side must have at least {limits.side_min} (setting images.side_min).", param=where
        )
    if longer > limits.aspect * shorter:
        raise InvalidImage(
            f"{found}; one side may be at most {limits.aspect} times as long as the other: crop it "
            "(setting images.aspect).",
            param=where,
        )


def _require_still(image: Image.Image, where: str) -> None:
    # A JPEG may hold a second image for other screens (MPO); the first is the one shown.
    if image.format in MEDIA_TYPES and getattr(image, "is_animated", False):
        raise InvalidImage(
            f"{where}: the image is animated, and only still images are supported; send one frame of it.",
            param=where,
        )


def _as_client_image(image: Image.Image, kind: str, data: bytes, limit: int) -> ClientImage:
    turned = _orientation(image) != UPRIGHT
    plain = image.mode in PLAIN_MODES and not _has_key_colour(image)
    if plain and not turned:
        return ClientImage(data, MEDIA_TYPES[kind], *image.size)
    shown = _plain(ImageOps.exif_transpose(image) if turned else image)
    lossy = is_lossy(kind, data) and shown.mode in ("L", "RGB")
    return _written(shown, "JPEG" if lossy else "PNG", limit)


def _orientation(image: Image.Image) -> int:
    """Return EXIF's orientation, 1 to 8; 1 if there is none, or none that can be read."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    except Exception:  # noqa: BLE001  # as above; unreadable metadata does not matter
        return UPRIGHT
    return value if value in range(1, 9) else UPRIGHT


def _has_key_colour(image: Image.Image) -> bool:
    """Check whether one colour or palette entry is transparent without an alpha channel."""
    return "transparency" in image.info and image.mode not in ("LA", "RGBA")


def _plain(image: Image.Image) -> Image.Image:
    """Convert to eight bits a channel: RGBA if anything is transparent, else RGB or L."""
    if image.mode in SIXTEEN_BITS:
        return image.point(lambda value: value / 257).convert("L")
    if _has_key_colour(image) or image.mode in ("PA", "La", "RGBa"):
        return image.convert("RGBA")
    return image if image.mode in PLAIN_MODES else image.convert("RGB")


class _TooMuchWritten(Exception):
    """A rewritten image exceeds the limit of a file."""


class _LimitedFile(BytesIO):
    """A file in memory with a limit.

    Args:
        limit: bytes at most.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any, /) -> int:
        """Append to the file.

        Raises:
            _TooMuchWritten: the file would exceed its limit.
        """
        if self.tell() + len(data) > self._limit:
            raise _TooMuchWritten
        return super().write(data)


def _written(image: Image.Image, kind: str, limit: int) -> ClientImage:
    """Write the pixels as a new file without metadata.

    Args:
        image: the pixels, upright and in a plain mode.
        kind: `JPEG` if they were compressed with loss before, else `PNG`.
        limit: bytes of the file at most.

    Raises:
        _TooMuchWritten: the file would exceed `limit`.
    """
    file = _LimitedFile(limit)
    image.info = {}
    if kind == "JPEG":
        image.save(file, "JPEG", quality=JPEG_QUALITY, subsampling=0, exif=b"")
    else:
        image.save(file, "PNG", compress_level=PNG_COMPRESSION)
    return ClientImage(file.getvalue(), MEDIA_TYPES[kind], *image.size)


def format_of(data: bytes) -> str | None:
    """Return Pillow's name of the format by the first bytes; None: the format is not accepted."""
    if data.startswith(PNG_HEAD):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return "GIF" if data.startswith((b"GIF87a", b"GIF89a")) else None


def is_lossy(kind: str, data: bytes) -> bool:
    """Check whether the file's pixels are compressed with loss."""
    return kind == "JPEG" or (kind == "WEBP" and LOSSY_WEBP in _webp_chunks(data))


def _webp_chunks(data: bytes) -> Iterator[bytes]:
    """Yield the names of a WebP's chunks. Source: RFC 9649, section 2.3."""
    at = len(b"RIFF....WEBP")
    for _ in range(PARTS):
        if at + 8 > len(data):
            return
        yield data[at : at + 4]
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + size + size % 2


def refuse_endless_headers(kind: str, data: bytes, where: str) -> None:
    """Refuse a file of so many small parts that reading them takes very long.

    Raises:
        InvalidImage: the file has more parts than the limits above allow.
    """
    endless = {"PNG": _png, "JPEG": _jpeg, "GIF": _gif}.get(kind)
    if endless is not None and endless(data):
        raise InvalidImage(
            f"{where}: the {kind} file has too many parts; save the image again, without metadata.",
            param=where,
        )


def _png(data: bytes) -> bool:
    """Check whether a PNG has more chunks than an image needs."""
    at, pixels, others = len(PNG_HEAD), 0, 0
    while at + 8 <= len(data) and others <= PARTS and pixels <= PIXEL_PARTS:
        pixels += data[at + 4 : at + 8] == b"IDAT"
        others += data[at + 4 : at + 8] != b"IDAT"
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return others > PARTS or pixels > PIXEL_PARTS


def _jpeg(data: bytes) -> bool:
    """Check whether a JPEG has more segments before its first scan, or more scans, than an image needs."""
    at, seen = data.find(b"\xff", 2), 0
    while 0 <= at <= len(data) - 4 and seen <= PARTS and data[at : at + 2] != START_OF_SCAN:
        seen += 1
        padding = data[at + 1] in (0xFF, 0x00)
        at = data.find(b"\xff", at + 1 if padding else at + 2 + int.from_bytes(data[at + 2 : at + 4], "big"))
    return seen > PARTS or data.count(START_OF_SCAN) > SCANS


def _gif(data: bytes) -> bool:
    """Check whether a GIF has more extensions than a still image needs.

    Pixels look like an extension about once in 64 KiB.
    """
    return data.count(GIF_EXTENSION) > PARTS
