"""A table as one test: thousands of tests of a row each cost more than what they check."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(name: str, rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for every row of a table, as one test that goes on after a row that fails, and names all that did.

    Fixtures are shared by the rows.

    Args:
        name: the test's argument that takes a row.
        rows: the table; it must not be empty.
    """
    table = list(rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def whole(**fixtures: Any) -> None:
            assert table, "the table is empty"
            failures = []
            for row in table:
                try:
                    test(**fixtures, **{name: row})
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # it is told below
                    told = "".join(traceback.format_exception(error, limit=-2))
                    failures.append(f"{name} {row!r}: {told}")
            if failures:
                pytest.fail("\n".join([f"{len(failures)} of {len(table)} failed", *failures]), pytrace=False)

        signature = inspect.signature(test)
        others = [parameter for key, parameter in signature.parameters.items() if key != name]
        whole.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]  # what pytest reads
        del whole.__wrapped__  # where it would read the other one
        return whole

    return decorate
