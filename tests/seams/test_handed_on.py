"""Answers that a drain ends at every token: what was said before and after is the unbroken one. All of vLLM but the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from support.gateways import run_fake
from support.scripted_engines import ScriptedClient, ScriptedEngine  # after the skip
from vllm.v1.engine.output_processor import RequestOutputCollector

from baton.config.groups import EngineSettings
from baton.config.settings import load_settings
from baton.engines.backend import EngineState, Report
from baton.engines.vllm.engine_thread import Starts
from baton.engines.vllm.resume import Streams
from baton.http import request as gateway_requests
from baton.models.store import ModelStore
from baton.relay import run

pytestmark = pytest.mark.fault("A20")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ANSWER = "Héllo 👩‍🚀, it ends\nthere. 日本 also"
"""Several of its characters are of several tokens."""


async def nothing(*_: object) -> None:
    """Stands for what the core is told."""


class SteppingClient(ScriptedClient):
    """A client whose core says a token at a time; `cut` is called after so many of the next answer's."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.engine_core = SimpleNamespace(add_request_async=nothing, abort_requests_async=nothing)
        self.cut_after: int | None = None
        self.cut: Callable[[], object] = lambda: None
        self.core: asyncio.Task[None] | None = None

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, **_: Any
    ) -> RequestOutputCollector:
        request = self.input_processor.process_inputs(
            request_id, prompt, params, supported_tasks=("generate",)
        )
        self.input_processor.assign_request_id(request)
        self.prompts.append(list(request.prompt_token_ids or ()))
        queue = RequestOutputCollector(params.output_kind, request.request_id)
        self.output_processor.add_request(request, None, None, 0, queue)
        await self.engine_core.add_request_async(request)
        self.core = asyncio.ensure_future(self._say(request))
        return queue

    async def _say(self, request: Any) -> None:
        at, self.cut_after = self.cut_after, None
        for number, output in enumerate(self._steps(request, self._answer(self.prompts[-1]))):
            if number == at:
                self.cut()
            found = self.output_processor.process_outputs([output])
            self.output_processor.abort_requests(found.reqs_to_abort, internal=True)
            if found.reqs_to_abort:  # by a stop string: a cut would come to the next request
                return
            if number % 2 or number == 0:  # else two outputs are read at once
                await asyncio.sleep(0.002)


class SteppingEngine(ScriptedEngine):
    client: SteppingClient

    async def start(self, report: Report) -> None:
        self.client = SteppingClient(self._settings)
        self._running = await self._build(self.client, report)  # type: ignore[arg-type]  # stands for vLLM's
        self._cards = await self._running.serving.cards()
        self._state = EngineState.READY

    def _streams_of(self, client: Any) -> Any:
        return Streams(client, self._find_again, lambda *_: None, lambda: None)


class Gateway:
    def __init__(self, engine: SteppingEngine, http: httpx.Client) -> None:
        self.client, self.http = engine.client, http

    def stream(self, path: str, body: dict[str, Any], cut_after: int | None = None) -> tuple[str, Any]:
        """The text of a stream, and its last event."""
        self.client.cut_after = cut_after
        answer = self.http.post(path, json={"model": "a", "stream": True} | body)
        text = answer.text
        assert answer.status_code == 200, text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        choices = [each["choices"][0] for each in events if each.get("choices")]
        if "error" in events[-1]:
            assert not [each for each in choices if each["finish_reason"] is not None]
        said = (each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)
        return "".join(said), events[-1]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, what is left behind is written in time."""
    monkeypatch.setattr(run, "LEFT_WITHIN_S", 30)
    monkeypatch.setattr(gateway_requests, "LEAVE_WITHIN_S", 60)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = str(ModelStore(load_settings().models_folder).resolve("smollm2"))
    settings = EngineSettings(name="a", model=folder, handoff=True)
    engine = SteppingEngine(settings, folder, salt=lambda _tenant: None, starts=Starts())
    store = f"file:{tmp_path_factory.mktemp('handed') / 'store'}"
    kept: Any = {"a": {"handoff": True}}
    with run_fake(engine, told=kept, handoffs={"auto": "off", "store": store}) as running:
        engine.client.cut = running.app.state.gateway.drain.cut
        with running.client() as http:
            yield Gateway(engine, http)


@pytest.mark.parametrize(
    ("path", "body", "nothing_more"),
    [
        (TEXT, {"prompt": "Say it:"}, {"prompt": ""}),
        (TEXT, {"prompt": "Say it:", "stop": ["\n\nUser", "also"]}, {"prompt": ""}),
        (CHAT, {"messages": [{"role": "user", "content": "Say it."}]}, {"messages": []}),
    ],
    ids=["completion", "stop strings", "chat"],
)
def test_an_answer_that_is_ended_at_any_token_goes_on_with_the_next(
    gateway: Gateway, path: str, body: dict[str, Any], nothing_more: dict[str, Any]
) -> None:
    client = gateway.client
    tokens: list[int] = client.renderer.tokenizer.encode(ANSWER, add_special_tokens=False)
    tokens.append(client.renderer.tokenizer.eos_token_id)
    body = body | {"max_tokens": len(tokens)}
    client.said.append(tokens)
    whole, _ = gateway.stream(path, body)
    prompt = client.prompts[-1]
    handed_on = 0
    for at in range(1, len(tokens)):
        client.said.append(tokens)
        before, last = gateway.stream(path, body, cut_after=at)
        if "error" not in last:  # a stop string was found before
            assert before == whole
            continue
        left = last["error"]["handoff"]
        if left["id"] is None:
            assert "stop string" in left["reason"], left
            assert before.endswith(("a", "al", "als", "\n")), before
            continue
        handed_on += 1
        said = left["said_tokens"]
        assert (left["said_characters"], at - said in range(4)) == (len(before), True)
        client.said.append(tokens[said:])
        rest = body | nothing_more | {"max_tokens": len(tokens) - said, "handoff": {"from": left["id"]}}
        after, _ = gateway.stream(path, rest)
        assert client.prompts[-1] == [*prompt, *tokens[:said]]
        assert before + after == whole, at
    assert handed_on > len(tokens) // 2
