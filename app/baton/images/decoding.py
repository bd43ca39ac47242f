"""A file that a client calls an image, opened under limits and looked through before anything else sees it.

What the file says of itself counts, not what the client calls it. Every pixel is decoded once here, so
that a file which cannot be decoded is refused before a model's own processor meets it.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import structlog
from PIL import ExifTags, Image, ImageOps

from baton.config.groups import ImageSettings
from baton.errors import ImageTooLarge, InvalidImage
from baton.images.client_image import ClientImage
from baton.images.headers import MEDIA_TYPES, format_of, is_lossy, refuse_endless_headers

PLAIN_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA"})
"""Modes that every image processor turns into RGB in the same way."""
SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I")
JPEG_QUALITY = 95
PNG_COMPRESSION = 1
UPRIGHT = 1

log = structlog.get_logger("baton.images")


def decode_image(data: bytes, limits: ImageSettings, where: str) -> ClientImage:
    """An image file as a `ClientImage`: as it came, or written anew where a model would see another image.

    Args:
        data: the file.
        limits: what an image may be.
        where: its place in the request, for messages.

    Raises:
        InvalidImage: it is no still PNG, JPEG, WebP or GIF, or is broken.
        ImageTooLarge: it is one, and too large.
    """
    if len(data) > limits.file_bytes:
        raise ImageTooLarge(
            f"{where}: the image file has {len(data)} bytes; at most {limits.file_bytes} are taken "
            "(setting images.file_bytes).",
            param=where,
        )
    kind = format_of(data)
    if kind is None:
        raise InvalidImage(
            f"{where}: this is no PNG, JPEG, WebP or GIF file, whatever its type says; send one of these.",
            param=where,
        )
    refuse_endless_headers(kind, data, where)
    try:
        with Image.open(BytesIO(data), formats=[kind]) as image:
            _require_size(image, limits, where)
            _require_still(image, where)
            image.load()
            _require_size(image, limits, where)  # a GIF's first frame may be larger than it said
            client_image = _as_client_image(image, kind, data, int(limits.file_bytes))
            client_image.digest  # noqa: B018  # computed here, in a thread, and kept
            return client_image
    except _TooMuchWritten:
        raise ImageTooLarge(
            f"{where}: the image takes more than {limits.file_bytes} bytes once it is written upright with 8 "
            "bits a channel (setting images.file_bytes): send it so yourself, or make it smaller.",
            param=where,
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageTooLarge(
            f"{where}: the image has far more than the {limits.pixels} pixels that are taken "
            "(setting images.pixels).",
            param=where,
        ) from None
    except InvalidImage:
        raise
    except Exception as error:  # noqa: BLE001  # the border to Pillow, whose decoders raise anything at all
        log.debug("image_undecodable", format=kind, cause=str(error))
        raise InvalidImage(
            f"{where}: the {kind} file is damaged or incomplete and cannot be decoded; send it whole.",
            param=where,
        ) from None


def _require_size(image: Image.Image, limits: ImageSettings, where: str) -> None:
    width, height = image.size
    shorter, longer = min(width, height), max(width, height)
    said = f"{where}: the image is {width}x{height} pixels"
    if longer > limits.side_max or width * height > limits.pixels:
        raise ImageTooLarge(
            f"{said}; at most {limits.side_max} a side and {limits.pixels} in all are taken: make it smaller "
            "(settings images.side_max and images.pixels).",
            param=where,
        )
    if shorter < limits.side_min:
        raise InvalidImage(
            f"{said}; each side must have at least {limits.side_min} (setting images.side_min).", param=where
        )
    if longer > limits.aspect * shorter:
        raise InvalidImage(
            f"{said}; one side may be at most {limits.aspect} times as long as the other: cut it "
            "(setting images.aspect).",
            param=where,
        )


def _require_still(image: Image.Image, where: str) -> None:
    # A JPEG may hold a second picture for other screens (MPO); what shows is the first.
    if image.format in MEDIA_TYPES and getattr(image, "is_animated", False):
        raise InvalidImage(
            f"{where}: the image is animated, and only still ones are taken; send one frame of it.",
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
    """EXIF's orientation, 1 to 8; 1 where it says none that can be read, which is then no one's to apply."""
    try:
        said = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    except Exception:  # noqa: BLE001  # as above; an image with unreadable metadata is still an image
        return UPRIGHT
    return said if said in range(1, 9) else UPRIGHT


def _has_key_colour(image: Image.Image) -> bool:
    """One colour, or entries of the palette, are transparent, without an alpha channel that says so."""
    return "transparency" in image.info and image.mode not in ("LA", "RGBA")


def _plain(image: Image.Image) -> Image.Image:
    """Eight bits a channel: RGBA where something shows through, else RGB or L."""
    if image.mode in SIXTEEN_BITS:
        return image.point(lambda value: value / 257).convert("L")
    if _has_key_colour(image) or image.mode in ("PA", "La", "RGBa"):
        return image.convert("RGBA")
    return image if image.mode in PLAIN_MODES else image.convert("RGB")


class _TooMuchWritten(Exception):
    """A rewritten image has grown above the limit of a file."""


class _LimitedFile(BytesIO):
    """A file in memory that takes so many bytes at most.

    Args:
        limit: in bytes.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any, /) -> int:
        """Append to the file.

        Raises:
            _TooMuchWritten: it would be larger than it may be.
        """
        if self.tell() + len(data) > self._limit:
            raise _TooMuchWritten
        return super().write(data)


def _written(image: Image.Image, kind: str, limit: int) -> ClientImage:
    """Write the pixels as a file of their own, without metadata.

    Args:
        image: the pixels, upright and in a plain mode.
        kind: `JPEG` where they were compressed with loss before, else `PNG`.
        limit: most bytes of the file.

    Raises:
        _TooMuchWritten: the file would be larger.
    """
    file = _LimitedFile(limit)
    image.info = {}
    if kind == "JPEG":
        image.save(file, "JPEG", quality=JPEG_QUALITY, subsampling=0, exif=b"")
    else:
        image.save(file, "PNG", compress_level=PNG_COMPRESSION)
    return ClientImage(file.getvalue(), MEDIA_TYPES[kind], *image.size)
