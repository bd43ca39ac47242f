"""Thoughts and calls are read alike on every route, whole and streamed, at every boundary of tokens and at every cut."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from jiter import from_json

pytest.importorskip("vllm")

from support.scripted_engines import (  # after the skip
    ScriptedGateway,
    run_scripted,
    speaking,
    speaking_harmony,
)
from support.written_calls import (  # after the skip
    DEEPSEEK_TOKENS,
    GEMMA_TOKENS,
    GLM_TOKENS,
    TAGS,
    THINK,
    THINK_TOKENS,
    TOKENS,
    Call,
    as_json,
    deepseek_v3,
    deepseek_v31,
    gemma,
    glm,
    granite,
    harmony,
    hermes,
    llama,
    mistral,
    mistral_v11,
    qwen_xml,
)
from vllm.entrypoints.anthropic.protocol import (  # after the skip
    AnthropicContentBlock,
    AnthropicMessagesResponse,
)
from vllm.tool_parsers import ToolParserManager  # after the skip

from baton.engines.vllm.handlers import _input  # after the skip
from baton.models.catalog import SMOLLM2_TEMPLATE
from baton_client import Baton

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ROUTES = (CHAT, MESSAGES, RESPONSES)
ASKED = [{"role": "user", "content": "Look."}]
THOUGHT, SAID = "It is late, so I look.", "I look now."
TEXTS = "a </tool_call> b"
PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "list": {"type": "array"}},
}
CALLS: list[Call] = [
    ("look", {"text": 'über\n"quoted" {x} 🌊', "count": 17}),
    ("find_it", {"list": ["a", {"deep": "b"}], "text": "x"}),
]


@dataclass(frozen=True)
class Family:
    """How a family of models writes.

    Attributes:
        tokens: its special tokens.
        serving: the parsers that are chosen for it.
        writes: makes the text of calls.
        thinks: what stands around its thoughts; None: it has none.
        marks: what is never text.
    """

    tokens: tuple[str, ...]
    serving: dict[str, Any]
    writes: Callable[[list[Call]], str]
    thinks: tuple[str, str] | None = None
    marks: tuple[str, ...] = ("<tool_call", "</tool_call", "<function", "<arg_", "<parameter")

    def text(self, calls: list[Call]) -> str:
        """An answer: thoughts, words and calls."""
        thoughts = f"{self.thinks[0]}{THOUGHT}{self.thinks[1]}" if self.thinks else ""
        return f"{thoughts}{SAID}{self.writes(calls)}"


FAMILIES = {
    "gpt-oss": Family(
        (),
        {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"},
        harmony,
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        marks=("<|", "functions."),
    ),
    "SmolLM2, Qwen 2.5": Family((), {"tool_call_parser": "hermes"}, hermes),
    "Qwen3": Family(
        (*THINK_TOKENS, *TAGS), {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}, hermes, THINK
    ),
    "QwQ": Family(
        THINK_TOKENS,
        {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"},
        hermes,
        ("", "</think>"),
    ),
    "Qwen3 Coder": Family(
        (*THINK_TOKENS, *TAGS),
        {"tool_call_parser": "qwen3_xml", "reasoning_parser": "qwen3"},
        qwen_xml,
        THINK,
    ),
    "Llama 3": Family(("<|python_tag|>",), {"tool_call_parser": "llama3_json"}, llama, marks=('"name"',)),
    "GLM": Family(
        GLM_TOKENS, {"tool_call_parser": "glm45", "reasoning_parser": "glm45"}, glm, ("<think>", "</think>")
    ),
    "DeepSeek V3": Family(
        DEEPSEEK_TOKENS, {"tool_call_parser": "deepseek_v3"}, deepseek_v3, marks=("｜", "```")
    ),
    "DeepSeek V3.1": Family(
        (*THINK_TOKENS, *DEEPSEEK_TOKENS),
        {"tool_call_parser": "deepseek_v31", "reasoning_parser": "deepseek_r1"},
        deepseek_v31,
        ("", "</think>"),
        marks=("｜",),
    ),
    "Gemma 4": Family(
        GEMMA_TOKENS,
        {"tool_call_parser": "gemma4", "reasoning_parser": "gemma4"},
        gemma,
        ("<|channel>thought\n", "<channel|>"),
        marks=("tool_call", '<|"|>', "call:"),
    ),
    "Granite 3": Family(
        ("<|tool_call|>",), {"tool_call_parser": "granite"}, granite, marks=("tool_call", '"name"')
    ),
    "Granite 4": Family(TAGS, {"tool_call_parser": "granite4"}, hermes),
    "Mistral": Family(
        ("[TOOL_CALLS]",), {"tool_call_parser": "mistral"}, mistral, marks=("TOOL_CALLS", '"name"')
    ),
    "Mistral, with [ARGS]": Family(
        ("[TOOL_CALLS]", "[ARGS]"), {"tool_call_parser": "mistral"}, mistral_v11, marks=("TOOL_CALLS", "ARGS")
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = FAMILIES[request.param]
    return found


@pytest.fixture(scope="module")
def gateway(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedGateway]:
    folder, encode = tmp_path_factory.mktemp("model"), None
    if family is FAMILIES["gpt-oss"]:
        vocabulary = Path(os.environ.get("TIKTOKEN_ENCODINGS_BASE", "."), "o200k_base.tiktoken")
        if not vocabulary.is_file():
            pytest.skip("TIKTOKEN_ENCODINGS_BASE names no folder with gpt-oss's vocabulary")
        encode = speaking_harmony(folder, vocabulary)
    else:
        speaking(folder, family.tokens)
    with run_scripted(model=folder, encode=encode, **family.serving) as running:
        yield running


@dataclass
class Read:
    """What a client reads of an answer.

    Attributes:
        calls: name and arguments, as text.
        ended: why the answer ended, in a chat's words.
    """

    thoughts: str
    text: str
    calls: list[tuple[str, str]]
    ended: str


def tools(route: str) -> list[dict[str, Any]]:
    functions = [{"name": name, "parameters": PARAMETERS} for name, _ in CALLS]
    if route == CHAT:
        return [{"type": "function", "function": function} for function in functions]
    if route == RESPONSES:
        return [{"type": "function"} | function for function in functions]
    return [{"name": function["name"], "input_schema": PARAMETERS} for function in functions]


def ask(gateway: ScriptedGateway, route: str, *, most: int = 500, stream: bool, **more: Any) -> Read:
    limit = "max_output_tokens" if route == RESPONSES else "max_tokens"
    body = {"input" if route == RESPONSES else "messages": ASKED, "tools": tools(route), limit: most}
    answer = gateway.post(route, body | {"stream": stream} | more)
    assert answer.status_code == 200, answer.text
    if not stream:
        return WHOLE[route](answer.json())
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return STREAMED[route]([json.loads(line) for line in lines])


def whole_chat(found: dict[str, Any]) -> Read:
    (choice,) = found["choices"]
    message = choice["message"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    ]
    return Read(message.get("reasoning") or "", message["content"] or "", calls, choice["finish_reason"])


def streamed_chat(found: list[dict[str, Any]]) -> Read:
    read = Read("", "", [], "")
    for choice in (choice for chunk in found for choice in chunk["choices"]):
        delta = choice["delta"]
        read.thoughts += delta.get("reasoning") or ""
        read.text += delta.get("content") or ""
        read.ended = choice["finish_reason"] or read.ended
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if call["index"] == len(read.calls):
                read.calls.append((function["name"], ""))
                assert call["id"]
            name, arguments = read.calls[call["index"]]
            read.calls[call["index"]] = (name, arguments + (function.get("arguments") or ""))
    return read


ENDS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def whole_message(found: dict[str, Any]) -> Read:
    kinds = {
        kind: [b for b in found["content"] if b["type"] == kind] for kind in ("thinking", "text", "tool_use")
    }
    calls = [(b["name"], b["input"].get("INVALID_JSON", as_json(b["input"]))) for b in kinds["tool_use"]]
    thoughts = "".join(block["thinking"] for block in kinds["thinking"])
    return Read(thoughts, "".join(b["text"] for b in kinds["text"]), calls, ENDS[found["stop_reason"]])


def as_input(text: str) -> str:
    """What Anthropic's SDK reads of a streamed call's arguments, written again."""
    return as_json(from_json(text.encode(), partial_mode=True) if text else {})


def in_one_piece(read: Read, route: str) -> Read:
    """A streamed answer as the route gives it in one piece: there a call's input may be an object."""
    if route != MESSAGES:
        return read
    return replace(read, calls=[(name, as_input(text)) for name, text in read.calls])


