"""Requests of the shapes that Codex and Claude Code send, on an engine whose tokens are given: none is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import xgrammar  # after the skip
from support.scripted_engines import ScriptedGateway, run_scripted  # after the skip
from support.vllm_handlers import UnaskedEngine, handlers_on  # after the skip
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag  # after the skip

from baton.config.groups import EngineSettings  # after the skip
from baton.config.settings import load_settings  # after the skip
from baton.engines.backend import Operation  # after the skip
from baton.engines.vllm import custom_tools, handlers  # after the skip
from baton.engines.vllm.client import CURRENT_CALL, Call  # after the skip
from baton.engines.vllm.custom_tools import ResponsesRequest, VllmResponsesRequest  # after the skip
from baton.errors import InvalidRequest  # after the skip
from baton.models.catalog import SMOLLM2_TEMPLATE  # after the skip
from baton.models.store import ModelStore  # after the skip
from baton.telemetry.ids import RequestContext  # after the skip

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SERVING = {
    "chat_template": SMOLLM2_TEMPLATE,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
}
PATCH = r"""start: "*** Begin" LF change+ "*** End" LF?
change: file line+
file: "*** File: " /[^\n"]+/ LF
line: ("+" | "-" | " ") /(.*)/ LF -> kept
%import common.LF
"""
EDIT = {
    "type": "custom",
    "name": "edit",
    "description": "Edits files by a patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
}
RUN = {
    "type": "function",
    "name": "run",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
SAID_PATCH = '*** Begin\n*** File: a b.py\n-x = "\\d"\n+x = "é\\t"\t# new\n*** End\n'
CODEX: dict[str, Any] = {
    "model": "gpt-5-codex",
    "instructions": "You edit code.",
    "tools": [RUN, EDIT],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199c0de-0000-7000-8000-000000000000",
    "service_tier": None,
    "text": {"verbosity": "medium"},
    "client_metadata": {"installation_id": "0199c0de"},
    "max_output_tokens": 256,
}
"""All fields that Codex sends, and a null as other clients of the API send them."""


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


ASKED = [message("developer", "Ask before you delete."), message("user", "Mend the file.")]


def custom_call(text: str) -> str:
    """A call of the custom tool as the model says it."""
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "edit", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def gateway() -> Iterator[ScriptedGateway]:
    with run_scripted(("gpt-*", "claude-*"), **SERVING) as running:
        running.engine.client.longest = 512
        yield running


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    blocks = [block.partition("\ndata: ") for block in text.split("\n\n") if block.startswith("event: ")]
    return [(head.removeprefix("event: "), json.loads(data)) for head, _, data in blocks]


def codex(gateway: ScriptedGateway, items: list[Any], **body: Any) -> list[tuple[str, dict[str, Any]]]:
    answer = gateway.post(RESPONSES, CODEX | {"input": items} | body)
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def last_prompt(gateway: ScriptedGateway) -> str:
    return gateway.engine.text(gateway.engine.client.prompts[-1])


@pytest.mark.fault("E29")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_search_of_the_web_that_is_only_offered_is_left_out_and_told(
    gateway: ScriptedGateway, *, stream: bool
) -> None:
    search = {"type": "web_search", "external_web_access": False}
    body = CODEX | {"input": ASKED, "tools": [RUN, search], "stream": stream}
    gateway.says("Mended.")
    answer = gateway.post(RESPONSES, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Baton-Tools-Left-Out"] == "web_search"
    shown = [data["response"]["tools"] for _, data in events(answer.text) if "response" in data]
    for tools in shown if stream else [answer.json()["tools"]]:
        assert [tool["type"] for tool in tools] == ["function"]
    assert "web_search" not in last_prompt(gateway)
    prompts = len(gateway.engine.client.prompts)
    for changed, param in (
        ({"tools": [search]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tools[1].type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        (
            {"tools": [RUN, {"type": "mcp", "server_label": "x", "server_url": "https://x.example"}]},
            "tools[1].type",
        ),
    ):
        refused = gateway.post(RESPONSES, body | changed)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert len(gateway.engine.client.prompts) == prompts
    gateway.says("Mended.")
    assert "X-Baton-Tools-Left-Out" not in gateway.post(RESPONSES, body | {"tools": [RUN]}).headers


def test_a_call_of_a_custom_tool_goes_out_in_pieces_and_comes_in_again_as_it_was_said(
    gateway: ScriptedGateway,
) -> None:
    gateway.says(custom_call(SAID_PATCH))
    told = codex(gateway, ASKED)
    deltas = [data["delta"] for name, data in told if name == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 5
    assert "".join(deltas) == SAID_PATCH
    (done,) = [data["input"] for name, data in told if name == "response.custom_tool_call_input.done"]
    (item,) = [data["item"] for name, data in told if name == "response.output_item.done"]
    assert (item["type"], item["name"], item["input"], done) == ("custom_tool_call", "edit", SAID_PATCH, done)
    name, last = told[-1]
    assert name == "response.completed"
    assert last["response"]["output"] == [item], "the call's id is one"
    assert last["response"]["model"] == "gpt-5-codex"
    assert last["response"]["tools"][1]["format"] == EDIT["format"]
    assert PATCH.splitlines()[1] in last_prompt(gateway).replace("\\n", "\n"), (
        "the model is shown the grammar"
    )

    history = [
        *ASKED,
        item,
        {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done!"},
    ]
    gateway.says("It is mended.")
    told = codex(gateway, [*history, message("user", "Thanks.")])
    assert custom_call(SAID_PATCH) in last_prompt(gateway), "its tokens are those of the answer before"
    assert "Done!" in last_prompt(gateway)
    assert told[-1][1]["response"]["output"][0]["content"][0]["text"] == "It is mended."


def test_whole_answers_and_outputs_in_parts_are_taken_too(gateway: ScriptedGateway) -> None:
    gateway.says(custom_call(SAID_PATCH))
    body = CODEX | {"stream": False, "input": ASKED}
    (item,) = gateway.post(RESPONSES, body).json()["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", SAID_PATCH)
    output = [{"type": "input_text", "text": "Part."}]
    call = {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "c",
        "name": "edit",
        "input": SAID_PATCH,
    }
    answered = {"type": "custom_tool_call_output", "call_id": "c", "output": output}
    thought = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    ran = {"type": "function_call", "name": "run", "arguments": '{"command": ["ls"]}', "call_id": "d"}
    listed = {"type": "function_call_output", "call_id": "d", "output": "a.py"}
    codex(gateway, [*ASKED, thought, call, answered, ran, listed])
    assert all(text in last_prompt(gateway) for text in ("Part.", "a.py", custom_call(SAID_PATCH)))


FREE = {"type": "grammar", "syntax": "lark", "definition": "start: /[a-z]+ é/i"}
"""A grammar that xgrammar reads, but not as plain rules."""


@pytest.mark.fault("E27")
@pytest.mark.parametrize(("said", "status"), [("ABC é", "completed"), ("ABC 7", "incomplete")])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_no_grammar_constrained_is_checked_afterwards(
    gateway: ScriptedGateway, said: str, status: str, stream: bool
) -> None:
    gateway.says(custom_call(said))
    body = CODEX | {"tools": [EDIT | {"format": FREE}], "input": ASKED, "stream": stream}
    answer = gateway.post(RESPONSES, body)
    assert answer.status_code == 200, answer.text
    told = events(answer.text)
    (item,) = told[-1][1]["response"]["output"] if stream else answer.json()["output"]
    assert (item["input"], item["status"]) == (said, status)
    if stream:
        assert [data["item"] for name, data in told if name == "response.output_item.done"] == [item]


@pytest.mark.fault("E27")
def test_a_grammar_that_nothing_reads_is_refused_by_its_place(gateway: ScriptedGateway) -> None:
    for syntax, definition in (("lark", "start: missing"), ("regex", "(a")):
        broken = EDIT | {"format": {"type": "grammar", "syntax": syntax, "definition": definition}}
        refused = gateway.post(RESPONSES, CODEX | {"tools": [RUN, broken], "input": ASKED})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "tools[1].format.definition"), error
        gateway.says("Words alone.")
        body = {"tools": [RUN, broken], "tool_choice": "none", "input": ASKED}
        assert gateway.post(RESPONSES, CODEX | body).status_code == 200, "what cannot be called is not read"


def test_a_free_form_custom_tool_needs_no_grammar(gateway: ScriptedGateway) -> None:
    gateway.says(custom_call("anything"))
    tools = [{"type": "custom", "name": "edit", "description": "Edits."}]
    (item,) = gateway.post(RESPONSES, CODEX | {"tools": tools, "input": ASKED, "stream": False}).json()[
        "output"
    ]
    assert item["input"] == "anything"
    assert "status" not in item


def test_compaction_is_a_request_like_any_other(gateway: ScriptedGateway) -> None:
    """Codex has the model sum up, and goes on from what it said, without tools in the first of the two."""
    gateway.says("So far: one file was mended.")
    said = codex(gateway, [*ASKED, message("user", "Sum up.")], tools=[], parallel_tool_calls=True)
    summary = said[-1][1]["response"]["output"][0]["content"][0]["text"]
    gateway.says("Next.")
    codex(gateway, [message("developer", "Ask before you delete."), message("user", f"Summary: {summary}")])
    assert "one file was mended" in last_prompt(gateway)


NESTED = {
    "type": "namespace",
    "name": "files",
    "description": "Tools for files.",
    "tools": [EDIT, RUN | {"name": "stat"}],
}
FIND = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds further tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
LATER = RUN | {"name": "later", "description": "Does it later."}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tools_that_the_conversation_brings_are_offered_and_called_by_their_names(
    gateway: ScriptedGateway, stream: bool
) -> None:
    brought = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [NESTED, FIND]}

    def ask(items: list[Any]) -> dict[str, Any]:
        body = {key: value for key, value in CODEX.items() if key != "tools"} | {"stream": stream}
        answer = gateway.post(RESPONSES, body | {"input": items})
        assert answer.status_code == 200, answer.text
        told = events(answer.text)
        (item,) = told[-1][1]["response"]["output"] if stream else answer.json()["output"]
        if stream:
            begun, done = (data["item"] for name, data in told if name.startswith("response.output_item."))
            assert done == item
            assert begun["type"] == item["type"]
        return dict(item)

    gateway.says(custom_call(SAID_PATCH).replace('"edit"', '"files__edit"'))
    edit = ask([brought, *ASKED])
    assert (edit["type"], edit["name"], edit["namespace"]) == ("custom_tool_call", "edit", "files")
    assert all(name in last_prompt(gateway) for name in ("files__edit", "files__stat", "tool_search"))
    edited = {"type": "custom_tool_call_output", "call_id": edit["call_id"], "output": "Done!"}

    gateway.says('<tool_call>\n{"name": "tool_search", "arguments": {"query": "later"}}\n</tool_call>')
    search = ask([brought, *ASKED, edit, edited])
    assert (search["type"], search["arguments"]) == ("tool_search_call", {"query": "later"})
    assert (search["execution"], search["status"]) == ("client", "completed")
    found = {
        "type": "tool_search_output",
        "call_id": search["call_id"],
        "execution": "client",
        "tools": [LATER],
    }

    gateway.says('<tool_call>\n{"name": "later", "arguments": {"command": ["ls"]}}\n</tool_call>')
    later = ask([brought, *ASKED, edit, edited, search, found])
    assert (later["type"], later["name"]) == ("function_call", "later")
    assert "later: Does it later." in last_prompt(gateway)
    assert '"name": "files__edit"' in last_prompt(gateway)


@pytest.mark.fault("E27")
def test_tools_that_the_conversation_brings_are_bounded_as_those_of_the_request(
    gateway: ScriptedGateway,
) -> None:
    named = EDIT | {"name": "<edit>"}
    brought = {"type": "additional_tools", "role": "developer", "tools": [named]}
    refused = gateway.post(RESPONSES, CODEX | {"input": [brought, *ASKED]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[2].name")
    odd = {"type": "additional_tools", "tools": [{"type": ["custom"], "name": {}}, 7, None]}
    assert gateway.post(RESPONSES, CODEX | {"input": [odd, *ASKED]}).status_code == 400
    theirs = FIND | {"execution": "server"}
    refused = gateway.post(RESPONSES, CODEX | {"tools": [theirs], "input": ASKED})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].type")


class Asked:
    """vLLM's handlers on an engine that notes the grammar that it gets."""

    def __init__(self, parser: str) -> None:
        model = str(ModelStore(load_settings().models_folder).resolve("smollm2"))
        self._settings = EngineSettings(name="m", model=model, serving=SERVING | {"tool_call_parser": parser})
        self._engine = UnaskedEngine(self._settings)

    def grammar(self, **body: Any) -> tuple[Any, Call]:
        """The constraint of one request, and its call."""
        call = Call(RequestContext("id"))
        asyncio.run(self._ask(CODEX | {"model": "m", "input": ASKED, "service_tier": "auto"} | body, call))
        return self._engine.grammars[-1], call

    async def _ask(self, body: dict[str, Any], call: Call) -> None:
        serving = await handlers_on(self._engine, self._settings)
        CURRENT_CALL.set(call)
        method = serving.method(Operation.RESPONSES)
        assert method is not None
        answer = await method(
            serving.parse(Operation.RESPONSES, body), handlers.synthetic_request(call.context)
        )
        with pytest.raises(InvalidRequest, match="enough"):
            [event async for event in handlers.events(Operation.RESPONSES, answer)]

    def accepts(self, tag: str, text: str) -> bool:
        """Whether a constraint allows an answer, as the engine's backend compiles it."""
        tokenizer = self._engine.renderer.tokenizer
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
        matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(tag))
        return bool(matcher.accept_string(text) and matcher.accept_token(tokenizer.eos_token_id))


