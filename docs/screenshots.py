"""Take the pictures of the page for README and docs from a running gateway: `make screenshots`.

It wants a gateway without keys that has a chat engine that hands over and a map engine, as `make serve`
starts it, and an installed Chromium. What it asks stays among the gateway's contexts.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

FOLDER = Path(__file__).parent / "page"
SCENE = Path(__file__).parents[1] / "plugins/baton_geo/flood/scene.tif"
WIDE, NARROW = {"width": 1200, "height": 800}, {"width": 390, "height": 780}
WITHIN_MS = 120_000
LOG = (
    "This is the log of the ship Anna. On Monday we loaded salt and oranges in Rijeka. On Tuesday the wind "
    "came from the north and we lay at anchor off Cres. On Wednesday we passed Pula and saw four ships. On "
    "Thursday we reached Venice and sold the oranges. On Friday we bought glass and rope. What did we sell?"
)


def main(url: str) -> None:
    """Take all of them; a picture that is there is replaced."""
    FOLDER.mkdir(exist_ok=True)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("screenshots: no Chromium here; install Debian's package `chromium`")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox does not start for root
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        for dark in (False, True):
            take_all(browser, url, dark=dark)
        browser.close()


def take_all(browser: Browser, url: str, *, dark: bool) -> None:
    """Go through the views once, in one theme; the narrow ones last, in the same session."""
    theme = "dark" if dark else "light"
    page = browser.new_page(viewport=WIDE, color_scheme=theme, device_scale_factor=2, reduced_motion="reduce")
    page.set_default_timeout(WITHIN_MS)
    expect.set_options(timeout=WITHIN_MS)
    page.goto(url)
    converse(page)
    take(page, f"chat-{theme}")
    page.get_by_role("button", name="Side by side").click()
    take(page, f"branches-{theme}")
    page.set_viewport_size(NARROW)
    page.get_by_role("button", name="Close the right one").click()
    take(page, f"chat-narrow-{theme}")
    page.goto(f"{url}/#/contexts")
    expect(page.locator("tbody tr").first).to_be_visible()
    take(page, f"contexts-narrow-{theme}")
    page.set_viewport_size(WIDE)
    take(page, f"contexts-{theme}")
    page.goto(f"{url}/#/engines")
    expect(page.locator(".engine").first).to_be_visible()
    page.wait_for_timeout(6_000)  # some of its lines
    take(page, f"engines-{theme}")
    page.goto(f"{url}/#/map")
    page.get_by_label("Scene").set_input_files(SCENE)
    page.get_by_role("button", name="Draw the map").click()
    page.locator(".result").scroll_into_view_if_needed()
    expect(page.locator(".layers img").last).to_be_visible()
    page.locator(".result").evaluate("(map) => scrollTo(0, map.offsetTop - 60)")
    take(page, f"map-{theme}")
    page.close()


def converse(page: Page) -> None:
    """Ask, ask on, fork."""
    page.get_by_text("Options").click()
    page.get_by_label("Longest answer, tokens").fill("48")
    page.get_by_label("Temperature").fill("0")
    page.get_by_text("Options").click()
    ask(page, LOG, 1)
    ask(page, "Where were we on Tuesday?", 2)
    page.get_by_role("button", name="Fork from here").click()
    ask(page, "What did we buy?", 2)


def ask(page: Page, question: str, turns: int) -> None:
    """Ask, and wait for the answer of the last of so many turns."""
    page.get_by_label("Your question").fill(question)
    page.get_by_label("Your question").press("Enter")
    expect(page.locator(".turn")).to_have_count(turns)
    expect(page.locator(".turn").last.locator(".reused")).to_be_visible()


def take(page: Page, name: str) -> None:
    """Take one picture, as WebP: a fifth of a PNG."""
    page.mouse.move(0, 0)
    picture = Image.open(io.BytesIO(page.screenshot()))
    size = picture.width * 3 // 4, picture.height * 3 // 4
    picture.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(
        FOLDER / f"{name}.webp", quality=82, method=6
    )


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000")
