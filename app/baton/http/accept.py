"""Choose the media type of an answer by the `Accept` header (RFC 9110, section 12.5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from starlette.datastructures import Headers

JSON = "application/json"
ZIP = "application/zip"
ANYTHING = "*/*"
Wanted: TypeAlias = list[tuple[str, float]]
"""Media ranges with their weights, in the order of the header."""


def wanted_types(headers: Headers) -> Wanted:
    """Return the media ranges of `Accept` without parameters; without the header, `*/*`."""
    parts = ",".join(headers.getlist("accept")).split(",")
    return [(name, weight) for name, weight in map(_weighed, parts) if name] or [(ANYTHING, 1.0)]


def names_of(wanted: Wanted) -> list[str]:
    """Return the media ranges with a weight above 0, the most wanted first."""
    return [name for name, weight in sorted(wanted, key=lambda item: -item[1]) if weight > 0]


def _weighed(part: str) -> tuple[str, float]:
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                return name, float(value)
            except ValueError:
                return name, 0.0
    return name, 1.0


def chosen(wanted: Wanted, offered: Sequence[str]) -> str | None:
    """Choose the offered media type with the greatest weight.

    Among equals, the first of the header wins, then the first that is offered.

    Returns:
        None: the client accepts none of them.

    Example:
        >>> chosen([("image/*", 1.0), ("application/json", 0.5)], ["application/json", "image/tiff"])
        'image/tiff'
    """
    ranked = [(*_rank(wanted, media_type), media_type) for media_type in offered]
    best = min(ranked, key=lambda item: (-item[0], item[1]), default=None)
    return best[2] if best is not None and best[0] > 0 else None


def _rank(wanted: Wanted, media_type: str) -> tuple[float, int]:
    """Return the weight and position of the most specific range that matches `media_type`."""
    main = media_type.partition("/")[0]
    for precise in (media_type, f"{main}/*", ANYTHING):
        for place, (name, weight) in enumerate(wanted):
            if name == precise:
                return weight, place
    return 0.0, len(wanted)