@pytest.fixture(scope="module")
def asked() -> Asked:
    return Asked("hermes")


def test_schemas_of_other_tools_are_no_place_for_a_grammar(asked: Asked) -> None:
    """However much they look like the mark of one."""
    for schema in ({"const": ["edit"]}, {"const": "other"}):
        made, call = asked.grammar(tools=[EDIT, RUN | {"strict": True, "parameters": schema}])
        assert not call.grammars
        assert made.structural_tag.count('"json_schema": {"const"') == 2, "of each way to write the call"


BROKEN = SAID_PATCH.replace("+x", "x")


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "custom", "name": "edit"}], ids=["auto", "required", "named"]
)
def test_a_grammar_constrains_what_is_said_to_its_tool_and_nothing_else(asked: Asked, choice: Any) -> None:
    made, call = asked.grammar(tool_choice=choice)
    assert not call.grammars, "what is constrained needs no check"
    assert asked.accepts(made.structural_tag, custom_call(SAID_PATCH))
    assert not asked.accepts(made.structural_tag, custom_call(BROKEN))
    run = '<tool_call>\n{"name": "run", "arguments": {"command": ["ls"]}}\n</tool_call>'
    assert asked.accepts(made.structural_tag, run) is (not isinstance(choice, dict))
    assert asked.accepts(made.structural_tag, "Words alone.") is (choice == "auto")


