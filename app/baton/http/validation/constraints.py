"""Find what of a request an engine would compile, and count what that costs together.

The cost is counted, not timed, so that one request is always judged alike. One unit is about a millisecond of
xgrammar's with 16,000 tokens of vocabulary.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from baton.config.groups import LimitSettings
from baton.errors import InvalidRequest
from baton.http.validation.regex_cost import TooCostly, examine

CHEAP = 100
"""What costs no more needs no trial: it compiles in some tens of milliseconds."""
DOUBTFUL = CHEAP + 1
"""Counted for what may cost much more than can be seen of it."""
CHARACTER = 12
"""Units for each place of a text of limited length, as most tokens of a vocabulary may stand there."""
OTHER_LENGTH = 4
"""Units for a place in texts that are shorter than the longest: compilers share what they have in common."""
LONG = 200
"""Places of a text above which compilers count instead of writing them out."""
ELEMENT = 4
"""Units for each element of a pattern, its repetitions written out."""
ITEMS_PER_UNIT, LETTERS_PER_UNIT = 40, 200
"""Values of an enumeration, and their characters, that cost one unit."""
OPTIONAL_SQUARED_PER_UNIT = 250
"""Any two optional properties may follow each other."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
REPEATED_BOUND = 4
"""A bound that stands in a schema again costs so many times less: what compilers make of it is shared."""
WORDS = ("title", "description", "$comment")
"""Keywords for people, whose texts are not compiled."""
NOTHING = {"type": "null"}
COMBINING = frozenset({"not", "if", "dependentSchemas", "dependencies", "patternProperties"})
"""Keywords whose cost is that of products."""


@dataclass(frozen=True)
class Constraint:
    """Something to compile.

    Attributes:
        param: the field it stands in.
        kind: `json`, `regex`, `grammar` or `structural_tag`.
        text: as the compiler reads it.
        cost: in units.
    """

    param: str
    kind: str
    text: str
    cost: int


def require_moderate(body: Mapping[str, Any], limits: LimitSettings) -> list[Constraint]:
    """Bound what the constraints of a request cost together; returns those that need a trial.

    Raises:
        InvalidRequest: they cost too much; `param` names the field that costs most.
    """
    found = list(constraints_of(body))
    if sum(constraint.cost for constraint in found) > limits.schema_cost:
        raise _too_dear(body, max(found, key=lambda constraint: constraint.cost), found, limits)
    return [constraint for constraint in found if constraint.cost > CHEAP]


def _too_dear(
    body: Mapping[str, Any], dearest: Constraint, found: list[Constraint], limits: LimitSettings
) -> InvalidRequest:
    param = dearest.param
    if param in ("tools", "functions"):
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
        f"'{param}' takes too much to compile: all schemas, tools and patterns of the request cost {total} "
        f"together, and at most {limits.schema_cost} is taken (setting limits.schema_cost). "
        "Optional properties, minProperties and maxProperties, ranges of numbers, lengths of texts and "
        "patterns cost most.",
        param=param,
    )


def constraints_of(body: Mapping[str, Any]) -> Iterator[Constraint]:
    """Everything in a body that an engine may compile, whichever operation it belongs to."""
    format_ = body.get("response_format")
    if isinstance(format_, dict):
        if format_.get("type") == "structural_tag":
            yield _schema("response_format", format_, "structural_tag")
        yield from _json("response_format", _at(format_, "json_schema", "schema"))
    yield from _json("text", _at(body, "text", "format", "schema"))
    yield from _json("output_config", _at(body, "output_config", "format", "schema"))
    yield from _structured(body.get("structured_outputs"))
    for field in ("tools", "functions") if body.get("tool_choice") != "none" else ():
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
    cost = cost_of_schema(schema) + _letters_cost(text, schema)
    if kind == "structural_tag":  # it may hold grammars, and formats that repeat
        cost += DOUBTFUL
    return Constraint(param, kind, text, cost)


def _letters_cost(text: str, schema: Any) -> int:
    """What the length of a schema's JSON costs, without the words that are there for people."""
    words, open_values = 0, [schema]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            words += sum(len(value[key]) for key in WORDS if isinstance(value.get(key), str))
            value = value.values()
        open_values += [item for item in value if isinstance(item, dict | list)]
    return max(0, len(text) - words) // LETTERS_PER_UNIT


