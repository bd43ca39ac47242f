"""What is wrong in a JSON schema is named with its keyword, and so is what a grammar leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engines.json_schemas import fault_of, not_held

SOUND: list[dict[str, Any]] = [
    {},
    {"type": ["string", "null"], "enum": ["a", None], "default": {"type": "objekt"}},
    {"properties": {"type": {"type": "string"}, "required": {"type": "array"}, "$ref": {}}},
    {"$defs": {"a/b": {"type": "object"}}, "$ref": "#/$defs/a~1b", "examples": [{"type": 5}]},
    {"items": [{"type": "string"}, True], "additionalProperties": False, "minItems": 2, "maxItems": 2.0},
    {"items": {"anyOf": [{"$ref": "#"}, {"const": {"enum": 7}}]}},
]


@pytest.mark.parametrize("schema", SOUND, ids=str)
def test_a_sound_schema_has_no_fault(schema: dict[str, Any]) -> None:
    assert fault_of(schema) is None


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "objekt"}, "'type' must be one of"),
        ({"properties": {"at": {"type": "str"}}}, "'properties.at.type' must be one of"),
        ({"properties": {"at": {"type": ["string", None]}}}, "'properties.at.type' must be"),
        ({"properties": {"at": {"required": True}}}, "'properties.at.required' must be a list of names"),
        ({"properties": []}, "'properties' must be an object"),
        ({"properties": {"at": "string"}}, "'properties.at' must be a schema"),
        ({"anyOf": []}, "'anyOf' must be a list of schemas"),
        ({"anyOf": [{}, {"items": {"enum": "a"}}]}, "'anyOf[1].items.enum' must be a list"),
        ({"enum": []}, "'enum' must be a list"),
        ({"minLength": -1}, "'minLength' must be a whole number"),
        ({"minLength": float("inf")}, "'minLength' must be a whole number"),
        ({"minimum": "3"}, "'minimum' must be a number"),
        ({"exclusiveMinimum": True}, "'exclusiveMinimum' must be a number"),
        ({"minItems": 3, "maxItems": 2}, "'minItems' is above 'maxItems'"),
        ({"items": {"$ref": "#/$defs/x"}}, "'items.$ref' names nothing"),
        ({"$ref": "https://example.org/x"}, "'$ref' names nothing"),
        ({"additionalProperties": "no"}, "'additionalProperties' must be a schema"),
    ],
    ids=str,
)
def test_a_fault_is_named_with_its_keyword(schema: dict[str, Any], fault: str) -> None:
    assert (fault_of(schema) or "").startswith(fault)


def test_what_a_grammar_leaves_out_is_named_and_a_property_of_that_name_is_none() -> None:
    schema = {
        "type": "object",
        "properties": {
            "not": {"type": "string"},
            "multipleOf": {"type": "number", "multipleOf": 3},
            "if": {"allOf": [{}, {"type": "array", "uniqueItems": True}]},
            "enum": {"type": "string", "enum": ["a"], "description": "..."},
        },
        "default": {"not": {}},
    }
    assert not_held(schema, alone=False) == {"multipleOf", "allOf", "uniqueItems"}
    assert not_held(schema, alone=True) == set()
    assert not_held({"type": "array", "items": {"not": {}}}, alone=True) == {"not"}
