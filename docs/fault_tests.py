"""Find the tests of each row of the fault catalogue, by the marker `fault` and by codes in their names."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CODE = re.compile(r"test_([a-l]\d{1,2})_")
LISTED = 5
"""Of more tests in one file only their number is shown."""
TARGETS = {"soak": "make soak", "chaos": "make chaos", "image": "make image-test"}


@dataclass(frozen=True)
class FaultTest:
    """One test of a row.

    Attributes:
        file: its path from the root of the repository.
        name: its function.
        target: the command that runs it.
    """

    file: str
    name: str
    target: str


@cache
def by_row(folder: Path) -> dict[str, list[FaultTest]]:
    """Return the tests of every row that has any, by the row's code."""
    found: dict[str, list[FaultTest]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        module = ast.parse(path.read_text())
        shared = [node.value for node in module.body if isinstance(node, ast.Assign) and _is_pytestmark(node)]
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                marks = _marks([*shared, *node.decorator_list])
                target = next((TARGETS[name] for name in TARGETS if name in marks), "make test")
                test = FaultTest(f"tests/{path.relative_to(folder)}", node.name, target)
                for row in sorted(marks.get("fault", set()) | _code(node.name)):
                    found.setdefault(row, []).append(test)
    return found


def shown(tests: list[FaultTest]) -> str:
    """Return the tests of one row as a Markdown list: a line a file."""
    lines = []
    for file, target in dict.fromkeys((test.file, test.target) for test in tests):
        names = [test.name for test in tests if (test.file, test.target) == (file, target)]
        listed = ", ".join(f"`{name}`" for name in names) if len(names) <= LISTED else f"{len(names)} tests"
        lines.append(f"- `{file}` (`{target}`): {listed}")
    return "\n".join(lines)


def _is_pytestmark(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)


def _marks(nodes: list[ast.expr]) -> dict[str, set[str]]:
    """Return the names of the marks among expressions, each with the texts it is given."""
    found: dict[str, set[str]] = {}
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Attribute):
            found.setdefault(node.attr, set())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            texts = {
                arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            }
            found.setdefault(node.func.attr, set()).update(texts)
    return found


def _code(name: str) -> set[str]:
    match = CODE.match(name)
    return {match[1].upper()} if match else set()
