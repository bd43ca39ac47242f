"""A reasoning parser, however it is given, takes a model's thoughts out of its answers on every route that chats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.outputs import CompletionOutput, RequestOutput  # after the skip
from vllm.renderers import renderer_from_config  # after the skip
from vllm.sampling_params import RequestOutputKind  # after the skip
from vllm.v1.engine.input_processor import InputProcessor  # after the skip

from baton.config.groups import EngineSettings  # after the skip
from baton.config.settings import load_settings  # after the skip
from baton.engines.backend import Operation  # after the skip
from baton.engines.vllm import (
    arguments,  # after the skip
    flags,  # after the skip
    handlers,  # after the skip
)
from baton.engines.vllm.client import CURRENT_CALL, Call, WatchedClient  # after the skip
from baton.errors import SettingsError  # after the skip
from baton.models.store import ModelStore  # after the skip
from baton.telemetry.ids import RequestContext  # after the skip

THOUGHT, SAID = "It is in France.", "Paris."
QUESTION = [{"role": "user", "content": "Where is the tower?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer and configuration with two of its unused tokens called as Qwen3 calls its thoughts' ends."""
    source = Path(ModelStore(load_settings().models_folder).resolve("smollm2"))
    folder = tmp_path_factory.mktemp("thinking")
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            text = file.read_text()
            for unused, name in (("<gh_stars>", "<think>"), ("<issue_start>", "</think>")):
                text = text.replace(unused, name)
            (folder / file.name).write_text(text)
    return folder


class ThinkingEngine:
    """What vLLM's serving handlers see of an engine; it thinks, and then answers, whatever it is asked."""

    errored = False

    def __init__(self, settings: EngineSettings) -> None:
        self.vllm_config = arguments.engine_args(settings, settings.model).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    def check_admission(self, _count: int = 1) -> None:
        pass

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        tokenizer = self.renderer.tokenizer
        tokens = tokenizer.encode(f"<think>{THOUGHT}</think>{SAID}", add_special_tokens=False)
        deltas = params.output_kind is RequestOutputKind.DELTA
        for number, token in enumerate(tokens, 1) if deltas else [(len(tokens), None)]:
            ids = [token] if deltas else tokens
            over = number == len(tokens)
            said = CompletionOutput(
                0, tokenizer.decode(ids), ids, None, None, finish_reason="stop" if over else None
            )
            yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [said], finished=over)