def streamed_message(found: list[dict[str, Any]]) -> Read:
    read = Read("", "", [], "")
    for event in found:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            read.calls.append((event["content_block"]["name"], ""))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            read.thoughts += delta.get("thinking") or ""
            read.text += delta.get("text") or ""
            if "partial_json" in delta:
                name, arguments = read.calls[-1]
                read.calls[-1] = (name, arguments + delta["partial_json"])
        elif event["type"] == "message_delta":
            read.ended = ENDS[event["delta"]["stop_reason"]]
    return read


def whole_response(found: dict[str, Any]) -> Read:
    read = Read("", "", [], "length" if found["status"] == "incomplete" else "stop")
    for item in found["output"]:
        if item["type"] == "function_call":
            read.calls.append((item["name"], item["arguments"]))
            continue
        text = "".join(part["text"] for part in item["content"])
        if item["type"] == "reasoning":
            read.thoughts += text
        else:
            read.text += text
    if read.calls and read.ended == "stop":
        read.ended = "tool_calls"
    return read


def streamed_response(found: list[dict[str, Any]]) -> Read:
    read = whole_response(found[-1]["response"])
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert whole_response(found[-1]["response"] | {"output": done}) == read
    deltas = [(event["type"], event["delta"]) for event in found if event["type"].endswith(".delta")]
    for kind, text in (
        ("reasoning", read.thoughts),
        ("output_text", read.text),
        ("function_call_arguments", "".join(given for _, given in read.calls)),
    ):
        assert "".join(delta for name, delta in deltas if name.startswith(f"response.{kind}")) == text
    return read


