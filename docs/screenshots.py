"""Take the pictures of the page for README and docs from a running gateway: `make screenshots`.

It wants a gateway without keys that has a chat engine that hands over and a map engine, as `make serve`
starts it, and an installed Chromium. What it asks stays among the gateway's contexts.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, FloatRect, Page, ViewportSize, expect, sync_playwright

FOLDER = Path(__file__).parent / "page"
SCENE = Path(__file__).parents[1] / "plugins/baton_geo/flood/scene.tif"
WIDE: ViewportSize = {"width": 1200, "height": 800}
NARROW: ViewportSize = {"width": 390, "height": 780}
WITHIN_MS = 120_000
LOAD = """() => { for (let number = 0; number < 6; number++) setTimeout(() => fetch('v1/chat/completions', {
  method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify({
    model: MODEL, max_tokens: 150, ignore_eos: true, messages: [{role: 'user', content: 'Count. ' + number}]})
  }), number * 2500) }"""
"""Requests that overlap, for the lines of an engine's card."""


def main(url: str) -> None:
    """Take all of them; a picture that is there is replaced."""
    FOLDER.mkdir(exist_ok=True)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("screenshots: no Chromium here; install Debian's package `chromium`")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox does not start for root
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        expect.set_options(timeout=WITHIN_MS)
        take_wide(browser, url)
        take_narrow(browser, url)
        browser.close()


def take_wide(browser: Browser, url: str) -> None:
    """Go through the views once, on a wide screen in the light theme."""
    page = opened(browser, url, WIDE, "light")
    converse(page)
    take(page, "chat")
    page.get_by_role("button", name="Side by side").click()
    take(page, "branches")
    page.goto(f"{url}/#/contexts")
    expect(page.locator("tbody tr").first).to_be_visible()
    take(page, "contexts", height=340)
    page.goto(f"{url}/#/engines")
    model = page.locator(".engine h2").first.inner_text()
    page.evaluate(LOAD.replace("MODEL", json.dumps(model)))
    page.wait_for_timeout(24_000)  # some of the two minutes that its lines are of
    take(page, "engines", height=360)
    page.goto(f"{url}/#/map")
    page.get_by_label("Scene").set_input_files(SCENE)
    page.get_by_role("button", name="Draw the map").click()
    expect(page.locator(".layers img").last).to_be_visible()
    page.locator(".result").evaluate("(map) => scrollTo(0, map.offsetTop - 60)")
    take(page, "map")
    page.close()


def take_narrow(browser: Browser, url: str) -> None:
    """Take the chat as a telephone shows it in the dark theme."""
    page = opened(browser, url, NARROW, "dark")
    converse(page)
    take(page, "chat-narrow")
    page.close()


def opened(browser: Browser, url: str, size: ViewportSize, theme: Literal["light", "dark"]) -> Page:
    """Open the page in a browser of its own."""
    page = browser.new_page(viewport=size, color_scheme=theme, device_scale_factor=2, reduced_motion="reduce")
    page.set_default_timeout(WITHIN_MS)
    page.goto(url)
    return page


def converse(page: Page) -> None:
    """Ask, ask on, fork."""
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Options").click()
    ask(page, "What is photosynthesis? Answer in two sentences.", 1)
    ask(page, "Which gas do plants take in?", 2)
    page.get_by_role("button", name="Fork from here").click()
    ask(page, "Why are leaves green?", 2)


def ask(page: Page, question: str, turns: int) -> None:
    """Ask, and wait for the answer of the last of so many turns."""
    page.get_by_label("Your question").fill(question)
    page.get_by_label("Your question").press("Enter")
    expect(page.locator(".turn")).to_have_count(turns)
    expect(page.locator(".turn").last.locator(".reused")).to_be_visible()
    expect(page.locator(".turn").last.locator(".answer")).to_have_attribute("aria-busy", "false")


def take(page: Page, name: str, height: int = 800) -> None:
    """Take one picture, as WebP: a fifth of a PNG; of so much of the window."""
    page.mouse.move(0, 0)
    size = page.viewport_size
    assert size is not None
    shown: FloatRect = {"x": 0, "y": 0, "width": size["width"], "height": min(height, size["height"])}
    picture = Image.open(io.BytesIO(page.screenshot(clip=shown)))
    smaller = picture.width * 5 // 8, picture.height * 5 // 8
    picture.convert("RGB").resize(smaller, Image.Resampling.LANCZOS).save(
        FOLDER / f"{name}.webp", quality=82, method=6
    )


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000")
