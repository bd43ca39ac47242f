"""The page on real engines: one fork and one map."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from support.browsers import ROOT, answered, ask, axe_violations, tab
from support.gateways import RealGateway

pytestmark = pytest.mark.engine
SCENE = ROOT / "plugins/baton_geo/flood/scene.tif"
STORY = "The ship Anna left the port of Rijeka in the morning with salt and oranges for Venice. " * 12


def test_a_fork_starts_from_what_the_first_answer_left(browser: Browser, real_gateway: RealGateway) -> None:
    """Both branches go on from the same context, hardly any of which is computed again, and the page says so."""
    with tab(browser, real_gateway.url) as page:
        page.get_by_label("Engine").select_option("smollm2")
        page.get_by_text("Options").click()
        page.get_by_label("Longest answer, tokens").fill("12")
        for number, question in enumerate((STORY, "What did she carry?"), 1):
            ask(page, question)
            answered(page, number)
        page.get_by_role("button", name="Fork from here").click()
        ask(page, "Where did she go?")
        last = page.locator(".turn").nth(1)
        expect(last).to_contain_text("2 of 2")
        expect(last.locator(".reused")).to_contain_text(
            re.compile(r"(loaded from the store|still in the engine's prefix cache)"), timeout=60_000
        )
        told = last.locator(".reused strong").inner_text()
        not_computed, prompt = (int(each.replace(",", "")) for each in re.findall(r"[\d,]+", told)[:2])
        assert 0.8 * prompt < not_computed < prompt


def test_a_map_is_drawn_laid_over_its_scene_and_asked_about(
    browser: Browser, real_gateway: RealGateway, axe: str, tmp_path: Path
) -> None:
    """The layers are of one size, the mask can be had as a file, and the question about it is a context."""
    with tab(browser, real_gateway.url, "#/map") as page:
        page.get_by_label("Scene").set_input_files(SCENE)
        expect(page.locator(".before")).to_contain_text("NIR")
        page.get_by_role("button", name="Draw the map").click()
        expect(page.get_by_role("table", name="Areas of the classes")).to_contain_text(
            "water", timeout=120_000
        )
        sizes = page.evaluate(
            "[...document.querySelectorAll('.layers img')].map((one) => [one.naturalWidth, one.naturalHeight])"
        )
        assert len(sizes) == 2
        assert sizes[0] == sizes[1]
        assert sizes[0][0] > 100
        page.get_by_label("Classes over the scene").fill("0")
        assert page.evaluate("document.querySelectorAll('.layers img')[1].style.opacity") == "0"
        with page.expect_download() as download:
            page.get_by_role("button", name="mask.tif").click()
        download.value.save_as(tmp_path / "mask.tif")
        assert (tmp_path / "mask.tif").read_bytes()[:4] in (b"II*\0", b"II+\0")
        assert axe_violations(page, axe) == []
        page.get_by_role("region", name="The map").get_by_label("Engine to ask").select_option("smollm2")
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator(".turn")).to_contain_text("Areas:")
        expect(page.locator(".reused")).to_be_visible(timeout=120_000)
        page.goto(f"{real_gateway.url}/#/contexts")
        expect(page.get_by_role("link", name=re.compile("Map of scene.tif")).first).to_be_visible()
