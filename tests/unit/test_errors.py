from __future__ import annotations

import pytest
from support.errors_tree import ANSWERED

from baton import errors
from baton.handoffs.options import HandoffOptions, parse_options


def test_every_error_is_drawn_in_the_tree_with_its_status_and_code() -> None:
    drawn = errors.__doc__ or ""
    for cls in ANSWERED:
        line = next(line for line in drawn.splitlines() if f" {cls.__name__} " in line)
        assert f"{cls.status} {cls.code}" in line
        assert ("(retryable)" in line) is cls.retryable


def test_codes_are_unique_and_retryable_errors_say_when() -> None:
    codes = [cls.code for cls in ANSWERED]
    assert len(codes) == len(set(codes))
    for cls in ANSWERED:
        error = cls("text")
        assert (error.retry_after_s is not None) is cls.retryable
        assert error.body("id")["error"]["code"] == cls.code


def test_an_operator_error_ends_the_process_with_a_code() -> None:
    assert errors.SettingsError.exit_code == 2
    assert errors.StartError.exit_code == 1


@pytest.mark.fault("E16")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "handoff: Input should be an object"),
        ({"from": 5}, "handoff.from.0: Input should be a valid string"),
        ({"save": 7}, "handoff.save: Input should be an object"),
        ({"save": {"ttl_s": "soon"}}, "handoff.save.ttl_s: Input should be a valid integer"),
        ({"translate": {"via": "fax"}}, "handoff.translate.via: Input should be 'text' or 'rosetta'"),
        ({"form": []}, "handoff: There is no field 'form' here"),
    ],
    ids=str,
)
def test_options_of_a_handoff_are_refused_without_a_class_of_ours(given: object, message: str) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        parse_options(HandoffOptions, given, "handoff")
    assert refused.value.message.startswith(message)
    assert "Options" not in refused.value.message
