"""Constraints as people write them, and as somebody would who wants them to take minutes to compile."""

from __future__ import annotations

import json
from typing import Any

from support.hostile import json_schema

Body = dict[str, Any]
LOWEST, HIGHEST = -(2**63), 2**63 - 1


def flat(names: int, prefix: str = "p", **each: Any) -> Body:
    """A schema of so many properties."""
    properties = {f"{prefix}{number}": dict(each) or {"type": "string"} for number in range(names)}
    return {"type": "object", "properties": properties}


def strict(names: int) -> Body:
    """The same as OpenAI's strict mode wants it."""
    schema = flat(names)
    return schema | {"required": list(schema["properties"]), "additionalProperties": False}


def tools_of(count: int, properties: int) -> Body:
    """So many tools, no two with the same parameters."""
    functions = [
        {"name": f"tool{number}", "description": "Does it.", "parameters": flat(properties, f"t{number}p")}
        for number in range(count)
    ]
    return {"tools": [{"type": "function", "function": function} for function in functions]}


ORDER: Body = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "placed": {"type": "string", "format": "date-time"},
        "status": {"enum": ["open", "paid", "sent", "returned"]},
        "customer": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 80},
                "email": {"type": "string", "pattern": r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$"},
                "address": {"$ref": "#/$defs/address"},
            },
            "required": ["name", "email"],
        },
        "lines": {
            "type": "array",
            "minItems": 1,
            "maxItems": 100,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                    "amount": {"type": "integer", "minimum": 1, "maximum": 999},
                    "price": {"type": "number", "minimum": 0},
                    "gift": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 80}]},
                },
                "required": ["sku", "amount"],
            },
        },
    },
    "required": ["id", "status", "lines"],
    "$defs": {"address": strict(6)},
}

ORDINARY: dict[str, Body] = {
    "a nested order": json_schema(ORDER),
    "a strict schema of 100": json_schema(strict(100)),
    "40 optional properties": json_schema(flat(40)),
    "64 tools of 10": tools_of(64, 10),
    "512 small tools": tools_of(512, 1),
    "lengths": json_schema(
        {
            "type": "object",
            "properties": {
                name: {"type": "string", "maxLength": most}
                for name, most in {"name": 100, "title": 200, "body": 2000}.items()
            },
        }
    ),
    "one to five of ten": json_schema(flat(10) | {"minProperties": 1, "maxProperties": 5}),
    "an enum of 1,000": json_schema({"enum": [f"value {number}" for number in range(1000)]}),
    "a tool of Anthropic's": {"tools": [{"name": "look", "input_schema": flat(10)}]},
    "a format of Responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": ORDER}}},
    "a pattern": {"structured_outputs": {"regex": r"\d{4}-\d{2}-\d{2}"}},
    "a choice": {"structured_outputs": {"choice": ["red", "green", "blue"]}},
    "a grammar": {"structured_outputs": {"grammar": 'root ::= ("a" | "b")+ [0-9]{1,3}'}},
    "keys by a pattern": json_schema({"patternProperties": {"^x-": {"type": "string"}}, "type": "object"}),
}
"""These must pass."""

RANGES = {
    "type": "object",
    "properties": {
        f"p{number}": {"type": "integer", "minimum": LOWEST + number, "maximum": HIGHEST - number}
        for number in range(400)
    },
}
SIZES = {"minProperties": 50, "maxProperties": 100}
DEAR: dict[str, tuple[Body, str]] = {
    "some of 160 properties": (json_schema(flat(160) | SIZES), "response_format"),
    "some of 160 properties as text": (
        {"structured_outputs": {"json": json.dumps(flat(160) | SIZES)}},
        "structured_outputs",
    ),
    "2,000 optional properties": (json_schema(flat(2000)), "response_format"),
    "400 ranges": (json_schema(RANGES), "response_format"),
    "lengths of all kinds": (
        json_schema(
            {"anyOf": [{"type": "string", "minLength": low, "maxLength": 200} for low in range(1, 199)]}
            | {"items": [{"type": "string", "maxLength": most} for most in range(100, 200)]}
        ),
        "response_format",
    ),
    "60 patterns": (
        json_schema({"items": [{"pattern": f"^[a-z]{{1,200}}-{number}$"} for number in range(60)]}),
        "response_format",
    ),
    "512 tools of 25": (tools_of(512, 25), "tools"),
    "one tool among others": (
        {"tools": [*tools_of(3, 2)["tools"], {"type": "function", "function": {"parameters": RANGES}}]},
        "tools[3].function.parameters",
    ),
    "a tool of Anthropic's": (
        {"tools": [{"name": "f", "input_schema": flat(160) | SIZES}]},
        "tools[0].input_schema",
    ),
    "a format of Responses": (
        {"text": {"format": {"type": "json_schema", "schema": flat(2000)}}},
        "text",
    ),
    "a structural tag": (
        {"response_format": {"type": "structural_tag", "format": {"json_schema": RANGES}}},
        "response_format",
    ),
    "tools and a format, either of which would pass": (
        tools_of(64, 25) | json_schema(flat(800)),
        "response_format",
    ),
}
"""These must not, and which field says why."""
