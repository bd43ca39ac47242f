from __future__ import annotations

from support.errors_tree import ANSWERED

from baton import errors


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
