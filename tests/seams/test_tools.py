"""Tools that an engine cannot honour are refused on every route, and counted all the same."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("vllm")

import vllm  # after the skip
from openai.types.responses.tool import Tool  # after the skip
from support.vllm_handlers import UnaskedEngine, handlers_on  # after the skip

from baton.config.groups import EngineSettings  # after the skip
from baton.config.settings import load_settings  # after the skip
from baton.engines.backend import Operation  # after the skip
from baton.engines.vllm import handlers  # after the skip
from baton.engines.vllm.client import CURRENT_CALL, Call  # after the skip
from baton.engines.vllm.errors import from_response, told, translate  # after the skip
from baton.engines.vllm.handlers import CALLED_BY_CLIENTS, OF_A_HOST  # after the skip
from baton.errors import InvalidRequest  # after the skip
from baton.models.store import ModelStore  # after the skip
from baton.telemetry.ids import RequestContext  # after the skip

FUNCTION = {"name": "look", "description": "Looks at it.", "parameters": {"type": "object"}}
ASKED: dict[Operation, dict[str, Any]] = {
    Operation.CHAT: {"messages": [{"role": "user", "content": "x"}]},
    Operation.MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8},
    Operation.COUNT_TOKENS: {"messages": [{"role": "user", "content": "x"}]},
    Operation.RESPONSES: {"input": "x"},
}
TOOLS: dict[Operation, dict[str, Any]] = {
    Operation.CHAT: {"type": "function", "function": FUNCTION},
    Operation.MESSAGES: {"name": "look", "input_schema": {"type": "object"}},
    Operation.COUNT_TOKENS: {"name": "look", "input_schema": {"type": "object"}},
    Operation.RESPONSES: {"type": "function", **FUNCTION},
}


class Gateway:
    """One engine behind vLLM's serving handlers, on an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, template: Path, serving: dict[str, Any]) -> None:
        self._runner = runner
        model = ModelStore(load_settings().models_folder).resolve("smollm2")
        settings = EngineSettings(
            name="m", model=str(model), serving={"chat_template": str(template)} | serving
        )
        self._handlers = runner.run(handlers_on(UnaskedEngine(settings), settings))

    def ask(self, operation: Operation, **body: Any) -> Any:
        """The answer, or the error that a client gets; one that reached the engine says 'enough'."""
        return self._runner.run(self._ask(operation, ASKED[operation] | body | {"model": "m"}))

    async def _ask(self, operation: Operation, body: dict[str, Any]) -> Any:
        call = Call(RequestContext("id"))
        CURRENT_CALL.set(call)
        method = self._handlers.method(operation)
        assert method is not None
        try:
            answer = await method(
                self._handlers.parse(operation, body), handlers.synthetic_request(call.context)
            )
        except Exception as error:  # noqa: BLE001  # as the engine's own border does
            return translate(error, body)
        if isinstance(answer, handlers.ErrorResponse):
            return call.failure or from_response(answer)
        return answer


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat template that writes tools."""
    file = tmp_path_factory.mktemp("template") / "tools.jinja"
    file.write_text(
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    return file


@pytest.fixture(scope="module")
def silent(template: Path) -> Iterator[Gateway]:
    """An engine without a parser for calls."""
    with asyncio.Runner() as runner:
        yield Gateway(runner, template, {})


@pytest.fixture(scope="module")
def calling(template: Path) -> Iterator[Gateway]:
    serving = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with asyncio.Runner() as runner:
        yield Gateway(runner, template, serving)


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "required"}], ids=str)
@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.RESPONSES])
def test_tools_without_a_parser_are_a_400_that_names_the_setting(
    silent: Gateway, calling: Gateway, operation: Operation, choice: dict[str, Any]
) -> None:
    error = silent.ask(operation, tools=[TOOLS[operation]], **choice)
    assert type(error) is InvalidRequest
    assert "`engines.serving.tool_call_parser`" in error.message
    assert "--" not in error.message
    assert calling.ask(operation, tools=[TOOLS[operation]], **choice).message == "enough"


def test_tools_that_may_not_be_called_need_no_parser(silent: Gateway) -> None:
    for operation in (Operation.CHAT, Operation.RESPONSES):
        answer = silent.ask(operation, tools=[TOOLS[operation]], tool_choice="none")
        assert answer.message == "enough"


@pytest.mark.parametrize("kind", sorted(OF_A_HOST))
def test_tools_that_nobody_runs_here_are_a_400(silent: Gateway, calling: Gateway, kind: str) -> None:
    for gateway in (silent, calling):
        error = gateway.ask(Operation.RESPONSES, tools=[{"type": kind, "server_label": "x"}])
        assert (type(error), error.param) == (InvalidRequest, "tools[0].type")
        assert kind in error.message
    tools = [TOOLS[Operation.RESPONSES]]
    error = calling.ask(Operation.RESPONSES, tools=tools, tool_choice={"type": kind})
    assert (type(error), error.param) == (InvalidRequest, "tool_choice")


def kinds(union: Any) -> set[str]:
    """The types of tools that OpenAI's API knows."""
    found: set[str] = set()
    for part in get_args(union):
        fields = getattr(part, "model_fields", None)
        found |= set(get_args(fields["type"].annotation)) if fields else kinds(part)
    return found


def test_every_type_of_tool_is_either_the_clients_or_a_hosts() -> None:
    assert kinds(Tool) == OF_A_HOST | CALLED_BY_CLIENTS


def test_tools_are_counted_whether_or_not_their_calls_can_be_read(silent: Gateway, calling: Gateway) -> None:
    tools = [TOOLS[Operation.COUNT_TOKENS]]
    found = [
        gateway.ask(Operation.COUNT_TOKENS, **body).input_tokens
        for gateway in (silent, calling)
        for body in ({}, {"tools": tools}, {"tools": tools, "tool_choice": {"type": "any"}})
    ]
    without, with_tools, required = found[:3]
    assert without < with_tools == required
    assert found[3:] == found[:3]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "Set max_logprobs (--max-logprobs) to 5.",
            "Set max_logprobs (the setting `engines.args.max_logprobs`) to 5.",
        ),
        (
            "You must set `--enable-mm-embeds` to",
            "You must set the setting `engines.args.enable_mm_embeds` to",
        ),
        ("with --pooler-config.task.", "with the setting `engines.args.pooler_config`."),
        ("Try passing `--runner pooling` to", "Try passing the setting `engines.runner` pooling` to"),
        ("a--b -- c --- --xy", "a--b -- c --- an option that this gateway does not have"),
    ],
)
def test_a_flag_of_vllms_server_is_told_as_a_setting(theirs: str, ours: str) -> None:
    assert told(theirs) == ours


def test_no_message_for_clients_names_a_flag_that_baton_lacks() -> None:
    """Every flag in vLLM's code that answers requests is told as a setting, or as none."""
    folder = Path(vllm.__file__).parent
    texts = [
        text
        for part in ("entrypoints/openai", "entrypoints/anthropic", "entrypoints/pooling", "renderers")
        for file in (folder / part).rglob("*.py")
        for text in re.findall(r'"[^"\n]*--[a-z][^"\n]*"', file.read_text())
    ]
    assert len(texts) > 5
    assert not [text for text in map(told, texts) if re.search(r"(?<![\w-])--[a-z]", text)]