WHOLE = {CHAT: whole_chat, MESSAGES: whole_message, RESPONSES: whole_response}
STREAMED = {CHAT: streamed_chat, MESSAGES: streamed_message, RESPONSES: streamed_response}


def require_said(read: Read, family: Family, calls: list[Call]) -> None:
    """Check that a whole answer was read as it was meant."""
    assert read.thoughts.strip() == (THOUGHT if family.thinks else "")
    assert read.text.strip() == SAID
    assert [(name, json.loads(arguments)) for name, arguments in read.calls] == calls
    assert read.ended == "tool_calls"


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_said_is_read_at_every_boundary(gateway: ScriptedGateway, family: Family, route: str) -> None:
    said = family.text(CALLS)
    gateway.engine.client.tokens_a_step = 1
    gateway.says(said)
    require_said(ask(gateway, route, stream=False), family, CALLS)
    for tokens in (1, 2, 3, 7, 500):
        gateway.engine.client.tokens_a_step = tokens
        gateway.says(said)
        require_said(ask(gateway, route, stream=True), family, CALLS)
    gateway.engine.client.tokens_a_step = 1


@pytest.mark.fault("E23")
@pytest.mark.parametrize("route", ROUTES)
def test_a_cut_answer_is_read_alike_and_invents_nothing(
    gateway: ScriptedGateway, family: Family, route: str
) -> None:
    said = family.text(CALLS)
    length = len(gateway.tokens(said))
    places = range(1, length) if route == CHAT else random.Random(route).sample(range(1, length), 12)
    for most in places:
        reads = []
        for stream, tokens in ((False, 1), (True, 1), (True, 3)):
            gateway.engine.client.tokens_a_step = tokens
            gateway.says(said)
            reads.append(ask(gateway, route, most=most, stream=stream))
        gateway.engine.client.tokens_a_step = 1
        whole, *streamed = reads
        assert [in_one_piece(read, route) for read in streamed] == [whole, whole], most
        assert whole.ended == "length", most
        assert SAID.startswith(whole.text.strip())
        assert THOUGHT.startswith(whole.thoughts.strip())
        assert not any(mark in whole.text for mark in family.marks)
        assert [name for name, _ in whole.calls] == [name for name, _ in CALLS][: len(whole.calls)]
        for (_, written), (_, meant) in zip(whole.calls[:-1], CALLS, strict=False):
            assert json.loads(written) == meant
        for (_, written), (_, meant) in list(zip(whole.calls, CALLS, strict=False))[-1:]:
            if route == MESSAGES:
                assert set(json.loads(written)) <= set(meant), most
                continue
            try:
                assert json.loads(written) == meant, most  # whole, or no JSON at all
            except ValueError:
                assert as_json(meant).startswith(written), most