@pytest.mark.parametrize(
    ("pattern", "fits", "breaks"),
    [
        (r"[A-Z]{2}\d+", ["AB1", "XY2026"], ["A1", "ab1", "AB"]),
        (r'(say "[^"\n]*"\n)+', ['say "a\\b"\nsay ""\n'], ['say "a', 'say "a"b"\n']),
        (r"[^a-z]", ["A", '"', "\\", "\n", "é", "\U0001f600"], ["a", "AA", ""]),
        (r"(é|\\|\t)?x*", ["é", "\\xx", "\tx", ""], ["t", "\\\\"]),
    ],
)
def test_a_pattern_constrains_as_a_grammar_does(
    asked: Asked, pattern: str, fits: list[str], breaks: list[str]
) -> None:
    """What must be escaped in a JSON string is escaped in the grammar as well."""
    format_ = {"type": "grammar", "syntax": "regex", "definition": pattern}
    made, call = asked.grammar(tools=[EDIT | {"format": format_}], tool_choice="required")
    assert not call.grammars
    for said in fits:
        assert asked.accepts(made.structural_tag, custom_call(said)), said
    for said in breaks:
        assert not asked.accepts(made.structural_tag, custom_call(said)), said


@pytest.mark.parametrize(
    ("parser", "body"),
    [
        ("hermes", {"tools": [EDIT | {"format": FREE}]}),
        ("qwen3_coder", {}),
        ("hermes", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}}),
    ],
    ids=["no plain rules", "calls that are no JSON", "an answer that is constrained otherwise"],
)
def test_where_no_grammar_can_be_placed_the_input_is_to_be_checked(parser: str, body: dict[str, Any]) -> None:
    _, call = Asked(parser).grammar(**body)
    assert call.grammars.keys() == {"edit"}


