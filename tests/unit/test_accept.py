"""`Accept` is read as RFC 9110 has it."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from baton.http.routes.pooling import chosen, wanted_types

OFFERED = ["image/tiff", "image/png", "application/json"]


@pytest.mark.parametrize(
    ("accept", "found"),
    [
        (None, "image/tiff"),
        ("", "image/tiff"),
        ("*/*", "image/tiff"),
        ("IMAGE/PNG", "image/png"),
        ("image/*", "image/tiff"),
        ("application/json, image/png;q=0.9", "application/json"),
        ("image/png;q=0.2, application/*;q=0.3", "application/json"),
        ("image/tiff;q=0, image/png", "image/png"),
        ("text/html", None),
        ("image/png;q=lots", None),
        ("image/png; level=1", "image/png"),
        ("*/*, image/tiff;q=0", "image/png"),
        ("image/*;q=0.5, image/png;q=0.9, */*;q=0.1", "image/png"),
    ],
)
def test_the_clients_favourite_that_is_offered_is_chosen(accept: str | None, found: str | None) -> None:
    """By weight, then by place; a range covers its kinds; a weight of nought or nonsense rules out."""
    headers = Headers({} if accept is None else {"accept": accept})
    assert chosen(wanted_types(headers), OFFERED) == found