DEMANDED: dict[str, Any] = {CHAT: "required", MESSAGES: {"type": "any"}, RESPONSES: "required"}


@pytest.fixture(scope="module")
def jamba(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedGateway]:
    """A family of whose calls vLLM has no grammar: demanded ones are JSON."""
    folder = speaking(tmp_path_factory.mktemp("model"), TOKENS["jamba"])
    with run_scripted(model=folder, tool_call_parser="jamba") as running:
        yield running


@pytest.mark.fault("E28")
@pytest.mark.parametrize("route", ROUTES)
def test_demanded_calls_in_json_are_read_alike_at_every_cut(jamba: ScriptedGateway, route: str) -> None:
    said = as_json([{"name": name, "parameters": given} for name, given in CALLS])
    length = len(jamba.tokens(said))
    for most in (*range(1, length, 3 if route == CHAT else 9), 500):
        reads = []
        for stream, tokens in ((False, 1), (True, 1), (True, 3)):
            jamba.engine.client.tokens_a_step = tokens
            jamba.says(said)
            reads.append(ask(jamba, route, most=most, stream=stream, tool_choice=DEMANDED[route]))
        jamba.engine.client.tokens_a_step = 1
        whole, *streamed = reads
        assert [in_one_piece(read, route) for read in streamed] == [whole, whole], most
        assert (whole.text, whole.ended) == ("", "tool_calls" if most == 500 else "length"), most
        written = streamed[0].calls
        meant = [(name, as_json(given)) for name, given in CALLS][: len(written)]
        assert written[:-1] == meant[:-1]
        assert all(given.startswith(part) for (_, part), (_, given) in zip(written, meant, strict=True))
    assert whole.calls == meant
    assert len(meant) == len(CALLS)


