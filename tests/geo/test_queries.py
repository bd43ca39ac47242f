"""An upload's query says the same as a JSON request's fields."""

from __future__ import annotations

import datetime

import pytest

from baton_geo.contract import options_of_query
from baton_geo.errors import RequestInvalid


def test_every_option_has_its_spelling() -> None:
    """Lists with commas, a place as two numbers."""
    query = {
        "indices": "3,2,1",
        "outputs": "mask,preview",
        "dates": "2024-05-01,2024-06-01",
        "location": "47.5,-8.25",
        "scale": "1e-4",
        "offset": "-0.1",
        "image_format": "tiff",
        "out_data_format": "b64_json",
    }
    options = options_of_query(query, ())
    assert options.indices == (3, 2, 1)
    assert options.outputs == ("mask", "preview")
    assert options.dates == (datetime.date(2024, 5, 1), datetime.date(2024, 6, 1))
    assert (options.scale, options.offset) == (1e-4, -0.1)
    assert options_of_query({"scale": "1e-4,2e-4", "offset": "0,-1"}, ()).scale == (1e-4, 2e-4)
    assert options.location is not None
    assert (options.location.latitude, options.location.longitude) == (47.5, -8.25)


@pytest.mark.parametrize(
    ("accept", "outputs"),
    [
        ((), ("mask",)),
        (("*/*",), ("mask",)),
        (("image/png", "image/tiff"), ("preview",)),
        (("application/zip",), ("mask", "preview")),
        (("application/json",), ("mask",)),
    ],
)
def test_what_is_accepted_decides_where_the_query_does_not(
    accept: tuple[str, ...], outputs: tuple[str, ...]
) -> None:
    """A client that accepts an image need not ask for the preview too."""
    assert options_of_query({}, accept).outputs == outputs
    assert options_of_query({"outputs": "probabilities"}, accept).outputs == ("probabilities",)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"indices": "a"}, "0,1,2"),
        ({"indices": ""}, "0,1,2"),
        ({"location": "1"}, "latitude,longitude"),
        ({"location": "95,0"}, "latitude"),
        ({"outputs": "maks"}, "mask"),
        ({"scale": "0"}, "scale: is 0; must be a number from 1e-09 to 1e"),
        ({"scale": "-1"}, "scale: is -1; must be a number"),
        ({"scale": "1e10"}, "must be a number from"),
        ({"scale": "nan"}, "finite"),
        ({"scale": "ten"}, "scale: must be a number, or one a band.*scale=0.0001 with offset=-0.1"),
        ({"offset": "-1000,"}, "offset: must be a number"),
        ({"scale": "0.0001,0"}, "scale: is 0; must be a number from 1e-09 to 1e"),
        ({"offset": "-1000,inf"}, "offset.1: .*finite"),
        ({"offset": "inf"}, "finite"),
        ({"offset": "-2e9"}, r"offset: is -2e\+09; must be a number from -1e\+09 to 1e\+09"),
        ({"dates": "yesterday"}, "YYYY-MM-DD"),
        ({"indizes": "1"}, "indices"),
        ({"data": "/etc/passwd"}, "not a field"),
        ({"data_format": "path"}, "not a field"),
    ],
)
def test_a_wrong_option_is_refused_with_the_right_one(query: dict[str, str], words: str) -> None:
    """And a body is a body: no query turns it into a path."""
    with pytest.raises(RequestInvalid, match=words):
        options_of_query(query, ())
