"""Find everything in a request that an engine would compile, and limit its cost; see `compile_cost.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.config.groups import LimitSettings
from baton.errors import InvalidRequest
from baton.http.validation.compile_cost import (
    CHEAP,
    DOUBTFUL,
    LETTERS_PER_UNIT,
    cost_of_enum,
    cost_of_length,
    cost_of_names,
    cost_of_pattern,
    cost_of_schema,
)

TOOLS = ("tools", "functions")
"""Fields whose tools an engine makes one grammar of."""


@dataclass(frozen=True)
class Constraint:
    """A constraint on an answer, which an engine compiles.

    Attributes:
        param: the field that holds it.
        kind: `json`, `regex`, `grammar` or `structural_tag`.
        text: the constraint as the compiler reads it.
        cost: estimated cost, in units.
    """

    param: str
    kind: str
    text: str
    cost: int


def require_moderate(body: Mapping[str, Any], limits: LimitSettings) -> list[Constraint]:
    """Limit the cost of all constraints of a request; returns those that need a trial.

    Raises:
        InvalidRequest: the constraints cost too much; `param` names the field that costs most.
    """
    found = list(constraints_of(body))
    if sum(constraint.cost for constraint in found) > limits.schema_cost:
        raise _too_costly(body, max(found, key=lambda constraint: constraint.cost), found, limits)
    return [constraint for constraint in found if constraint.cost > CHEAP]


def doubtful_grammars(grammar: Mapping[str, Any], param: str) -> list[Constraint]:
    """Find what needs a trial in the grammar that an engine made of a request.

    Args:
        grammar: it, as `structured_outputs` holds one.
        param: the field that it was made of.
    """
    return [constraint for constraint in _structured(grammar, param) if constraint.cost > CHEAP]


def _too_costly(
    body: Mapping[str, Any], costliest: Constraint, found: list[Constraint], limits: LimitSettings
) -> InvalidRequest:
    param = costliest.param
    if param in TOOLS:
        param = next(
            (
                where
                for where, _, schema in _tools(body, param)
                if cost_of_schema(schema) > limits.schema_cost
            ),
            param,
        )
    total = sum(constraint.cost for constraint in found)
    return InvalidRequest(
        f"'{param}' costs too much to compile: all schemas, tools and patterns of the request cost {total} "
        f"together; at most {limits.schema_cost} is allowed (setting limits.schema_cost). "
        "Optional properties, minProperties and maxProperties, ranges of numbers, lengths of texts and "
        "patterns cost most.",
        param=param,
    )


def constraints_of(body: Mapping[str, Any]) -> Iterator[Constraint]:
    """Yield everything in a body that an engine may compile, for all operations."""
    format_ = body.get("response_format")
    if isinstance(format_, dict):
        if format_.get("type") == "structural_tag":
            yield _schema("response_format", format_, "structural_tag")
        yield from _json("response_format", _at(format_, "json_schema", "schema"))
    yield from _json("text", _at(body, "text", "format", "schema"))
    yield from _json("output_config", _at(body, "output_config", "format", "schema"))
    yield from _structured(body.get("structured_outputs"), "structured_outputs")
    for field in TOOLS if body.get("tool_choice") != "none" else ():
        tools = list(_tools(body, field))
        if tools:
            yield _together(field, tools)
        yield from _tool_grammars(body, field)


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _json(param: str, schema: Any) -> Iterator[Constraint]:
    if isinstance(schema, dict):
        yield _schema(param, schema, "json")


def _schema(param: str, schema: Any, kind: str) -> Constraint:
    text = json.dumps(schema)
    cost = cost_of_schema(schema) + cost_of_length(text, schema)
    if kind == "structural_tag":  # it may hold grammars, and formats that repeat
        cost += DOUBTFUL
    return Constraint(param, kind, text, cost)


def _structured(value: Any, param: str) -> Iterator[Constraint]:
    if not isinstance(value, dict):
        return
    for kind in ("json", "structural_tag"):
        given = value.get(kind)
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):  # refused elsewhere, or by vLLM
                continue
        if isinstance(given, dict):
            yield _schema(param, given, kind)
    pattern, grammar, choices = (value.get(kind) for kind in ("regex", "grammar", "choice"))
    if isinstance(pattern, str):
        yield Constraint(param, "regex", pattern, DOUBTFUL + cost_of_pattern(pattern))
    if isinstance(grammar, str):
        yield Constraint(param, "grammar", grammar, _grammar_cost(grammar))
    if isinstance(choices, list):
        texts = [choice for choice in choices if isinstance(choice, str)]
        yield Constraint(param, "json", json.dumps({"enum": texts}), cost_of_enum(texts))


def _grammar_cost(grammar: str) -> int:
    return DOUBTFUL + len(grammar) // LETTERS_PER_UNIT


def _listed(body: Mapping[str, Any], field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each tool with its path, also the tools within a namespace."""
    tools = body.get(field)
    for at, tool in enumerate(tools if isinstance(tools, list) else []):
        if isinstance(tool, dict):
            yield f"{field}[{at}]", tool
            for place, inner in _listed(tool, "tools") if field == "tools" else ():
                yield f"{field}[{at}].{place}", inner
    if field == "tools":
        yield from _added(body.get("messages"))


