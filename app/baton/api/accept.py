"""What kind of answer a client wants, by its `Accept` header (RFC 9110, section 12.5.1)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers

JSON = "application/json"
ZIP = "application/zip"
ANYTHING = "*/*"


def wanted_types(headers: Headers) -> list[str]:
    """The media ranges of `Accept` without their parameters, the favourite first; none given: anything."""
    weighed = [_weighed(part) for part in ",".join(headers.getlist("accept")).split(",")]
    named = [(name, weight) for name, weight in weighed if name]
    named.sort(key=lambda item: -item[1])
    return [name for name, weight in named if weight > 0] if named else [ANYTHING]


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


def chosen(wanted: Sequence[str], offered: Sequence[str]) -> str | None:
    """The first offered media type that the client's favourite range covers; None: no range covers any."""
    for media_range in wanted:
        for media_type in offered:
            if covers(media_range, media_type):
                return media_type
    return None


def covers(media_range: str, media_type: str) -> bool:
    """Whether `image/*`, say, covers `image/tiff`."""
    main, _, sub = media_range.partition("/")
    return media_range in (ANYTHING, media_type) or (sub == "*" and media_type.startswith(f"{main}/"))
