"""A browser on the gateway's page, and what the page is built with. Both are skipped where there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Request, expect, sync_playwright

ROOT = Path(__file__).parents[2]
SOURCES, BUILT = ROOT / "ui", ROOT / "app/baton/ui"
NEED = os.environ.get("TESTS_NEED", "").split(",")
"""With `browser` or `node` in it tests fail where Chromium or npm is missing, and are not skipped: so CI asks for it."""
NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDE, NARROW = (1280, 900), (390, 844)


def chromium() -> str:
    """Return the path of an installed Chromium, or skip the test."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and "browser" not in NEED:
        pytest.skip("no Chromium here: install Debian's package `chromium`")
    assert found is not None, "TESTS_NEED names browser, and no Chromium is installed"
    return found


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Chromium without a window. Its sandbox does not start for root."""
    path = chromium()
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


class Watched:
    """A tab on one gateway that keeps what must not happen in it.

    Attributes:
        complaints: lines of the console, exceptions of scripts, requests to other hosts, broken policies.
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        self._url = url
        self.complaints: list[str] = []
        self.page: Page = context.new_page()
        self.page.set_default_timeout(15_000)
        self.page.on("console", lambda line: self._said(line.type, line.text))
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.page.on("request", self._asked)

    def _said(self, kind: str, text: str) -> None:
        # The browser's own line about an answer that is no 2xx: the test that expects one looks at the page.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.complaints.append(f"{kind}: {text}")

    def _asked(self, request: Request) -> None:
        if not request.url.startswith((f"{self._url}/", "data:", "blob:")):
            self.complaints.append(f"asked {request.url}")


@contextmanager
def tab(
    browser: Browser,
    url: str,
    hash_: str = "",
    *,
    size: tuple[int, int] = WIDE,
    dark: bool = False,
    **options: Any,
) -> Iterator[Page]:
    """Open the page in a browser of its own, without history; at the end nothing may have gone wrong."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        **options,
    )
    try:
        watched = Watched(context, url)
        watched.page.goto(f"{url}/{hash_}")
        yield watched.page
        assert watched.complaints == []
        assert context.cookies() == []
    finally:
        context.close()


def ask(page: Page, text: str, box: str = "Your question") -> None:
    """Put a question into the last box of this label, and send it."""
    page.get_by_label(box).last.fill(text)
    page.get_by_label(box).last.press("Enter")


def answers(page: Page) -> Locator:
    """Find the turns of the chat."""
    return page.locator(".turn")


def answered(page: Page, number: int) -> None:
    """Wait until so many turns are shown, and the last has its answer with what was reused."""
    expect(answers(page)).to_have_count(number)
    expect(answers(page).nth(number - 1).locator(".reused")).to_be_visible(timeout=60_000)
    # What was reused is shown before the stream's end, and until then nothing more is sent.
    expect(answers(page).nth(number - 1).locator(".answer")).to_have_attribute("aria-busy", "false")


def axe_violations(page: Page, source: str) -> list[str]:
    """Ask axe-core what hinders whom on the page as it is now; a line for each."""
    page.evaluate(source)
    found: Sequence[dict[str, Any]] = page.evaluate(
        "async () => (await axe.run(document, {resultTypes: ['violations']})).violations"
    )
    return [
        f"{each['id']}: {each['help']}: {json.dumps([node['target'] for node in each['nodes']])}"
        for each in found
    ]


def with_node(folder: Path) -> Path:
    """Copy the page's source into a folder, with what it is built with from the registry, or skip the test.

    Returns:
        The copy; what is built there lies beside it in `app/baton/ui`.
    """
    npm = shutil.which("npm")
    if npm is None and "node" not in NEED:
        pytest.skip("no npm here: install Node.js 20 or later")
    assert npm is not None, "TESTS_NEED names node, and no npm is installed"
    copy = folder / "ui"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("node_modules"))
    installed = run_npm(copy, "ci", "--ignore-scripts", "--prefer-offline")
    if installed.returncode and "node" not in NEED:
        pytest.skip("npm's registry does not answer")
    assert installed.returncode == 0, installed.stderr
    return copy


def run_npm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run npm in a folder."""
    command = ["npm", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