def _added(messages: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each tool that a message of Anthropic's API defines, with its path."""
    for at, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for number, block in enumerate(content if isinstance(content, list) else []):
            definition = _at(block, "tool", "definition")
            if isinstance(definition, dict):
                yield f"messages[{at}].content[{number}].tool.definition", definition


def _tool_grammars(body: Mapping[str, Any], field: str) -> Iterator[Constraint]:
    """Yield the grammars of custom tools."""
    for place, tool in _listed(body, field):
        given = _at(tool, "format") or _at(tool, "custom", "format")
        for definition in (_at(given, "definition"), _at(given, "grammar", "definition")):
            if isinstance(definition, str):
                kind = (
                    "regex"
                    if "regex" in (_at(given, "syntax"), _at(given, "grammar", "syntax"))
                    else "grammar"
                )
                cost = _grammar_cost(definition)
                yield Constraint(f"{place}.format", kind, definition, cost)


def _tools(body: Mapping[str, Any], field: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each tool's path, name and schema, in the shapes of OpenAI and Anthropic.

    A tool without a schema has the empty one: its name is compiled all the same.
    """
    for place, tool in _listed(body, field):
        for holder, path in tool_holders(tool):  # a handler reads only one of them
            schemas = [
                (f".{key}", holder[key])
                for key in ("parameters", "input_schema")
                if isinstance(holder.get(key), dict)
            ]
            if schemas or isinstance(holder.get("name"), str):
                for key, schema in schemas or [("", {})]:
                    yield f"{place}{path}{key}", holder.get("name"), schema


def tool_holders(tool: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    """List the objects that may hold a tool's name and schema, each with its path within the tool."""
    inner = [(tool[key], f".{key}") for key in ("function", "custom") if isinstance(tool.get(key), dict)]
    return [(tool, ""), *inner]


def _together(field: str, tools: list[tuple[str, Any, Any]]) -> Constraint:
    """Build the schema that vLLM makes from all tools when a call of one is required."""
    options: list[Any] = []
    definitions: dict[str, Any] = {}
    for _, name, schema in tools:
        parameters = {key: value for key, value in schema.items() if key != "$defs"}
        definitions |= schema["$defs"] if isinstance(schema.get("$defs"), dict) else {}
        options.append(
            {
                "properties": {"name": {"type": "string", "enum": [str(name)]}, "parameters": parameters},
                "required": ["name", "parameters"],
            }
        )
    whole = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": options}}
    text = json.dumps(whole | ({"$defs": definitions} if definitions else {}))
    schemas = [schema for _, _, schema in tools]
    cost = (
        cost_of_schema(schemas) + cost_of_length(text, schemas) + cost_of_names(name for _, name, _ in tools)
    )
    return Constraint(field, "json", text, cost)