def _structured(value: Any) -> Iterator[Constraint]:
    if not isinstance(value, dict):
        return
    param = "structured_outputs"
    for kind in ("json", "structural_tag"):
        given = value.get(kind)
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError:  # refused elsewhere, or by vLLM
                continue
        if isinstance(given, dict):
            yield _schema(param, given, kind)
    pattern, grammar, choices = (value.get(kind) for kind in ("regex", "grammar", "choice"))
    if isinstance(pattern, str):
        yield Constraint(param, "regex", pattern, DOUBTFUL + _pattern_cost(pattern))
    if isinstance(grammar, str):
        yield Constraint(param, "grammar", grammar, DOUBTFUL + len(grammar) // LETTERS_PER_UNIT)
    if isinstance(choices, list):
        texts = [choice for choice in choices if isinstance(choice, str)]
        yield Constraint(param, "json", json.dumps({"enum": texts}), _enum_cost(texts))


def _listed(body: Mapping[str, Any], field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each tool with its place; a namespace of tools is none, but holds some."""
    tools = body.get(field)
    for at, tool in enumerate(tools if isinstance(tools, list) else []):
        if isinstance(tool, dict):
            yield f"{field}[{at}]", tool
            for place, inner in _listed(tool, "tools") if field == "tools" else ():
                yield f"{field}[{at}].{place}", inner
    if field == "tools":
        yield from _added(body.get("messages"))


def _added(messages: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each tool that a message of Anthropic's defines, with its place."""
    for at, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for number, block in enumerate(content if isinstance(content, list) else []):
            definition = _at(block, "tool", "definition")
            if isinstance(definition, dict):
                yield f"messages[{at}].content[{number}].tool.definition", definition


def _tool_grammars(body: Mapping[str, Any], field: str) -> Iterator[Constraint]:
    """The grammars of custom tools."""
    for place, tool in _listed(body, field):
        given = _at(tool, "format") or _at(tool, "custom", "format")
        for definition in (_at(given, "definition"), _at(given, "grammar", "definition")):
            if isinstance(definition, str):
                kind = (
                    "regex"
                    if "regex" in (_at(given, "syntax"), _at(given, "grammar", "syntax"))
                    else "grammar"
                )
                cost = DOUBTFUL + len(definition) // LETTERS_PER_UNIT
                yield Constraint(f"{place}.format", kind, definition, cost)


def _tools(body: Mapping[str, Any], field: str) -> Iterator[tuple[str, Any, Any]]:
    """Each tool's place, its name and its schema, in OpenAI's shapes and in Anthropic's."""
    for place, tool in _listed(body, field):
        inner = tool.get("function")
        holders = [(tool, "")] + ([(inner, ".function")] if isinstance(inner, dict) else [])
        for holder, path in holders:  # a handler reads one of them, and ignores the other
            for key in ("parameters", "input_schema"):
                schema = holder.get(key)
                if isinstance(schema, dict):
                    yield f"{place}{path}.{key}", holder.get("name"), schema


def _together(field: str, tools: list[tuple[str, Any, Any]]) -> Constraint:
    """The schema that vLLM makes of all tools where a call of one is required."""
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
    return Constraint(field, "json", text, cost_of_schema(schemas) + _letters_cost(text, schemas))


def cost_of_schema(root: Any) -> int:
    """Count what compiling a JSON schema costs, or several together, in units."""
    cost, lengths, patterns, open_values = 0.0, set[int](), set[str](), [root]
    bounds = Counter[str]()
    while open_values:
        value = open_values.pop()
        inner = value
        if value == NOTHING:
            continue
        if isinstance(value, dict):
            cost += 1 + _own_cost(value)
            bounds.update(repr(value[key]) for key in BOUNDS if _is_number(value.get(key)))
            lengths |= _lengths(value)
            patterns |= _patterns(value)
            inner = value.values()
        open_values += [item for item in inner if isinstance(item, dict | list)]
    cost += sum(_pattern_cost(pattern) for pattern in patterns) + (DOUBTFUL if patterns else 0)
    cost += sum(len(bound) * (1 + (count - 1) / REPEATED_BOUND) for bound, count in bounds.items())
    return round(cost + _lengths_cost(lengths))


def _own_cost(schema: dict[str, Any]) -> float:
    """What one schema adds besides those within it."""
    properties, required = schema.get("properties"), schema.get("required")
    names = set(properties) if isinstance(properties, dict) else set()
    texts = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    cost = len(names) + len(names - texts) ** 2 / OPTIONAL_SQUARED_PER_UNIT
    counts = [_number(schema.get(key)) for key in ("minProperties", "maxProperties")]
    if any(counts):
        cost += max(len(names), 1) * (max(counts) if counts[1] else max(len(names), counts[0]))
    cost += _enum_cost(schema["enum"]) if isinstance(schema.get("enum"), list) else 0
    several = schema.get("allOf")
    if COMBINING & schema.keys() or (isinstance(several, list) and len(several) > 1):
        cost += DOUBTFUL
    return cost


def _enum_cost(values: list[Any]) -> int:
    letters = sum(len(value) for value in values if isinstance(value, str))
    return len(values) // ITEMS_PER_UNIT + letters // LETTERS_PER_UNIT


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> int:
    return int(value) if _is_number(value) and value > 0 else 0


def _lengths(schema: dict[str, Any]) -> set[int]:
    """How long a text may be or must be."""
    longest = max(_number(schema.get("minLength")), _number(schema.get("maxLength")))
    return {min(longest, LONG)} if longest else set()


def _lengths_cost(lengths: set[int]) -> int:
    ordered = sorted(lengths, reverse=True)
    return CHARACTER * sum(ordered[:1]) + OTHER_LENGTH * sum(shorter for _, shorter in pairwise(ordered))


def _patterns(schema: dict[str, Any]) -> set[str]:
    pattern, keys = schema.get("pattern"), schema.get("patternProperties")
    found = {pattern} if isinstance(pattern, str) else set()
    return found | (set(keys) if isinstance(keys, dict) else set())


def _pattern_cost(pattern: str) -> int:
    try:
        return ELEMENT * examine(pattern, len(pattern))
    except TooCostly:  # bounded elsewhere where it is compiled; here it may be a property of that name
        return 0
