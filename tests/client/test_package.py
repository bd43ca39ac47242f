"""The package stands alone: it needs httpx, has the gateway's version and license, and its README is true."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import baton
import baton_client

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "app" / "client"
MODULES = sorted((CLIENT / "baton_client").glob("*.py"))


def test_it_has_the_gateways_version_and_license() -> None:
    assert baton_client.__version__ == baton.__version__
    assert (CLIENT / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_it_imports_httpx_alone(path: Path) -> None:
    tree = ast.walk(ast.parse(path.read_text()))
    found = {
        name.partition(".")[0]
        for node in tree
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
        )
    }
    allowed = {"httpx2"} if path.name == "httpx2.py" else {"httpx"}
    assert found - sys.stdlib_module_names - {"baton_client"} <= allowed
    project = tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]
    assert [re.split(r"\W", line)[0] for line in project["dependencies"]] == ["httpx"]


def test_all_that_is_public_is_listed_and_there() -> None:
    assert baton_client.__all__ == sorted(baton_client.__all__)
    assert all(hasattr(baton_client, name) for name in baton_client.__all__)


def test_every_error_is_in_the_tree_of_its_module_and_public() -> None:
    from baton_client import errors

    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, BaseException):
            assert re.search(rf"\b{name}\b", errors.__doc__ or ""), name
            assert name in baton_client.__all__


def test_the_readmes_code_is_on_the_page_whose_code_is_run() -> None:
    page = (ROOT / "docs" / "how-to" / "python-client.md").read_text()
    blocks = re.findall(
        r"^```python\n(.*?)^```", (CLIENT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert blocks
    assert all(block in page for block in blocks)


def test_the_readme_names_every_module() -> None:
    named = set(re.findall(r"`(\w+)`", (CLIENT / "README.md").read_text()))
    assert {path.stem for path in MODULES} - {"__init__"} <= named


def test_the_page_names_every_error() -> None:
    page = (ROOT / "docs" / "how-to" / "python-client.md").read_text()
    for name in baton_client.__all__:
        kind = getattr(baton_client, name)
        if issubclass(kind, Exception) and kind is not baton_client.ApiError:
            assert f"`{name}`" in page, name
