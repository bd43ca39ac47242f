"""A tool's schema of which no grammar can be made is named with its keyword; what a grammar leaves out is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

import xgrammar  # after the skip
from support.scripted_engines import ScriptedGateway, run_scripted  # after the skip

from baton.engines.json_schemas import not_held  # after the skip
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
    given: dict[str, Any] = {"strict": True} if strict else {}
    functions: list[dict[str, Any]] = [
        {"name": f"look{at}", "parameters": schema} | given for at, schema in enumerate(schemas)
    ]
    last = len(schemas) - 1
    if route == CHAT:
        tools = [{"type": "function", "function": function} for function in functions]
        return {"messages": ASKED, "tools": tools}, f"tools[{last}].function.parameters"
    if route == RESPONSES:
        tools = [{"type": "function"} | function for function in functions]
        return {"input": ASKED, "tools": tools}, f"tools[{last}].parameters"
    tools = [{"name": each["name"], "input_schema": each["parameters"]} | given for each in functions]
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


@pytest.mark.fault("E24")
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


UNHELD = {"type": "object", "properties": {"at": {"type": "number", "multipleOf": 3}, "not": {"not": {}}}}


@pytest.mark.fault("E24")
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


INTEGER = {"type": "integer"}
LIST = {"type": "array", "items": INTEGER}
OBJECT = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
GRAMMARS: list[tuple[dict[str, Any], str, set[str]]] = [
    (LIST | {"contains": {"const": 1}}, "[2]", {"contains"}),
    (LIST | {"contains": {"const": 1}, "maxContains": 1}, "[1, 1]", {"contains", "maxContains"}),
    (LIST | {"uniqueItems": True}, "[1, 1]", {"uniqueItems"}),
    (OBJECT | {"dependentRequired": {"a": ["b"]}}, '{"a": 1}', {"dependentRequired"}),
    (OBJECT | {"dependentSchemas": {"a": {"required": ["b"]}}}, '{"a": 1}', {"dependentSchemas", "required"}),
    (INTEGER | {"if": {"minimum": 5}, "else": {"const": 1}}, "2", {"if", "else", "minimum"}),
    (INTEGER | {"if": {"const": 5}, "then": {"const": 7}}, "5", {"if", "then"}),
    (INTEGER | {"not": {"const": 4}}, "4", {"not"}),
    ({"type": "number", "multipleOf": 0.5}, "1.3", {"multipleOf"}),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaaa"', {"maxLength"}),
    (OBJECT | {"propertyNames": {"type": "string", "pattern": "^a+$"}}, '{"b": 1}', {"propertyNames"}),
    ({"allOf": [INTEGER, {"const": 4}]}, "5", {"allOf"}),
    ({"allOf": [INTEGER], "maximum": 4}, "5", {"maximum"}),
    (OBJECT | {"anyOf": [{"type": "object"}], "required": ["a"]}, "{}", {"type", "properties", "required"}),
    (OBJECT | {"oneOf": [{"const": 5}]}, "5", {"type", "properties"}),
    ({"$defs": {"x": INTEGER}, "$ref": "#/$defs/x", "maximum": 4}, "5", {"maximum"}),
    ({"type": "string", "enum": ["a", "b"], "pattern": "^a$"}, '"b"', {"pattern"}),
    ({"minimum": 5}, "4", {"minimum"}),
    ({"maxLength": 1}, '"aa"', {"maxLength"}),
    ({"required": ["a"]}, "{}", {"required"}),
    ({"const": 4}, "5", set()),
    ({"type": "integer", "enum": [4]}, "5", set()),
    (INTEGER | {"multipleOf": 3}, "4", set()),
    (INTEGER | {"maximum": 4}, "5", set()),
    (OBJECT | {"required": ["a"]}, "{}", set()),
    ({"properties": {"a": INTEGER}, "required": ["a"]}, "{}", set()),
    ({"type": ["integer", "null"], "minimum": 5}, "4", set()),
    ({"type": "string", "pattern": "^a+$"}, '"b"', set()),
    ({"type": "string", "format": "email"}, '"b"', set()),
    (LIST | {"maxItems": 1}, "[1, 1]", set()),
    ({"anyOf": [{"const": 1}, {"const": 2}]}, "3", set()),
    ({"allOf": [{"const": 4}]}, "5", set()),
    (OBJECT | {"additionalProperties": False}, '{"c": 1}', set()),
    (OBJECT | {"minProperties": 2}, '{"a": 1}', set()),
]


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar of a schema takes a text."""
    vocabulary = [chr(code) for code in range(32, 127)] + ["<end>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema))
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(len(vocabulary) - 1)


@pytest.mark.parametrize(("schema", "wrong", "left_out"), GRAMMARS, ids=[str(row[0]) for row in GRAMMARS])
def test_the_keywords_that_grammars_leave_out_are_those_that_are_told(
    schema: dict[str, Any], wrong: str, left_out: set[str]
) -> None:
    """When this fails, xgrammar holds other keywords than `json_schemas.py` says."""
    assert takes(schema, wrong) is bool(left_out)
    assert not_held(schema, alone=False) == left_out
