"""How many files of the gateway a request runs through: more than its budget is a wall where a door was."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gateways import FakeGateway, run_fake
from support.handoff_requests import leave, post
from support.sample_plugins import plugin

from baton.engines.fake.engine import FakeEngine
from baton.http.answer import MEDIA
from baton.images.parts import IMAGES, OTHER_TYPES
from baton_geo.plugin import GeoProcessor
from training.flood_tiny.predict import SHIPPED

ROOT = Path(__file__).parents[2]
PRODUCT = tuple(str(ROOT / folder) for folder in ("app", "connectors", "plugins"))
CHAT = {"model": "plain", "messages": [{"role": "user", "content": "1 2"}], "max_tokens": 1}
BUDGETS = {"chat": 24, "save": 44, "load": 45, "scene": 31}
"""Files of the gateway, of its fake engine too, that a request may execute; an engine's own are beside them."""
NOT_NAMED = (
    "http/body/schemas.py",
    "http/body/trial.py",
    "http/request_images.py",
    "images/",
    "library/",
    "pooling/",
    "relay/",
    "responses/",
)
"""What a chat that names neither schemas, images nor handoffs has no use for."""
TRIES = 4
"""A request may run more than it needs, by chance: counted is what runs in each of so many tries."""
SCENE = ROOT / "plugins/baton_geo/flood/scene.tif"


class MapEngine(FakeEngine):
    """An engine with a map model's IO processor; of the shipped model it says of every pixel that it is dry."""

    shape = (2, 1, 1)
    until: Callable[[], Awaitable[object]] | None = None
    """Waited for before each answer."""

    async def encode(self, prompt: Any, *_: Any, **__: Any) -> Any:
        if self.until is not None:
            await self.until()
        dry = torch.zeros((len(prompt["multi_modal_data"]["image"]["tiles"]), *self.shape))
        dry[:, 0] = 1
        return SimpleNamespace(
            prompt_token_ids=prompt["prompt_token_ids"],
            outputs=SimpleNamespace(data=dry),
            request_id="",
            finished=True,
        )


@contextmanager
def map_engine(spool: Path, config: dict[str, Any] | None = None, **given: Any) -> Iterator[MapEngine]:
    config = config or json.loads((SHIPPED / "config.json").read_text())
    model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config))
    settings: Any = SimpleNamespace(
        model_config=model, additional_config={"baton_geo": {"spool": str(spool), **given}}
    )
    renderer: Any = None
    with closing(GeoProcessor(settings, renderer)) as processor:
        engine = MapEngine("map", pooling=True, plugin=plugin(processor))
        engine.shape = processor._card.output
        yield engine


