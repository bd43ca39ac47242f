from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from support.errors_tree import ANSWERED

from baton import errors
from baton.errors.invalid_fields import MOST_FAULTS, InvalidField, invalid_field
from baton.relay.asked import HandoffOptions, parse_options


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
        ({"from": 5}, "handoff.from: Input should be a valid string"),
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


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _Image(BaseModel):
    type: Literal["image"]
    url: str


@pytest.mark.fault("E16")
def test_a_body_with_thousands_of_faults_is_looked_at_once_or_not_at_all() -> None:
    """Every item of a union has the faults of all branches: comparing each with each took half a minute."""
    items = TypeAdapter(list[_Text | _Image])

    def told(wrong: int) -> InvalidField:
        with pytest.raises(ValidationError) as refused:
            items.validate_python([{"type": "text"}] * wrong)
        return invalid_field(refused.value)

    each = 3  # `text` of one branch; `type` and `url` of the other
    field = told(MOST_FAULTS // each)
    assert (field.path.rpartition(".")[2], field.message) == ("text", "Field required")
    assert told(MOST_FAULTS // each + 1) == InvalidField(
        "",
        f"Almost nothing is as it should be ({each * (MOST_FAULTS // each + 1)} faults): send less of it to learn "
        "what is wrong",
        0,
    )