@pytest.mark.parametrize("model", ["gemma4", "glm_4_7", "hy_v4", "kimi_k3"])
def test_a_grammar_that_has_no_place_is_not_taken_for_placed(model: str) -> None:
    """Nothing would hold or check the input of such a tool."""
    tool = custom_tools._marked(SimpleNamespace(name="edit"))
    tag = get_model_structural_tag(model, [tool], "required", reasoning=False)
    assert tag is not None
    assert not custom_tools._place(tag.model_dump(), {"edit": 'root ::= "x"'})


def test_the_check_of_vllm_that_is_left_out_is_still_the_one_that_refuses_grammars() -> None:
    """Once vLLM takes grammars by itself, ours can go."""
    body = {"model": "m", "input": "x", "tools": [EDIT]}
    with pytest.raises(Exception, match="grammar format are not supported"):
        VllmResponsesRequest.model_validate(body)
    assert ResponsesRequest.model_validate(body).tools[0].format.definition == PATCH


TOOLS = [
    {
        "name": name,
        "description": f"{name} a file.",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "file_path": {"type": "string"},
                "limit": {"type": "number", "exclusiveMinimum": 0},
            },
            "required": ["file_path"],
            "additionalProperties": False,
        },
    }
    for name in ("Read", "Edit")
]
CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE: dict[str, Any] = {
    "model": "claude-opus-4-8",
    "max_tokens": 32000,
    "system": [{"type": "text", "text": "You edit code."} | CACHED],
    "tools": TOOLS,
    "metadata": {"user_id": "user_session_1"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stream": True,
}
QUESTION = {"role": "user", "content": [{"type": "text", "text": "Mend a.py."} | CACHED]}
READ = '<tool_call>\n{"name": "Read", "arguments": {"file_path": "a.py"}}\n</tool_call>'


def claude(gateway: ScriptedGateway, messages: list[Any], **body: Any) -> list[tuple[str, dict[str, Any]]]:
    answer = gateway.post(f"{MESSAGES}?beta=true", CLAUDE | {"messages": messages} | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-max-tokens"].isdigit()
    return events(answer.text)


def test_a_file_is_read_by_a_call_and_the_history_comes_in_again(gateway: ScriptedGateway) -> None:
    gateway.says(READ)
    told = claude(gateway, [QUESTION])
    begun = told[0][1]["message"]
    assert (begun["model"], begun["id"][:4]) == ("claude-opus-4-8", "msg_")
    (block,) = [data["content_block"] for name, data in told if name == "content_block_start"]
    assert (block["type"], block["name"]) == ("tool_use", "Read")
    pieces = [data["delta"].get("partial_json", "") for name, data in told if name == "content_block_delta"]
    assert json.loads("".join(pieces)) == {"file_path": "a.py"}
    call = block | {"input": {"file_path": "a.py"}}
    result = {
        "type": "tool_result",
        "tool_use_id": block["id"],
        "content": [{"type": "text", "text": "1 x = 1"}],
    }
    history = [
        QUESTION,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result | CACHED, {"type": "text", "text": "Go on."}]},
    ]
    gateway.says("Mended.")
    told = claude(gateway, history)
    assert READ in last_prompt(gateway)
    assert "1 x = 1" in last_prompt(gateway)
    gateway.says("Mended.")
    answer = gateway.post(MESSAGES, CLAUDE | {"messages": history, "stream": False})
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    assert (whole["model"], whole["id"][:4]) == ("claude-opus-4-8", "msg_")