class Gateway:
    """One engine behind vLLM's serving handlers, on an event loop of its own."""

    def __init__(self, settings: EngineSettings, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._name = settings.name
        client = WatchedClient(ThinkingEngine(settings), None)  # type: ignore[arg-type]  # stands for an engine
        self._handlers = runner.run(handlers.Handlers.build(client, arguments.serving_namespace(settings)))

    def ask(self, operation: Operation, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer's JSON, or that of each event of its stream."""
        return self._runner.run(self._ask(operation, body | {"model": self._name, "max_tokens": 64}))

    async def _ask(self, operation: Operation, body: dict[str, Any]) -> list[dict[str, Any]]:
        context = RequestContext("id")
        CURRENT_CALL.set(Call(context))
        method = self._handlers.method(operation)
        assert method is not None
        answer = await method(self._handlers.parse(operation, body), handlers.synthetic_request(context))
        if not body.get("stream"):
            return [answer.model_dump()]
        events = "".join([event async for event in handlers.events(operation, answer)])
        return [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]


@pytest.fixture(scope="module")
def thinker(model: Path) -> Iterator[Gateway]:
    """A model that thinks, with the reasoning parser of its kind."""
    settings = EngineSettings(name="thinker", model=str(model), serving={"reasoning_parser": "qwen3"})
    with asyncio.Runner() as runner:
        yield Gateway(settings, runner)


def taken_apart(operation: Operation, found: list[dict[str, Any]], *, stream: bool) -> tuple[str, str]:
    """The thoughts and the words of an answer."""
    thoughts, words = "", ""
    for part in found:
        if operation is Operation.CHAT:
            message = part["choices"][0]["delta" if stream else "message"] if part["choices"] else {}
            thoughts += message.get("reasoning") or ""
            words += message.get("content") or ""
        elif operation is Operation.MESSAGES:
            blocks = [part.get("delta") or {}] if stream else part["content"]
            thoughts += "".join(block.get("thinking") or "" for block in blocks)
            words += "".join(block.get("text") or "" for block in blocks)
        elif stream:
            thoughts += (
                part["delta"] if part["type"].startswith("response.reasoning") and "delta" in part else ""
            )
            words += part["delta"] if part["type"] == "response.output_text.delta" else ""
        else:
            for item in part["output"]:
                text = "".join(piece["text"] for piece in item["content"] or ())
                thoughts, words = (
                    (thoughts + text, words) if item["type"] == "reasoning" else (thoughts, words + text)
                )
    return thoughts.strip(), words.strip()


BODIES = {
    Operation.CHAT: {"messages": QUESTION},
    Operation.MESSAGES: {"messages": QUESTION},
    Operation.RESPONSES: {"input": "Where is the tower?"},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("operation", BODIES)
def test_thoughts_come_apart_from_what_is_said(
    thinker: Gateway, operation: Operation, *, stream: bool
) -> None:
    found = thinker.ask(operation, BODIES[operation] | {"stream": stream})
    assert taken_apart(operation, found, stream=stream) == (THOUGHT, SAID)


@pytest.mark.parametrize(
    "given",
    [
        {"serving": {"reasoning_parser": "qwen3"}},
        {"args": {"reasoning_parser": "qwen3"}},
        {"args": {"structured_outputs_config": {"reasoning_parser": "qwen3"}}},
        {"args": {"reasoning_parser": "qwen3"}, "serving": {"reasoning_parser": "qwen3"}},
        ["--reasoning-parser", "qwen3"],
        ["--structured-outputs-config", '{"reasoning_parser": "qwen3"}'],
        ["--structured-outputs-config.reasoning_parser", "qwen3"],
    ],
    ids=str,
)
async def test_the_engine_and_the_handlers_know_the_parser_however_it_is_given(
    given: dict[str, Any] | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(given, dict):
        settings = EngineSettings(name="a", model="m", **given)
    else:
        settings = flags.read_command_line(["m", *given]).engine
    args = arguments.engine_args(settings, "m")
    config = args.create_structured_outputs_config()  # as `create_engine_config` does, of which it is a part
    seen = []

    async def init(_client: object, _state: object, namespace: Any, _tasks: object) -> None:
        seen.append(namespace.structured_outputs_config.reasoning_parser)

    async def tasks() -> tuple[str, ...]:
        return ("generate",)

    monkeypatch.setattr(handlers, "init_app_state", init)
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(structured_outputs_config=config), get_supported_tasks=tasks
    )
    client = WatchedClient(engine, None)  # type: ignore[arg-type]  # as above
    await handlers.Handlers.build(client, arguments.serving_namespace(settings))
    assert seen == [config.reasoning_parser] == ["qwen3"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"serving": {"reasoning_parser": "qwen33"}}, "vLLM has no 'qwen33'; did you mean 'qwen3'"),
        ({"args": {"reasoning_parser": "qwen33"}}, "vLLM has no 'qwen33'; did you mean 'qwen3'"),
        (
            {"args": {"reasoning_parser": "qwen3"}, "serving": {"reasoning_parser": "olmo3"}},
            "args.reasoning_parser and serving.reasoning_parser differ",
        ),
        ({"serving": {"tool_call_parser": "hermess"}}, "vLLM has no 'hermess'; did you mean 'hermes'"),
        ({"serving": {"enable_auto_tool_choice": True}}, "set `tool_call_parser` too"),
    ],
)
def test_a_parser_that_cannot_be_used_is_refused_before_the_engine_starts(
    given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        arguments.engine_args(EngineSettings(name="a", model="m", **given), "m")
    (line,) = caught.value.message.splitlines()
    assert reason in line


def test_a_plugin_s_parser_is_known(tmp_path: Path) -> None:
    plugin = tmp_path / "own_parser.py"
    plugin.write_text(
        "from vllm.reasoning import ReasoningParserManager\n"
        "from vllm.reasoning.identity_reasoning_parser import IdentityReasoningParser\n"
        'ReasoningParserManager.register_module("own", module=IdentityReasoningParser)\n'
    )
    serving = {"reasoning_parser": "own", "reasoning_parser_plugin": str(plugin)}
    built = arguments.engine_args(EngineSettings(name="a", model="m", serving=serving), "m")
    assert (built.reasoning_parser, built.reasoning_parser_plugin) == ("own", str(plugin))
