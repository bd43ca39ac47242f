"""The tests' own tables: nothing passes because a row before it, or the whole table, did not count."""

from __future__ import annotations

import pytest
from support.table_tests import each


def test_every_row_is_run_and_all_that_fail_are_named() -> None:
    seen = []

    @each("row", ("one", "two", "three"))
    def table(row: str) -> None:
        seen.append(row)
        assert row == "two", "it is another"

    with pytest.raises(pytest.fail.Exception, match="2 of 3 failed") as failed:
        table()
    assert seen == ["one", "two", "three"]
    assert all(word in str(failed.value) for word in ("row 'one'", "row 'three'", "it is another"))
    assert "row 'two'" not in str(failed.value)


def test_an_empty_table_fails() -> None:
    @each("row", ())
    def table(row: str) -> None: ...

    with pytest.raises(AssertionError, match="empty"):
        table()
