"""Read an image file's format and structure from its headers, without decoding pixels."""

from __future__ import annotations

from collections.abc import Iterator

from baton.errors import InvalidImage

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
    """Return whether the file's pixels are compressed with loss.

    Args:
        kind: Pillow's name of the format.
    """
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
    """Return whether a PNG has more chunks than an image needs."""
    at, pixels, others = len(PNG_HEAD), 0, 0
    while at + 8 <= len(data) and others <= PARTS and pixels <= PIXEL_PARTS:
        pixels += data[at + 4 : at + 8] == b"IDAT"
        others += data[at + 4 : at + 8] != b"IDAT"
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return others > PARTS or pixels > PIXEL_PARTS


def _jpeg(data: bytes) -> bool:
    """Return whether a JPEG has more segments before its first scan, or more scans, than an image needs."""
    at, seen = data.find(b"\xff", 2), 0
    while 0 <= at <= len(data) - 4 and seen <= PARTS and data[at : at + 2] != START_OF_SCAN:
        seen += 1
        padding = data[at + 1] in (0xFF, 0x00)
        at = data.find(b"\xff", at + 1 if padding else at + 2 + int.from_bytes(data[at + 2 : at + 4], "big"))
    return seen > PARTS or data.count(START_OF_SCAN) > SCANS


def _gif(data: bytes) -> bool:
    """Return whether a GIF has more extensions than a still image needs.

    Pixels look like an extension about once in 64 KiB.
    """
    return data.count(GIF_EXTENSION) > PARTS
