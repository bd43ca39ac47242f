"""What is told of an image file by its first bytes, and by walking its parts without decoding any."""

from __future__ import annotations

from collections.abc import Iterator

from baton.errors import InvalidImage

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""The formats that are taken, by Pillow's names."""

PARTS = 2048
"""Chunks, segments or extensions before and between the pixels; more only keep a reader busy."""
PIXEL_PARTS = 32_768
"""Chunks of pixels; encoders write 8 KiB into each, or more."""
SCANS = 100
"""Passes over a progressive JPEG's pixels; usual are ten, and each costs as much as all pixels."""

PNG_HEAD = b"\x89PNG\r\n\x1a\n"
START_OF_SCAN = b"\xff\xda"
LOSSY_WEBP = b"VP8 "
GIF_EXTENSION = b"\x00!"


def format_of(data: bytes) -> str | None:
    """Pillow's name of the format that the first bytes tell; None: none that is taken."""
    if data.startswith(PNG_HEAD):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return "GIF" if data.startswith((b"GIF87a", b"GIF89a")) else None


def is_lossy(kind: str, data: bytes) -> bool:
    """Whether the file's pixels were compressed with loss.

    Args:
        kind: Pillow's name of the format.
        data: the file.
    """
    return kind == "JPEG" or (kind == "WEBP" and LOSSY_WEBP in _webp_chunks(data))


def _webp_chunks(data: bytes) -> Iterator[bytes]:
    """The names of a WebP's chunks. Source: RFC 9649, section 2.3."""
    at = len(b"RIFF....WEBP")
    for _ in range(PARTS):
        if at + 8 > len(data):
            return
        yield data[at : at + 4]
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + size + size % 2


def refuse_endless_headers(kind: str, data: bytes, where: str) -> None:
    """Refuse a file of so many small parts that reading them is the attack.

    Raises:
        InvalidImage: it is one.
    """
    endless = {"PNG": _png, "JPEG": _jpeg, "GIF": _gif}.get(kind)
    if endless is not None and endless(data):
        raise InvalidImage(
            f"{where}: the {kind} file is made of too many parts; save the image anew, without metadata.",
            param=where,
        )


def _png(data: bytes) -> bool:
    """More chunks than a picture has."""
    at, pixels, others = len(PNG_HEAD), 0, 0
    while at + 8 <= len(data) and others <= PARTS and pixels <= PIXEL_PARTS:
        pixels += data[at + 4 : at + 8] == b"IDAT"
        others += data[at + 4 : at + 8] != b"IDAT"
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return others > PARTS or pixels > PIXEL_PARTS


def _jpeg(data: bytes) -> bool:
    """More segments before the first scan, or more scans, than a picture has."""
    at, seen = data.find(b"\xff", 2), 0
    while 0 <= at <= len(data) - 4 and seen <= PARTS and data[at : at + 2] != START_OF_SCAN:
        seen += 1
        padding = data[at + 1] in (0xFF, 0x00)
        at = data.find(b"\xff", at + 1 if padding else at + 2 + int.from_bytes(data[at + 2 : at + 4], "big"))
    return seen > PARTS or data.count(START_OF_SCAN) > SCANS


def _gif(data: bytes) -> bool:
    """More extensions than a still picture has. Pixels look like one about once in 64 KiB."""
    return data.count(GIF_EXTENSION) > PARTS