class Ways:
    """Records which files of the product execute a function while a request is answered.

    What tasks do that were there before the request is the background's, however slowly it is answered.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._recording = False

    def profile(self, frame: Any, event: str, _arg: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_name == "<module>" or not code.co_filename.startswith(PRODUCT):
            return
        loop = asyncio._get_running_loop()
        self._loop = loop or self._loop
        if self._recording and (loop is None or asyncio.current_task(loop) not in self._background):
            self._seen.add((code.co_filename, code.co_qualname))

    def files(self, ask: Callable[[], object]) -> set[str]:
        """The files, from `app/baton` on where they are of it, that every one of several requests executes."""
        every: set[tuple[str, str]] | None = None
        for _ in range(TRIES):
            assert self._loop is not None
            self._seen, self._background = set(), asyncio.all_tasks(self._loop)
            self._recording = True
            ask()
            self._recording = False
            every = self._seen if every is None else every & self._seen
        assert every is not None
        return {file.removeprefix(f"{ROOT}/app/baton/").removeprefix(f"{ROOT}/") for file, _ in every}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeGateway, Ways]]:
    ways, before = Ways(), threading.getprofile()
    threading.setprofile(ways.profile)  # of the threads that begin now
    try:
        with (
            map_engine(tmp_path_factory.mktemp("spool")) as of_maps,
            run_fake(FakeEngine("a", supports_handoffs=True), FakeEngine("plain"), of_maps) as gateway,
        ):
            post(gateway, CHAT, "/v1/chat/completions")  # what happens once has happened
            leave(gateway)
            send_scene(gateway)
            yield gateway, ways
    finally:
        threading.setprofile(before)


def send_scene(gateway: FakeGateway) -> None:
    headers = {"content-type": "image/tiff", "accept": "image/tiff"}
    with gateway.client(headers=headers) as client:
        answer = client.post("/pooling?model=map", content=SCENE.read_bytes())
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/tiff"), answer.text


def way(traced: tuple[FakeGateway, Ways], name: str) -> set[str]:
    gateway, ways = traced
    if name == "chat":
        return ways.files(lambda: post(gateway, CHAT, "/v1/chat/completions"))
    if name == "scene":
        return ways.files(lambda: send_scene(gateway))
    body = CHAT | {"model": "a"}
    saving = body | {"handoff": {"save": True}}
    if name == "save":
        return ways.files(lambda: post(gateway, saving, "/v1/chat/completions"))
    left = post(gateway, saving, "/v1/chat/completions").json()["handoff"]["id"]
    return ways.files(lambda: post(gateway, body | {"handoff": {"from": left}}, "/v1/chat/completions"))


@pytest.mark.parametrize("name", BUDGETS)
def test_a_request_runs_through_few_files(traced: tuple[FakeGateway, Ways], name: str) -> None:
    files = way(traced, name)
    assert len(files) <= BUDGETS[name], "\n".join(["more files than the budget:", *sorted(files)])
    assert {"http/answer.py", "http/protocol.py", "admission/tenants.py"} <= files, (
        "the trace sees the gateway"
    )


def test_what_a_body_does_not_name_does_not_run(traced: tuple[FakeGateway, Ways]) -> None:
    assert not [file for file in way(traced, "chat") if file.startswith(NOT_NAMED)]
    of_others = ("relay/rosetta.py", "relay/translate.py", "relay/join.py", "relay/move.py", "relay/ahead.py")
    assert not [file for name in ("save", "load") for file in way(traced, name) if file.startswith(of_others)]


PAGE = (ROOT / "docs/explanation/request.md").read_text()
SECTIONS = {
    "chat": "A chat",
    "save": "A chat that saves a handoff",
    "load": "A chat that continues a handoff",
    "scene": "A GeoTIFF",
}
OF_ENGINES = ("engines/vllm/", "connectors/")
"""A fake engine stands in their place."""


def steps(title: str) -> list[str]:
    """The files that the numbered steps of a section of the page name."""
    section = (
        PAGE.partition(f"## {title}\n")[2]
        .partition("\n## ")[0]
        .partition("\n\nWhere handoffs are automatic")[0]
        .partition("\n\nIn that process")[0]
    )
    numbered = section[section.index("\n1. ") :]
    return re.findall(r"`([\w/]+\.py)`", numbered)


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_names_the_files_that_a_request_passes(traced: tuple[FakeGateway, Ways], name: str) -> None:
    named = steps(SECTIONS[name])
    assert 7 < len(named) <= 15
    assert len({*named, *steps(SECTIONS["chat"])}) <= 25
    passed = way(traced, name)
    assert not [file for file in named if file not in passed and not file.startswith(OF_ENGINES)]


@pytest.mark.parametrize("kind", sorted(IMAGES | OTHER_TYPES | {"image"}))
def test_every_body_that_holds_media_is_searched_for_them(kind: str) -> None:
    """A body without these words is not searched; JSON may write each letter as an escape."""
    assert MEDIA.search(f'{{"type":"{kind}"}}'.encode())
    assert MEDIA.search(rb'{"type":"\u0069nput_\u0061udio"}')
    assert not MEDIA.search(b'{"model":"m","messages":[{"role":"user","content":"hello"}]}')
