"""A tool's schema of which no grammar can be made is named with its keyword; what a grammar leaves out is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

import xgrammar  # after the skip
from support.scripted_engines import ScriptedGateway, run_scripted  # after the skip

from baton.engines.json_schemas import HELD_ALONE, NEVER_HELD  # after the skip
from baton.telemetry.ids import UNHELD_HEADER  # after the skip

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASKED = [{"role": "user", "content": "Look."}]
GOOD = {"type": "object", "properties": {"at": {"type": "string"}}}


@pytest.fixture(scope="module")
def gateway() -> Iterator[ScriptedGateway]:
    with run_scripted(tool_call_parser="hermes") as running:
        yield running


def asking(route: str, *schemas: dict[str, Any], strict: bool = True) -> tuple[dict[str, Any], str]:
    """A request with a tool for each schema, and where the last one's schema stands."""
    functions = [
        {"name": f"look{at}", "parameters": schema} | ({"strict": True} if strict else {})
        for at, schema in enumerate(schemas)
    ]
    last = len(schemas) - 1
    if route == CHAT:
        tools = [{"type": "function", "function": function} for function in functions]
        return {"messages": ASKED, "tools": tools}, f"tools[{last}].function.parameters"
    if route == RESPONSES:
        tools = [{"type": "function"} | function for function in functions]
        return {"input": ASKED, "tools": tools}, f"tools[{last}].parameters"
    tools = [
        {"name": each["name"], "input_schema": each["parameters"]} | ({"strict": True} if strict else {})
        for each in functions
    ]
    return {"messages": ASKED, "tools": tools, "max_tokens": 8}, f"tools[{last}].input_schema"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "properties": {"at": {"type": "objekt"}}}, "properties.at.type"),
    ({"type": "object", "properties": {"at": {"$ref": "#/$defs/nowhere"}}}, "properties.at.$ref"),
    ({"type": "object", "properties": {"at": {"enum": "north"}}}, "properties.at.enum"),
    ({"type": "object", "properties": {"at": "string"}}, "properties.at"),
    ({"type": "object", "properties": {"at": {"type": "integer", "minimum": 5, "maximum": 2}}}, "minimum"),
    ({"type": "object", "properties": {"at": {"minItems": 3, "maxItems": 1, "type": "array"}}}, "minItems"),
    ({"type": "object", "properties": {"at": {"anyOf": {}}}}, "properties.at.anyOf"),
    ({"type": "object", "required": "at", "properties": {"at": {}}}, "required"),
]


@pytest.mark.fault("E22")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(("schema", "keyword"), BAD, ids=[keyword for _, keyword in BAD])
def test_a_bad_schema_of_a_tool_is_named_with_its_keyword(
    gateway: ScriptedGateway, route: str, schema: dict[str, Any], keyword: str, *, stream: bool
) -> None:
    body, place = asking(route, GOOD, schema)
    answer = gateway.post(route, body | {"stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error["message"]
    assert "'look1'" in message
    assert keyword in message
    assert place in message
    assert "look0" not in message


@pytest.mark.parametrize("route", [CHAT, RESPONSES])
def test_a_bad_schema_of_the_answer_is_named_too(gateway: ScriptedGateway, route: str) -> None:
    schema, keyword = BAD[0]
    form = {"type": "json_schema", "name": "x", "schema": schema}
    body: dict[str, Any] = {"input": ASKED, "text": {"format": form}}
    if route == CHAT:
        body = {
            "messages": ASKED,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        }
    answer = gateway.post(route, body)
    assert answer.status_code == 400, answer.text
    assert keyword in answer.json()["error"]["message"]


def test_a_schema_that_nothing_is_compiled_of_may_be_anything(gateway: ScriptedGateway) -> None:
    for route in (CHAT, MESSAGES, RESPONSES):
        gateway.says("No.")
        body, _ = asking(route, BAD[0][0], strict=False)
        assert gateway.post(route, body).status_code == 200


UNHELD = {"type": "object", "properties": {"at": {"type": "integer", "multipleOf": 3}, "not": {"not": {}}}}


@pytest.mark.fault("E22")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", [CHAT, MESSAGES, RESPONSES])
def test_keywords_that_the_grammar_leaves_out_are_told(
    gateway: ScriptedGateway, route: str, *, stream: bool
) -> None:
    for schema, strict, told in (
        (UNHELD, True, "multipleOf, not"),
        (UNHELD, False, None),
        (GOOD, True, None),
    ):
        gateway.says("No.")
        body, _ = asking(route, GOOD, schema, strict=strict)
        answer = gateway.post(route, body | {"stream": stream})
        assert answer.status_code == 200, answer.text
        assert answer.headers.get(UNHELD_HEADER) == told


HELD_OR_NOT = {
    "contains": ({"type": "array", "contains": {"const": 1}}, "[2]"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
        '{"a": 1}',
    ),
    "else": ({"type": "integer", "if": {"minimum": 5}, "else": {"const": 1}}, "2"),
    "if": ({"type": "integer", "if": {"minimum": 5}, "then": {"const": 7}}, "6"),
    "maxContains": ({"type": "array", "contains": {"const": 1}, "maxContains": 1}, "[1, 1]"),
    "minContains": ({"type": "array", "contains": {"const": 1}, "minContains": 2}, "[1]"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "4"),
    "not": ({"type": "integer", "not": {"const": 4}}, "4"),
    "then": ({"type": "integer", "if": {"minimum": 5}, "then": {"const": 7}}, "6"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "[1, 1]"),
    "allOf": ({"allOf": [{"type": "integer"}, {"const": 4}]}, "5"),
}
HELD = {
    "const": ({"const": 4}, "5"),
    "enum": ({"enum": [4]}, "5"),
    "required": ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, "{}"),
    "maximum": ({"type": "integer", "maximum": 4}, "5"),
    "pattern": ({"type": "string", "pattern": "^a+$"}, '"b"'),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1, 1]"),
    "anyOf": ({"anyOf": [{"const": 1}, {"const": 2}]}, "3"),
}


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar of a schema takes a text."""
    vocabulary = [chr(code) for code in range(32, 127)] + ["<end>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema))
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(len(vocabulary) - 1)


def test_the_keywords_that_grammars_leave_out_are_those_that_are_told() -> None:
    """When this fails, xgrammar holds another set of keywords: `json_schemas.py` lists them."""
    assert HELD_OR_NOT.keys() == NEVER_HELD | HELD_ALONE | {"allOf"}
    assert {keyword for keyword, row in HELD_OR_NOT.items() if not takes(*row)} == set()
    assert {keyword for keyword, row in HELD.items() if takes(*row)} == set()
