"""A browser for the tests of one file: Playwright's event loop must not outlive them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from support.browsers import SOURCES, running_browser, with_node


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, without any memory of earlier tests in each of its tabs."""
    with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core, of the packages that the page is built with."""
    installed = SOURCES / "node_modules/axe-core/axe.min.js"
    if not installed.exists():
        folder: Path = tmp_path_factory.mktemp("axe")
        installed = with_node(folder) / "node_modules/axe-core/axe.min.js"
        text = installed.read_text()
        shutil.rmtree(folder)
        return text
    return installed.read_text()
