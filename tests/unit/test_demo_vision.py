"""The demo with pictures reads the metric it counts by, and says what each agent's answer took."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from baton.errors import OperatorError
from examples.demo import vision as looking
from examples.demo.client import Answer
from examples.demo.vision import CONFIG, LOOKER, MAPPER, encoded_by, table

PAGE = """\
# HELP baton_images_encoded_total Images the vision encoder ran for.
# TYPE baton_images_encoded_total counter
baton_images_encoded_total{engine="look-tiny"} 3.0
baton_images_encoded_total{engine="other"} 40.0
"""


def test_the_encoders_runs_are_those_of_one_engine() -> None:
    """Another engine's are not counted, and none is no error."""
    assert encoded_by(PAGE, LOOKER) == 3
    assert encoded_by(PAGE, "nobody") == 0
    assert encoded_by("", LOOKER) == 0


def test_the_table_says_what_was_computed_and_where_the_rest_came_from() -> None:
    """A row an agent; one that started from nothing has computed its context."""
    first = Answer("watcher", prompt_tokens=50, first_token_s=0.4)
    second = Answer("pilot", prompt_tokens=70, cached_tokens=60, first_token_s=0.1, outcome="loaded")
    shown = io.StringIO()
    Console(file=shown, width=100).print(table([first, second]))
    rows = map(str.split, shown.getvalue().splitlines())
    lines = [row for row in rows if row and row[0] in ("watcher", "pilot")]
    assert lines == [
        ["watcher", "50", "50", "0.40", "s", "computed"],
        ["pilot", "70", "10", "0.10", "s", "loaded"],
    ]


def test_the_gateway_of_the_demo_serves_the_two_models_it_asks() -> None:
    """Under the names it asks them by."""
    assert f'name = "{LOOKER}"' in CONFIG
    assert f'name = "{MAPPER}"' in CONFIG


def test_without_rasterio_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a gateway is started for a minute."""
    monkeypatch.setattr(looking.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(OperatorError, match=r"vllm-baton\[geo\]"):
        looking.run(None)
