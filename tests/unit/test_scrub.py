"""Messages of libraries are scrubbed before a client sees them."""

from __future__ import annotations

from baton.engines.scrub import scrub


def test_where_native_code_raised_an_error_is_taken_out() -> None:
    said = "Failed: [01:02:03] /project/cpp/regex_converter.cc:83: Regex parsing error at position 3"
    assert scrub(said) == "Failed: Regex parsing error at position 3"
