"""Estimate what compiling a JSON schema, a pattern or an enumeration costs an engine.

The cost is counted from the schema, not measured, so that the same request always gets the same answer. One
unit is about a millisecond of xgrammar's with 16,000 tokens of vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from baton.http.validation.regex_cost import TooCostly, expanded_size

CHEAP = 100
"""Cost up to which a constraint needs no trial: it compiles in some tens of milliseconds."""
DOUBTFUL = CHEAP + 1
"""Cost of a constraint whose real cost cannot be seen from its text: more than is cheap, so it is tried."""
CHARACTER = 12
"""Units for each character of a string of limited length, where most tokens of a vocabulary may stand."""
OTHER_LENGTH = 4
"""The same for strings shorter than the longest: compilers share what they have in common."""
LONG = 200
"""Length above which compilers count characters instead of expanding them."""
ELEMENT = 4
"""Units for each element of a pattern, with its repetitions expanded."""
ITEMS_PER_UNIT, LETTERS_PER_UNIT = 40, 200
"""Values of an enumeration, and their characters, that cost one unit."""
NAME_LETTERS_PER_UNIT = 50
"""Characters of tools' names that cost one unit: a grammar holds each more than once, letter by letter."""
OPTIONAL_SQUARED_PER_UNIT = 250
"""Optional properties, squared, that cost one unit: any two of them may follow each other."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
REPEATED_BOUND = 4
"""A repeated bound costs this many times less, because compilers share it."""
WORDS = ("title", "description", "$comment")
"""Keywords whose texts are not compiled."""
NOTHING = {"type": "null"}
COMBINING = frozenset({"not", "if", "dependentSchemas", "dependencies", "patternProperties"})
"""Keywords whose cost may be a product of the costs of their schemas."""


def cost_of_schema(root: Any) -> int:
    """Return what compiling a JSON schema, or several together, costs in units."""
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
    cost += sum(cost_of_pattern(pattern) for pattern in patterns) + (DOUBTFUL if patterns else 0)
    cost += sum(len(bound) * (1 + (count - 1) / REPEATED_BOUND) for bound, count in bounds.items())
    return round(cost + _lengths_cost(lengths))


def _own_cost(schema: dict[str, Any]) -> float:
    """Return the cost of one schema without those within it."""
    properties, required = schema.get("properties"), schema.get("required")
    names = set(properties) if isinstance(properties, dict) else set()
    texts = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    cost = len(names) + len(names - texts) ** 2 / OPTIONAL_SQUARED_PER_UNIT
    counts = [_number(schema.get(key)) for key in ("minProperties", "maxProperties")]
    if any(counts):
        cost += max(len(names), 1) * (max(counts) if counts[1] else max(len(names), counts[0]))
    cost += cost_of_enum(schema["enum"]) if isinstance(schema.get("enum"), list) else 0
    several = schema.get("allOf")
    if COMBINING & schema.keys() or (isinstance(several, list) and len(several) > 1):
        cost += DOUBTFUL
    return cost


def cost_of_enum(values: list[Any]) -> int:
    """Return the cost of an enumeration."""
    letters = sum(len(value) for value in values if isinstance(value, str))
    return len(values) // ITEMS_PER_UNIT + letters // LETTERS_PER_UNIT


def cost_of_names(names: Iterable[Any]) -> int:
    """Return the cost of the names of tools."""
    return sum(len(name) for name in names if isinstance(name, str)) // NAME_LETTERS_PER_UNIT


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> int:
    return int(value) if _is_number(value) and value > 0 else 0


def _lengths(schema: dict[str, Any]) -> set[int]:
    """Return the length limit of a schema's strings, if there is one."""
    longest = max(_number(schema.get("minLength")), _number(schema.get("maxLength")))
    return {min(longest, LONG)} if longest else set()


def _lengths_cost(lengths: set[int]) -> int:
    ordered = sorted(lengths, reverse=True)
    return CHARACTER * sum(ordered[:1]) + OTHER_LENGTH * sum(shorter for _, shorter in pairwise(ordered))


def _patterns(schema: dict[str, Any]) -> set[str]:
    pattern, keys = schema.get("pattern"), schema.get("patternProperties")
    found = {pattern} if isinstance(pattern, str) else set()
    return found | (set(keys) if isinstance(keys, dict) else set())


def cost_of_pattern(pattern: str) -> int:
    """Return the cost of a regular expression."""
    try:
        return ELEMENT * expanded_size(pattern, len(pattern))
    except TooCostly:  # patterns are limited elsewhere; this may be a property called `pattern`
        return 0


def cost_of_length(text: str, schema: Any) -> int:
    """Return the cost of the length of a schema's JSON, without descriptions."""
    words, open_values = 0, [schema]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            words += sum(len(value[key]) for key in WORDS if isinstance(value.get(key), str))
            value = value.values()
        open_values += [item for item in value if isinstance(item, dict | list)]
    return max(0, len(text) - words) // LETTERS_PER_UNIT
