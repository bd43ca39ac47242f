"""The page at `/` in a real browser, on fake engines. Each test ends with a clean console and no foreign request."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import rasterio
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from rasterio import Affine
from support.browsers import NARROW, WIDE, answered, answers, ask, axe_violations, tab
from support.gateways import FakeGateway, Held, run_fake
from support.raw_requests import wait_for
from support.sample_plugins import Files, plugin

from baton.admission.api_keys import create_key
from baton.engines.backend import ImageInput
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.library.handoff import Handoff, HandoffState

MARKUP = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
"""What would show itself if any text became markup."""
SEES = ImageInput(limit=4, texts=("<image>",))


class Maps(Files):
    """Draws no map, and answers as the plugin that does; its class has a name that would be markup."""

    can = ("map",)

    def output_to_response(self, output: Any) -> Any:
        classes = [{"value": 0, "name": MARKUP, "pixels": 9, "share": 1.0, "hectares": None}]
        answer = {"data": "", "crs": None, "width": 3, "height": 3, "classes": classes, "nodata_pixels": 0}
        return SimpleNamespace(data=answer | {"notes": [f"no_crs: {MARKUP}"], "files": []})


def engines() -> list[FakeEngine]:
    return [
        FakeEngine("alpha", supports_handoffs=True),
        FakeEngine("beta", supports_handoffs=True, images=SEES),
        FakeEngine("plain"),
    ]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGateway]:
    """Two engines that hand over, one that does not, and one that maps."""
    maps = FakeEngine("maps", pooling=True, plugin=plugin(Maps(tmp_path)))
    store = {"store": f"file:{tmp_path / 'handoffs'}"}
    with run_fake(*engines(), maps, handoffs=store) as running:
        yield running


@pytest.fixture
def page(browser: Browser, gateway: FakeGateway) -> Iterator[Page]:
    """A wide, light tab on that gateway."""
    with tab(browser, gateway.url) as opened:
        yield opened


class TestChat:
    """Talk, and fork."""

    def test_each_answer_says_what_was_reused_and_why_nothing_was(
        self, page: Page, gateway: FakeGateway
    ) -> None:
        """The first question has nothing to start from; the second starts from the first one's context."""
        ask(page, "one two three")
        answered(page, 1)
        expect(answers(page).first).to_contain_text("there was nothing to start from")
        ask(page, "four five")
        answered(page, 2)
        last = answers(page).last
        expect(last).to_contain_text("Nothing was loaded: its KV is not in the store any more.")
        last.locator("summary").last.click()
        with gateway.client() as client:
            ids = [row["id"] for row in client.get("/v1/handoffs").json()["data"]]
        expect(last.locator(".reused")).to_contain_text(ids[0])
        expect(last.locator(".reused")).to_contain_text(ids[1])
        sent = gateway.engine("alpha").transfers
        assert len(sent) == 2
        assert page.url.count("#/chat/") == 1

    def test_forks_are_paged_through_and_lie_side_by_side(self, page: Page) -> None:
        """A fork is a question after an earlier answer; the branches beside it stay."""
        ask(page, "the beginning")
        answered(page, 1)
        ask(page, "left way")
        answered(page, 2)
        answers(page).first.get_by_role("button", name="Fork from here").click()
        expect(answers(page)).to_have_count(1)
        expect(page.get_by_label("Your question")).to_be_focused()
        expect(page.get_by_text("This starts a new branch.")).to_be_visible()
        ask(page, "right way")
        answered(page, 2)
        expect(answers(page).last).to_contain_text("2 of 2")
        answers(page).last.get_by_role("button", name="Branch before").click()
        expect(answers(page).last).to_contain_text("left way")
        expect(page.get_by_role("list", name="Branches").get_by_role("button")).to_have_count(3)
        answers(page).last.get_by_role("button", name="Side by side").click()
        left, right = page.get_by_label("Left branch"), page.get_by_label("Right branch")
        expect(left.locator(".turn")).to_contain_text("left way")
        expect(right.locator(".turn")).to_contain_text("right way")
        right.get_by_label("Your question").fill("on to the right")
        right.get_by_label("Your question").press("Enter")
        expect(right.locator(".turn")).to_have_count(2)
        expect(left.locator(".turn")).to_have_count(1)
        page.reload()
        expect(right.locator(".turn")).to_have_count(2)
        right.get_by_role("button", name="Close the right one").click()
        expect(answers(page).last).to_contain_text("left way")

    def test_asking_again_makes_a_branch_beside(self, page: Page) -> None:
        """Both answers stay."""
        ask(page, "again and again")
        answered(page, 1)
        answers(page).first.get_by_role("button", name="Ask again").click()
        expect(answers(page).first).to_contain_text("2 of 2")

    def test_an_engine_without_contexts_gets_the_whole_conversation(
        self, page: Page, gateway: FakeGateway
    ) -> None:
        """And the page says so."""
        page.get_by_label("Engine").select_option("plain")
        ask(page, "one")
        answered(page, 1)
        ask(page, "two")
        answered(page, 2)
        expect(answers(page).last).to_contain_text(
            "keeps no contexts, so the whole conversation was sent again"
        )
        bodies = gateway.engine("plain").bodies
        assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "user"]
        assert "handoff" not in bodies[1]

    def test_a_context_that_is_gone_is_made_of_the_conversation(
        self, page: Page, gateway: FakeGateway
    ) -> None:
        """A question after it is answered all the same."""
        ask(page, "one")
        answered(page, 1)
        with gateway.client() as client:
            (row,) = client.get("/v1/handoffs").json()["data"]
            client.delete(f"/v1/handoffs/{row['id']}")
        ask(page, "two")
        answered(page, 2)
        expect(answers(page).last).to_contain_text(
            "could not start from the saved context, so the whole conversation"
        )

    @pytest.mark.fault("J1")
    def test_an_engine_lost_in_the_middle_is_asked_again_when_it_is_back(self, browser: Browser) -> None:
        """What had come stays as a branch, the reason is told, and the question is asked again by itself."""
        held = Held()
        lost = FakeEngine(
            "alpha", supports_handoffs=True, behaviour=FakeBehaviour(token_seconds=0.005, wait=held)
        )
        with run_fake(lost) as gateway, tab(browser, gateway.url) as page:
            ask(page, "one two three four")
            expect(answers(page).first).to_contain_text("one two three four one")
            lost.behaviour.start_seconds = 60  # until released
            lost.die()
            expect(page.get_by_role("alert")).to_contain_text("is being restarted")
            expect(page.get_by_role("alert")).to_contain_text("asked again by itself")
            expect(answers(page).first).to_contain_text("one two three four one")
            lost.behaviour.token_seconds = 0
            held.release()
            expect(answers(page).first).to_contain_text("2 of 2", timeout=20_000)
            answered(page, 1)
            assert len(lost.bodies) == 2

    def test_stopping_keeps_the_words_and_the_next_question_goes_on_from_them(self, browser: Browser) -> None:
        """The engine is not asked any further."""
        held = Held()
        slow = FakeEngine(
            "alpha", supports_handoffs=True, behaviour=FakeBehaviour(token_seconds=0.001, wait=held)
        )
        with run_fake(slow) as gateway, tab(browser, gateway.url) as page:
            ask(page, "one two three")
            expect(answers(page).first).to_contain_text("one two three one")
            slow.behaviour.token_seconds = 60
            page.get_by_role("button", name="Stop").click()
            expect(answers(page).first).to_contain_text("You stopped it here.")
            held.release()
            ask(page, "go on")
            answered(page, 2)
            roles = [message["role"] for message in slow.bodies[-1]["messages"]]
            assert roles == ["user", "assistant", "user"]

    @pytest.mark.fault("J2")
    def test_what_others_wrote_is_text(self, page: Page, gateway: FakeGateway) -> None:
        """In questions, answers, labels of contexts and names of classes."""
        ask(page, f"{MARKUP} ```\n{MARKUP}\n```")
        answered(page, 1)
        expect(answers(page).first.locator(".answer")).to_contain_text("<script>document.title=2</script>")
        with gateway.client() as client:
            client.post("/v1/handoffs", json={"model": "alpha", "prompt": MARKUP, "label": MARKUP})
        page.goto(f"{gateway.url}/#/contexts")
        page.get_by_role("link", name=re.compile("<img")).first.click()
        expect(page.get_by_role("heading", level=1)).to_contain_text(MARKUP)
        page.goto(f"{gateway.url}/#/map")
        scene(page)
        page.get_by_role("button", name="Draw the map").click()
        expect(page.get_by_role("alert")).to_be_visible()
        assert page.title() == "Map · Baton"
        assert page.locator("img[src=x]").count() == 0

    def test_a_picture_is_dropped_where_the_engine_takes_them(self, page: Page, gateway: FakeGateway) -> None:
        """Elsewhere the page says which engine does."""
        dot = io.BytesIO()
        Image.new("RGB", (8, 8)).save(dot, "PNG")
        drop = """(box) => {
            const bytes = Uint8Array.from(atob('PNG'), (c) => c.charCodeAt(0));
            const data = new DataTransfer();
            data.items.add(new File([bytes], 'dot.png', {type: 'image/png'}));
            box.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}));
        }""".replace("PNG", base64.b64encode(dot.getvalue()).decode())
        form = page.get_by_role("form", name="Ask")
        page.get_by_label("Engine").select_option("alpha")
        form.evaluate(drop)
        expect(page.get_by_role("alert")).to_contain_text("alpha takes no pictures. Choose beta.")
        page.get_by_label("Engine").select_option("beta")
        form.evaluate(drop)
        expect(page.get_by_alt_text("dot.png")).to_be_visible()
        ask(page, "What is it?")
        answered(page, 1)
        (sent,) = gateway.engine("beta").transfers
        assert len(sent.images) == 1
        page.reload()
        expect(answers(page).first).to_contain_text("the context still has it")

    def test_tools_are_shown_and_their_results_sent(self, browser: Browser) -> None:
        """A call is shown with its arguments; what one types as its result goes to the model."""
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"city": "Rome"}'},
        }
        parsed = {"role": "assistant", "content": None, "tool_calls": [call]}
        engine = FakeEngine("alpha", behaviour=FakeBehaviour(parsed=parsed))
        with run_fake(engine) as gateway, tab(browser, gateway.url) as page:
            ask(page, "How warm is it in Rome?")
            expect(answers(page).first).to_contain_text("Calls look_up")
            expect(answers(page).first).to_contain_text('"city": "Rome"')
            engine.behaviour.parsed = None
            page.get_by_label("What look_up returns").fill("31 degrees")
            page.get_by_role("button", name="Send the results").click()
            answered(page, 2)
            sent = engine.bodies[-1]["messages"]
            assert sent[-1] == {"role": "tool", "tool_call_id": "call_1", "content": "31 degrees"}
            assert sent[-2]["tool_calls"][0]["function"]["name"] == "look_up"

    @pytest.mark.parametrize("language", ["curl", "Python", "OpenAI SDK"])
    def test_each_step_can_be_pasted_into_a_program(
        self, page: Page, gateway: FakeGateway, tmp_path: Path, language: str
    ) -> None:
        """What is copied runs as it is, and asks the engine the same."""
        ask(page, "it's \"quoted\" \\ and `JSON`\nJSON\n$HOME 🚢 '''")
        answered(page, 1)
        run_pasted(page, "Copy as… Question 1", language, tmp_path)
        shown, pasted = (body["messages"] for body in gateway.engine("alpha").bodies)
        assert pasted == shown
        with gateway.client() as client:
            assert len(client.get("/v1/handoffs").json()["data"]) == 2


