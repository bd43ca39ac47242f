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
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # after the skip

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
    Operation.COMPLETIONS: {"prompt": "x"},
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
NAMED: dict[Operation, dict[str, Any]] = {
    Operation.CHAT: {"type": "function", "function": {"name": "look"}},
    Operation.MESSAGES: {"type": "tool", "name": "look"},
    Operation.RESPONSES: {"type": "function", "name": "look"},
}


class Gateway:
    """One engine behind vLLM's serving handlers, on an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, template: Path, serving: dict[str, Any]) -> None:
        self._runner = runner
        model = ModelStore(load_settings().models_folder).resolve("smollm2")
        settings = EngineSettings(
            name="m", model=str(model), serving={"chat_template": str(template)} | serving
        )
        self.engine = UnaskedEngine(settings)
        self._handlers = runner.run(handlers_on(self.engine, settings))

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


@pytest.mark.parametrize(
    "choice", [{}, {"tool_choice": {"type": "any"}}, {"tool_choice": NAMED[Operation.MESSAGES]}]
)
def test_messages_with_tools_and_no_parser_are_a_400_too(silent: Gateway, choice: dict[str, Any]) -> None:
    error = silent.ask(Operation.MESSAGES, tools=[TOOLS[Operation.MESSAGES]], **choice)
    assert (type(error), error.param) == (InvalidRequest, "tools")
    assert "`engines.serving.tool_call_parser`" in error.message
    none = silent.ask(Operation.MESSAGES, tools=[TOOLS[Operation.MESSAGES]], tool_choice={"type": "none"})
    assert none.message == "enough"


@pytest.mark.fault("E24")
@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES])
def test_a_named_tool_without_a_parser_is_a_400(silent: Gateway, operation: Operation) -> None:
    error = silent.ask(operation, tools=[TOOLS[operation]], tool_choice=NAMED[operation])
    assert (type(error), error.param) == (InvalidRequest, "tools")


@pytest.mark.fault("E24")
def test_functions_of_old_are_a_400(calling: Gateway) -> None:
    error = calling.ask(Operation.CHAT, functions=[FUNCTION])
    assert (type(error), error.param) == (InvalidRequest, "functions")


@pytest.mark.fault("E24")
@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": [TOOLS[Operation.RESPONSES]]}], ids=str)
def test_a_choice_of_a_tool_that_a_host_runs_is_a_400_with_any_tools(
    silent: Gateway, calling: Gateway, tools: dict[str, Any]
) -> None:
    for gateway in (silent, calling):
        error = gateway.ask(Operation.RESPONSES, tool_choice={"type": "web_search_preview"}, **tools)
        assert (type(error), error.param) == (InvalidRequest, "tool_choice")


def allowed(operation: Operation, mode: str, *names: str) -> dict[str, Any]:
    """A choice of some of the tools, in the shape of a chat or of a response."""
    if operation is Operation.RESPONSES:
        refs: list[dict[str, Any]] = [{"type": "function", "name": name} for name in names]
        return {"type": "allowed_tools", "mode": mode, "tools": refs}
    refs = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": refs}}


@pytest.mark.fault("E24")
@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.RESPONSES])
def test_allowed_tools_are_the_only_ones_that_the_model_sees(calling: Gateway, operation: Operation) -> None:
    other = {"name": "other", "parameters": {"type": "object"}}
    wrapped = (
        {"type": "function", "function": other}
        if operation is Operation.CHAT
        else {"type": "function"} | other
    )
    tools = [TOOLS[operation], wrapped]
    for mode, forced in (("auto", False), ("required", True)):
        calling.engine.prompts.clear()
        calling.engine.grammars.clear()
        choice = allowed(operation, mode, "look")
        assert calling.ask(operation, tools=tools, tool_choice=choice).message == "enough"
        prompt = calling.engine.renderer.tokenizer.decode(calling.engine.prompts[0]["prompt_token_ids"])
        assert "look" in prompt
        assert "other" not in prompt
        assert (calling.engine.grammars[0] is not None) is forced
    for choice, param in (
        (allowed(operation, "auto", "look", "nobody"), "tool_choice.tools"),
        (allowed(operation, "auto"), "tool_choice.tools"),
        (allowed(operation, "perhaps", "look"), "tool_choice.mode"),
    ):
        error = calling.ask(operation, tools=tools, tool_choice=choice)
        assert (type(error), error.param) == (InvalidRequest, param)


@pytest.mark.fault("E24")
@pytest.mark.parametrize(
    "constraint",
    [
        {"stop": ["x"]},
        {"logit_bias": {"5": 1.0}},
        {"bad_words": ["x"]},
        {"allowed_token_ids": [5]},
        {"min_tokens": 2},
        {"stop_token_ids": [5]},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"structured_outputs": {"regex": "a+"}},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOLS[Operation.CHAT]]},
        {"tools": [TOOLS[Operation.CHAT]], "tool_choice": "required"},
    ],
    ids=lambda constraint: next(iter(constraint)),
)
def test_what_a_beam_search_would_leave_out_is_a_400(calling: Gateway, constraint: dict[str, Any]) -> None:
    beams = {"use_beam_search": True, "n": 2, "max_tokens": 4}
    error = calling.ask(Operation.CHAT, **beams, **constraint)
    assert (type(error), error.param) == (InvalidRequest, next(iter(constraint)))
    if "tools" not in constraint:
        error = calling.ask(Operation.COMPLETIONS, **beams, **constraint)
        assert (type(error), error.param) == (InvalidRequest, next(iter(constraint)))
    neutral = {"stop": [], "repetition_penalty": 1.0, "response_format": {"type": "text"}, "min_tokens": 0}
    assert calling.ask(Operation.CHAT, **beams, **neutral).message == "enough"


def test_vllm_leaves_constraints_out_of_a_beam_search_still() -> None:
    """When this fails, vLLM's beam search may hold some constraints: `handlers.UNSEARCHED` can be smaller."""
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}],
        use_beam_search=True,
        n=2,
        structured_outputs={"regex": "a+"},
        stop=["x"],
    )
    params = request.to_beam_search_params(4, {})
    assert params.structured_outputs is None
    assert not hasattr(params, "stop")


