"""Recognise the media types of request bodies."""

from __future__ import annotations

from starlette.requests import Request

UPLOAD_TYPES = frozenset(
    {
        "application/octet-stream",
        "image/geotiff",
        "image/jpeg",
        "image/png",
        "image/tiff",
        "image/webp",
    }
)
"""Media types of `POST /pooling` whose body is a file, not JSON."""


def media_type_of(request: Request) -> str:
    """Return the body's media type in lower case, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
