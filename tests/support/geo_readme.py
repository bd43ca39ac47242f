"""What plugins/baton_geo/README.md shows, for the tests that run it."""

from __future__ import annotations

import shlex
from pathlib import Path

from markdown_it import MarkdownIt

README = Path(__file__).parents[2] / "plugins" / "baton_geo" / "README.md"


def blocks(language: str) -> list[str]:
    """The code blocks of a language, in order."""
    tokens = MarkdownIt().parse(README.read_text())
    return [token.content for token in tokens if token.type == "fence" and token.info == language]


def server_command() -> list[str]:
    """The words of the command that starts plain vLLM's server."""
    (shown,) = [block for block in blocks("") if "vllm.entrypoints.openai.api_server" in block]
    return shlex.split(shown.replace("\\\n", " "))


def rows(heading: str) -> dict[str, list[str]]:
    """The first table after a heading, or with this line as its head: its cells by the first, without backquotes."""
    lines = README.read_text().splitlines()
    table: dict[str, list[str]] = {}
    for line in lines[lines.index(heading) :]:
        if line.startswith("|"):
            first, *others = (cell.strip() for cell in line.strip("|").split("|"))
            table[first.strip("`")] = others
        elif table:
            break
    return table