ANSWERS = [
    ([], ""),
    ([{"type": "refusal", "refusal": "I will not."}], "I will not."),
    (
        [
            {"type": "output_text", "text": "One. ", "annotations": []},
            {"type": "output_text", "text": "Two."},
        ],
        "One. Two.",
    ),
    ([{"type": "output_text", "text": "Then "}, {"type": "refusal", "refusal": "no."}], "Then no."),
    ("", ""),
    ("Yes.", "Yes."),
]


@pytest.mark.parametrize("whole", [True, False], ids=["item", "message"])
@pytest.mark.parametrize(("content", "text"), ANSWERS, ids=str)
def test_a_past_answer_is_taken_with_any_content(
    calling: Gateway, content: Any, text: str, *, whole: bool
) -> None:
    item = {"type": "message", "id": "msg_1", "status": "completed"} if whole else {}
    history = [
        {"role": "user", "content": "<a>"},
        item | {"role": "assistant", "content": content},
        {"role": "user", "content": "<b>"},
    ]
    calling.engine.prompts.clear()
    assert calling.ask(Operation.RESPONSES, input=history).message == "enough"
    prompt = calling.engine.renderer.tokenizer.decode(calling.engine.prompts[0]["prompt_token_ids"])
    assert prompt == f"<a>{text}<b>"


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
        for part in (
            "entrypoints",
            "parser",
            "renderers",
            "tool_parsers",
            "reasoning",
            "v1/structured_output",
        )
        for file in (folder / part).rglob("*.py")
        for text in re.findall(r'"[^"\n]*--[a-z][^"\n]*"', file.read_text())
    ]
    assert len(texts) > 5
    assert not [text for text in map(told, texts) if re.search(r"(?<![\w-])--[a-z]", text)]