@pytest.mark.fault("E27")
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
@pytest.mark.parametrize(
    "kind",
    [
        "web_search_20250305",
        "web_fetch_20250910",
        "code_execution_20250825",
        "bash_20250124",
        "memory_20250818",
    ],
)
def test_tools_of_anthropics_are_refused_by_name(gateway: ScriptedGateway, path: str, kind: str) -> None:
    body = {key: CLAUDE[key] for key in ("model", "max_tokens", "tools")} | {"messages": [QUESTION]}
    refused = gateway.post(path, body | {"tools": [*TOOLS, {"type": kind, "name": "theirs"}]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "tools[2].type")
    assert kind in error["message"]
    ours = [tool | {"type": "custom"} for tool in TOOLS]
    if path == MESSAGES:
        gateway.says("Mended.")
    assert gateway.post(path, body | {"tools": ours}).status_code == 200


def test_a_budget_of_thoughts_is_cut_with_the_answer_and_never_too_large_by_that() -> None:
    cut = handlers.within_context(CLAUDE, 8192)
    assert (cut["max_tokens"], cut["thinking"]["budget_tokens"]) == (8192, 8191)
    small = CLAUDE | {"thinking": {"type": "enabled", "budget_tokens": 2048}}
    assert handlers.within_context(small, 8192)["thinking"] == small["thinking"]
    wrong = CLAUDE | {"thinking": {"type": "enabled", "budget_tokens": 40000}}
    assert handlers.within_context(wrong, 8192)["thinking"] == wrong["thinking"], "vLLM says so"