DEEP = '{"a": ' * 300 + "1" + "}" * 300
INPUTS = {
    "whole": ('{"a": 1}', False, {"a": 1}),
    "none": ("", True, {}),
    "cut": ('{"a": 1, "b": "x', True, {"a": 1}),
    "unfinished, though nothing cut it": ('{"a": 1, "b": "x', False, None),
    "text behind it": ('{"a": 1} and more', False, None),
    "a list": ("[1]", False, None),
    "a list that was cut": ("[1", True, None),
    "half a surrogate pair": ('{"a": "\\ud800"}', False, None),
    "no number": ('{"a": NaN}', False, None),
    "a number too large": ('{"a": 1e999}', False, None),
    "nested too deeply": (DEEP, False, None),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_input_of_a_call_of_messages_is_an_object_that_can_be_written(name: str) -> None:
    arguments, cut, wanted = INPUTS[name]
    found = _input(arguments, cut=cut)
    assert found == ({"INVALID_JSON": arguments} if wanted is None else wanted)
    block = AnthropicContentBlock(type="tool_use", id="1", name="look", input=found)
    answer = AnthropicMessagesResponse(id="1", content=[block], model="a", usage=None)
    assert answer.model_dump_json(exclude_none=True)


def test_an_answer_that_saves_its_context_is_read_alike(gateway: ScriptedGateway, family: Family) -> None:
    for route in ROUTES:
        for stream in (False, True):
            gateway.says(family.text(CALLS))
            require_said(ask(gateway, route, stream=stream, handoff={"save": True}), family, CALLS)


JSON_CALLS = ("SmolLM2, Qwen 2.5", "Qwen3", "Llama 3", "DeepSeek V3", "DeepSeek V3.1", "Granite 4")


@pytest.mark.fault("E23")
@pytest.mark.parametrize("family", JSON_CALLS, indirect=True)
def test_the_mark_that_ends_a_call_may_stand_in_an_argument(family: Family, gateway: ScriptedGateway) -> None:
    calls: list[Call] = [("look", {"text": TEXTS}), ("look", {"text": '<tool_call>{"name": "x"}'})]
    for route in ROUTES:
        for stream in (False, True):
            gateway.says(family.text(calls))
            require_said(ask(gateway, route, stream=stream), family, calls)


@pytest.mark.fault("E23")
@pytest.mark.parametrize("family", ["SmolLM2, Qwen 2.5", "Qwen3 Coder"], indirect=True)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_within_a_call_ends_no_call(
    gateway: ScriptedGateway, family: Family, *, stream: bool
) -> None:
    calls: list[Call] = [("look", {"text": "one END two"})]
    gateway.says(family.text(calls))
    read = ask(gateway, CHAT, stream=stream, stop=["END"])
    assert read.ended == "stop"
    assert read.calls == [("look", '{"text": "one ')]
    gateway.says(family.text(calls))
    require_said(ask(gateway, CHAT, stream=stream, stop=["OVER"]), family, calls)


@pytest.mark.parametrize("family", ["SmolLM2, Qwen 2.5", "Qwen3 Coder", "GLM"], indirect=True)
def test_what_is_said_after_calls_stays(gateway: ScriptedGateway, family: Family) -> None:
    after = "Both  done, I think: x y."
    for route in ROUTES:
        reads = []
        for stream, tokens in ((False, 1), (True, 1), (True, 2), (True, 3)):
            gateway.engine.client.tokens_a_step = tokens
            gateway.says(f"{family.text(CALLS)}\n{after}")
            reads.append(ask(gateway, route, stream=stream))
        gateway.engine.client.tokens_a_step = 1
        assert {read.text.replace("\n", "") for read in reads} == {SAID + after}
        assert [read.calls for read in reads] == [reads[0].calls] * 4


@pytest.fixture(scope="module")
def smollm2() -> Iterator[ScriptedGateway]:
    """The embedded model as it is served, but for its weights."""
    with run_scripted(chat_template=SMOLLM2_TEMPLATE) as running:
        yield running


def test_a_tool_s_result_continues_a_handoff_as_the_whole_conversation_reads(
    smollm2: ScriptedGateway,
) -> None:
    more = {"tools": tools(CHAT), "max_tokens": 200}
    with (
        Baton(str(smollm2.http.base_url).rstrip("/")) as baton,
        baton.conversation("a", system="Be brief.") as talk,
    ):
        smollm2.says(f"{SAID}{hermes(CALLS)}")
        asked = talk.say("Look.", **more)
        assert [call["function"]["name"] for call in asked.calls] == ["look", "find_it"]
        smollm2.says("Rain.")
        results = {call["id"]: f"result {at}" for at, call in enumerate(asked.calls)}
        told = talk.give(results, **more)
        assert (told.text, told.calls) == ("Rain.", ())
        assert told.source is not None
    continued = smollm2.engine.text(smollm2.engine.client.prompts[-1])
    said = [{"role": "system", "content": "Be brief."}, *ASKED, asked.body["choices"][0]["message"]]
    whole = [*said, *({"role": "tool", "tool_call_id": at, "content": text} for at, text in results.items())]
    smollm2.says("Rain.")
    assert smollm2.post(CHAT, more | {"messages": whole}).status_code == 200
    plain_prompt = smollm2.engine.text(smollm2.engine.client.prompts[-1])
    for part in ("result 0", "result 1", "Be brief.", '"find_it"'):
        assert continued.count(part) == plain_prompt.count(part), part
    assert continued.partition("result 0")[2] == plain_prompt.partition("result 0")[2]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_vllm_itself_goes_wrong_still(*, stream: bool) -> None:
    """When this fails, vLLM reads such calls itself: `engines/vllm/parsers.py` can be smaller."""
    text = '<tool_call>{"name": "look", "arguments": {"text": "a </tool_call> b"}}</tool_call>'
    parser = ToolParserManager.get_tool_parser("hermes")(object())
    if stream:
        found = parser.extract_tool_calls_streaming("", text, text, [], [], [], None)
        calls = [call.function for call in found.tool_calls] if found else []
        written = "".join(call.arguments or "" for call in calls if call is not None)
    else:
        written = "".join(
            call.function.arguments for call in parser.extract_tool_calls(text, None).tool_calls
        )
    assert written != '{"text": "a </tool_call> b"}'
