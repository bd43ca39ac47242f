"""README.md is short, begins with the two commands, and leads to pages that exist."""

from __future__ import annotations

import re
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_two_commands_come_first_and_exist() -> None:
    first = next(token.content for token in MarkdownIt().parse(README) if token.type == "fence")
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make serve", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    for target in ("serve", "test", "lint", "docs", "bench", "chaos", "soak"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(README.splitlines()) <= 150


def test_every_kind_of_page_is_led_to() -> None:
    for kind in ("tutorials", "how-to", "reference", "explanation", "results"):
        assert f"](docs/{kind}/index.md)" in README