def run_pasted(page: Page, button: str, language: str, folder: Path) -> None:
    """Run what a button writes for a language, as somebody would who pastes it."""
    page.get_by_role("button", name=button).click()
    page.get_by_text(language, exact=True).click()
    text = page.get_by_role("dialog").locator("code").inner_text()
    page.get_by_role("button", name="Close", exact=True).click()
    command = ["bash", "-euc", text]
    if language != "curl":
        (folder / "pasted.py").write_text(text)
        command = [sys.executable, str(folder / "pasted.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


class TestContexts:
    """The list, and one of it."""

    def test_ten_thousand_stay_quick(self, browser: Browser, gateway: FakeGateway) -> None:
        """They are read in pages, of which the browser has one; every row is there once."""
        now = time.time()
        library = gateway.app.state.gateway.library
        for number in range(10_000):
            record = Handoff(
                tenant="local",
                model="alpha",
                weights="fake",
                created_at=now - number,
                ttl_s=3600,
                expires_at=now + 3600,
                state=HandoffState.READY,
                label=f"row {number}",
            )
            library.index.add(record, 3600)
        with tab(browser, gateway.url, "#/contexts") as page:
            rows = page.locator("tbody tr")
            expect(rows).to_have_count(50)
            for first in (50, 100):
                page.get_by_role("button", name="Older").click()
                expect(rows.first).to_contain_text(f"row {first}")
            expect(page.get_by_role("navigation", name="Pages")).to_contain_text("101–150")
            page.get_by_role("button", name="Newer").click()
            expect(rows.first).to_contain_text("row 50")
            assert page.evaluate("document.querySelectorAll('*').length") < 2_000

    def test_pin_rename_join_delete(self, page: Page, gateway: FakeGateway) -> None:
        """Each act is one of the gateway's, and the list shows what it did."""
        with gateway.client() as client:
            for text in ("first", "second"):
                body = {"model": "alpha", "messages": [{"role": "user", "content": text}], "label": text}
                client.post("/v1/handoffs", json=body).raise_for_status()
            page.goto(f"{gateway.url}/#/contexts")
            page.get_by_role("button", name="Pin first").click()
            expect(page.get_by_role("button", name="Unpin first")).to_be_visible()
            for name in ("first", "second"):
                page.get_by_label(f"Choose {name}").check()
            page.get_by_role("button", name="Join them").click()
            joined = page.get_by_role("link", name="Join of first, second")
            expect(joined).to_be_visible()
            newest = client.get("/v1/handoffs").json()["data"][0]
            assert len(newest["parents"]) == 2
            page.get_by_role("link", name="second", exact=True).click()
            expect(page.locator(".said")).to_contain_text("second")
            page.get_by_label("Label").fill("renamed")
            page.get_by_role("button", name="Rename").click()
            expect(page.get_by_role("heading", level=1)).to_have_text("renamed")
            page.get_by_role("button", name="Delete").click()
            page.get_by_role("button", name="Yes, delete it").click()
            expect(page.get_by_role("heading", level=1)).to_have_text("Contexts")
            expect(page.get_by_role("link", name="renamed")).to_have_count(0)

    @pytest.mark.parametrize("language", ["curl", "Python", "OpenAI SDK"])
    def test_a_change_can_be_pasted_too(
        self, page: Page, gateway: FakeGateway, tmp_path: Path, language: str
    ) -> None:
        """And does what the buttons do."""
        with gateway.client() as client:
            made = client.post(
                "/v1/handoffs", json={"model": "alpha", "prompt": "hello", "label": "one"}
            ).json()
            page.goto(f"{gateway.url}/#/contexts/{made['id']}")
            page.get_by_label("Label").fill('it\'s "two"')
            run_pasted(page, "Copy “change” as…", language, tmp_path)
            run_pasted(page, "Copy “show” as…", language, tmp_path)
            changed = client.get(f"/v1/handoffs/{made['id']}").json()
            assert (changed["label"], changed["pin"]) == ('it\'s "two"', True)

    def test_a_chat_goes_on_from_one(self, page: Page, gateway: FakeGateway) -> None:
        """Its question starts from the context, and the context counts the use."""
        with gateway.client() as client:
            body = {
                "model": "alpha",
                "messages": [{"role": "user", "content": "The ship is red."}],
                "label": "ship",
            }
            made = client.post("/v1/handoffs", json=body).json()
            page.goto(f"{gateway.url}/#/contexts/{made['id']}")
            page.get_by_role("button", name="Ask about it").click()
            ask(page, "Which colour?")
            answered(page, 1)
            page.goto(f"{gateway.url}/#/contexts")
            expect(page.locator("tbody tr", has_text="ship").last).to_contain_text("used once")
            newest = client.get("/v1/handoffs").json()["data"][0]
            assert newest["parent"] == made["id"]

    def test_what_happens_elsewhere_is_shown_by_itself(self, page: Page, gateway: FakeGateway) -> None:
        """Another program's context appears without a click."""
        page.goto(f"{gateway.url}/#/contexts")
        expect(page.get_by_text("No contexts yet.")).to_be_visible()
        with gateway.client() as client:
            client.post(
                "/v1/handoffs", json={"model": "alpha", "prompt": "hello there", "label": "from elsewhere"}
            )
        expect(page.get_by_role("link", name="from elsewhere")).to_be_visible()


class TestEngines:
    """A card each."""

    def test_an_operator_stops_and_starts(self, page: Page, gateway: FakeGateway) -> None:
        """After a second press; the state is told in words."""
        page.goto(f"{gateway.url}/#/engines")
        card = page.get_by_role("listitem", name="alpha")
        expect(card).to_contain_text("ready")
        card.get_by_role("button", name="Stop").click()
        card.get_by_role("button", name="Yes, stop alpha").click()
        expect(card.locator(".state")).to_have_text("stopped")
        page.goto(f"{gateway.url}/#/chat")
        expect(page.get_by_label("Engine")).to_contain_text("alpha (stopped)")
        page.goto(f"{gateway.url}/#/engines")
        card.get_by_role("button", name="Start", exact=True).click()
        expect(card.locator(".state")).to_have_text("ready")

    def test_others_are_told_that_they_may_not(self, browser: Browser, tmp_path: Path) -> None:
        """No button is there that would be refused."""
        key = create_key(tmp_path / "keys.json", "acme")
        auth = {"keys_file": tmp_path / "keys.json"}
        with run_fake(*engines(), auth=auth) as gateway, tab(browser, gateway.url, "#/engines") as page:
            enter(page, key)
            page.goto(f"{gateway.url}/#/engines")
            expect(page.get_by_text("are for operators' keys")).to_be_visible()
            assert page.get_by_role("button", name="Stop").count() == 0


def enter(page: Page, key: str) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Enter").click()
    expect(page.get_by_role("heading", name="Ask something")).to_be_visible()


class TestKeys:
    """Who may see anything."""

    @pytest.mark.fault("J3")
    def test_a_wrong_key_is_told_and_shows_nothing(self, browser: Browser, tmp_path: Path) -> None:
        """The right one opens the page, stays in the tab alone, and one tenant sees nothing of another."""
        file = tmp_path / "keys.json"
        mine, theirs = create_key(file, "acme"), create_key(file, "globex")
        with run_fake(*engines(), auth={"keys_file": file}) as gateway, tab(browser, gateway.url) as page:
            expect(page.get_by_role("heading", name="This gateway asks for a key")).to_be_visible()
            expect(page.get_by_label("Key", exact=True)).to_be_focused()
            page.get_by_label("Key", exact=True).fill("bk_wrong")
            page.get_by_role("button", name="Enter").click()
            expect(page.get_by_role("alert")).to_contain_text("does not know this key")
            enter(page, mine)
            with httpx.Client(base_url=gateway.url, headers={"Authorization": f"Bearer {theirs}"}) as other:
                other.post("/v1/handoffs", json={"model": "alpha", "prompt": "secret", "label": "theirs"})
            ask(page, "mine")
            answered(page, 1)
            page.goto(f"{gateway.url}/#/contexts")
            expect(page.get_by_role("link", name="mine")).to_be_visible()
            assert page.get_by_role("link", name="theirs").count() == 0
            assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
            page.goto(f"{gateway.url}/#/key")
            page.get_by_role("button", name="Forget the key").click()
            expect(page.get_by_role("heading", name="This gateway asks for a key")).to_be_visible()
            assert mine not in page.evaluate("JSON.stringify(sessionStorage)")

    def test_a_copied_step_holds_no_key(self, browser: Browser, tmp_path: Path) -> None:
        """It names the variable that does."""
        key = create_key(tmp_path / "keys.json", "acme")
        auth = {"keys_file": tmp_path / "keys.json"}
        with run_fake(*engines(), auth=auth) as gateway, tab(browser, gateway.url) as page:
            enter(page, key)
            ask(page, "hello")
            answered(page, 1)
            page.get_by_role("button", name="Copy as… Question 1").click()
            for language in ("curl", "Python", "OpenAI SDK"):
                page.get_by_text(language, exact=True).click()
                text = page.get_by_role("dialog").locator("code").inner_text()
                assert key not in text
                assert "BATON_API_KEY" in text


def scene(page: Page, bands: int = 6) -> None:
    """Choose a scene of some named bands."""
    names = ("BLUE", "GREEN", "RED", "NIR_NARROW", "SWIR_1", "SWIR_2")[:bands]
    profile = {"width": 30, "height": 20, "count": bands, "dtype": "int16", "nodata": -9, "crs": "EPSG:32633"}
    with rasterio.MemoryFile() as memory:
        with memory.open(driver="GTiff", transform=Affine(10, 0, 5e5, 0, -10, 5e6), **profile) as file:
            file.write(np.ones((bands, 20, 30), "int16"))
            file.descriptions = names
            file.scales = (0.0001,) * bands
            file.update_tags(PRODUCT=MARKUP)
        content = memory.read()
    page.get_by_label("Scene").set_input_files(
        {"name": "scene.tif", "mimeType": "image/tiff", "buffer": bytes(content)}
    )


class TestMap:
    """What can be shown without a model; tests/page/test_real.py draws one."""

    def test_a_scene_is_looked_at_before_anything_runs(self, page: Page, gateway: FakeGateway) -> None:
        """Its size, its bands with names and scale, its place; the gateway is not asked for that."""
        page.goto(f"{gateway.url}/#/map")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        scene(page)
        before = page.locator(".before")
        for words in (
            "30 × 20 pixels",
            "16-bit signed",
            "EPSG:32633",
            "10 × 10",
            "-9",
            "SWIR_1",
            "0.0001",
            MARKUP,
        ):
            expect(before).to_contain_text(words)
        assert not [url for url in asked if "pooling" in url]

    @pytest.mark.parametrize(
        "content", [b"", b"II*\0", b"no scene at all", b"II*\0\x08\0\0\0\xff\xff" + b"\xff" * 400]
    )
    def test_a_file_that_is_none_is_told(self, page: Page, gateway: FakeGateway, content: bytes) -> None:
        """Before it is sent anywhere."""
        page.goto(f"{gateway.url}/#/map")
        page.get_by_label("Scene").set_input_files(
            {"name": "a.tif", "mimeType": "image/tiff", "buffer": content}
        )
        expect(page.get_by_role("alert")).to_contain_text("Drop a GeoTIFF")
        assert page.get_by_role("button", name="Draw the map").count() == 0

    def test_a_gateway_without_a_map_engine_says_what_to_do(self, browser: Browser) -> None:
        """An empty view is no dead end."""
        with run_fake(*engines()) as gateway, tab(browser, gateway.url, "#/map") as page:
            expect(page.get_by_text("No engine here draws maps.")).to_be_visible()


VIEWS = ("#/chat", "#/contexts", "#/engines", "#/map", "#/key")


class TestForEverybody:
    """Keys, screen readers, small screens, dark rooms."""

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
    def test_axe_finds_nothing_and_nothing_is_cut_off(
        self, browser: Browser, gateway: FakeGateway, axe: str, dark: bool, size: tuple[int, int]
    ) -> None:
        """In every view, with something in it, and in the window with code."""
        with tab(browser, gateway.url, dark=dark, size=size) as page:
            ask(page, "a question with ```\ncode\n``` in it")
            answered(page, 1)
            ask(page, "another")
            answered(page, 2)
            answers(page).last.get_by_role("button", name="Ask again").click()
            answered(page, 2)
            answers(page).last.get_by_role("button", name="Side by side").click()
            answers(page).last.locator(".reused summary").click()
            found = {"side by side": axe_violations(page, axe)}
            answers(page).last.get_by_role("button", name="Copy as…").click()
            found["copies"] = axe_violations(page, axe)
            page.get_by_role("button", name="Close", exact=True).click()
            context = page.get_by_role("link", name="Its context").first
            context.click()
            expect(page.locator(".said")).to_contain_text("a question")
            found["context"] = axe_violations(page, axe)
            for view in VIEWS:
                page.goto(f"{gateway.url}/{view}")
                expect(page.get_by_role("heading", level=1)).to_be_visible()
                if view == "#/map":
                    scene(page)
                    expect(page.locator(".before")).to_be_visible()
                found[view] = axe_violations(page, axe)
                wide = page.evaluate(
                    "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                )
                assert wide == 0, view
            assert found == {name: [] for name in found}

    def test_everything_is_reached_by_keys(self, page: Page, gateway: FakeGateway) -> None:
        """A question is asked, forked and paged without a mouse, and what has the focus is seen."""
        expect(page.get_by_label("Your question")).to_be_visible()
        page.get_by_label("Your question").focus()
        page.keyboard.type("first")
        page.keyboard.press("Enter")
        answered(page, 1)
        page.get_by_label("Your question").focus()
        walk(page, "Ask again", back=True)
        page.keyboard.press("Enter")
        expect(answers(page).first).to_contain_text("2 of 2")
        walk(page, "Branch before", back=True)
        page.keyboard.press("Enter")
        expect(answers(page).first).to_contain_text("1 of 2")
        page.get_by_label("Your question").focus()
        walk(page, "Contexts", back=True)
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("Contexts")
        expect(page.locator("main")).to_be_focused()
        walk(page, "Choose first")
        page.keyboard.press("Space")
        expect(page.get_by_text("1 context chosen")).to_be_visible()


@pytest.mark.parametrize("place", ["#/constructor", "#/chat/nobody", "#/%", "#/contexts/nobody"])
def test_an_address_that_leads_nowhere_is_no_dead_end(
    browser: Browser, gateway: FakeGateway, place: str
) -> None:
    """The chat is shown, or why there is nothing."""
    with tab(browser, gateway.url, place) as page:
        found = page.get_by_role("heading", name="Ask something").or_(page.get_by_role("alert"))
        expect(found).to_be_visible()


def test_a_gateway_that_was_away_is_found_again(browser: Browser) -> None:
    """The page says that nothing answers, and goes on by itself."""
    with run_fake(FakeEngine("alpha")) as first:
        port = int(first.url.rpartition(":")[2])
        with tab(browser, first.url) as page:
            expect(page.get_by_label("Engine")).to_contain_text("alpha")
            first.server.should_exit = True
            expect(page.get_by_text("The gateway does not answer.")).to_be_visible(timeout=20_000)
            wait_for(lambda: port_is_free(port), "it did not end")
            with run_fake(FakeEngine("beta"), port=port):
                expect(page.get_by_text("The gateway does not answer.")).not_to_be_visible(timeout=20_000)
                expect(page.get_by_label("Engine")).to_contain_text("beta")


def port_is_free(port: int) -> bool:
    """Whether nothing listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def walk(page: Page, name: str, *, back: bool = False) -> None:
    """Press Tab until what has the focus is called so."""
    for _ in range(60):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        said = page.evaluate(
            "(document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent).trim()"
        )
        if said == name:
            return
    raise AssertionError(f"no way to {name} by keys")


def test_the_page_needs_no_key_and_only_its_own_files(gateway: FakeGateway) -> None:
    """`/` is the page under its policy; `ui.enabled = false` takes it away."""
    with gateway.client() as client:
        page = client.get("/")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert json.loads(client.get("/v1/engines").text)["operator"] is True
    with run_fake(FakeEngine("alpha"), ui={"enabled": False}) as off, off.client() as client:
        assert client.get("/").status_code == 404
