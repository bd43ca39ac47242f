"""Parse the options of an upload from its query string."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton_geo.contract import GeoOptions, geo_options
from baton_geo.errors import RequestInvalid

BY_TYPE: dict[str, tuple[str, ...]] = {
    "image/tiff": ("mask",),
    "image/png": ("preview",),
    "application/zip": ("mask", "preview"),
}
"""Outputs by accepted media type, for a request without `outputs`."""


def options_of_query(query: Mapping[str, str], accept: Sequence[str]) -> GeoOptions:
    """Parse a query string: lists with commas, a location as `latitude,longitude`.

    Args:
        query: options by name, e.g. `{"indices": "2,1,0", "location": "45.1,14.2"}`.
        accept: media types the client accepts; they decide the outputs if `query` has none.

    Raises:
        RequestInvalid: an option is unknown or wrong; `param` names it.
    """
    fields: dict[str, Any] = {name: READERS.get(name, str)(value) for name, value in query.items()}
    if "outputs" not in fields:
        named = next((BY_TYPE[kind] for kind in accept if kind in BY_TYPE), None)
        fields["outputs"] = named or ("mask",)
    try:
        return geo_options(fields)
    except RequestInvalid as error:
        message = error.message.removeprefix("data.")  # the same option of a JSON body is in `data`
        raise RequestInvalid(message, param=(error.param or "").removeprefix("data.")) from None


def _numbers(value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise RequestInvalid(
            "indices: must be band indices from 0, separated by commas, e.g. 0,1,2", param="indices"
        ) from None


def _words(value: str) -> list[str]:
    return [part.strip() for part in value.split(",")]


def _place(value: str) -> dict[str, float]:
    try:
        latitude, longitude = (float(part) for part in value.split(","))
    except ValueError:
        raise RequestInvalid(
            "location: must be latitude,longitude in degrees, e.g. 45.1,14.2", param="location"
        ) from None
    return {"latitude": latitude, "longitude": longitude}


def _number(name: str) -> Callable[[str], float | list[float]]:
    def read(value: str) -> float | list[float]:
        try:
            numbers = [float(part) for part in value.split(",")]
            return numbers if len(numbers) > 1 else numbers[0]
        except ValueError:
            raise RequestInvalid(
                f"{name}: must be a number, or one a band with commas; a pixel's value is its number times "
                "scale plus offset, e.g. offset=-1000, or scale=0.0001 with offset=-0.1",
                param=name,
            ) from None

    return read


READERS: dict[str, Callable[[str], Any]] = {
    "indices": _numbers,
    "outputs": _words,
    "dates": _words,
    "location": _place,
    "scale": _number("scale"),
    "offset": _number("offset"),
}
