"""Look through JSON schemas: for what is wrong in one, and for what a grammar made of it does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords that hold schemas by name."""
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SINGLE = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    }
)
"""Keywords that hold one schema."""


@dataclass(frozen=True)
class Place:
    """A schema within a schema.

    Attributes:
        path: where it stands, such as `properties.at.items`; empty: it is the whole.
        schema: it; what is no object holds nothing further.
    """

    path: str
    schema: Any

    def at(self, key: str) -> str:
        """Return the path of one of its keywords."""
        return f"{self.path}.{key}" if self.path else key


def places(root: Any) -> Iterator[Place]:
    """Yield a schema and all schemas within it, but for those whose keyword holds something else."""
    left = [Place("", root)]
    while left:
        place = left.pop()
        yield place
        schema = place.schema if isinstance(place.schema, dict) else {}
        for key, value in schema.items():
            where = place.at(key)
            if key in MAPS and isinstance(value, dict):
                left += [Place(f"{where}.{name}", inner) for name, inner in value.items()]
            elif isinstance(value, list) and (key in LISTS or key == "items"):
                left += [Place(f"{where}[{at}]", inner) for at, inner in enumerate(value)]
            elif key in SINGLE:
                left.append(Place(where, value))


# What is wrong in a schema.


def _is_types(value: Any) -> bool:
    listed = value if isinstance(value, list) else [value]
    return bool(listed) and all(isinstance(each, str) and each in TYPES for each in listed)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value % 1 == 0


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_full_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


MUST_BE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_types, f"one of {', '.join(sorted(TYPES))}, or a list of these"),
    "enum": (_is_full_list, "a list of values"),
    "required": (_is_names, "a list of names"),
    **dict.fromkeys(MAPS, (_is_map, "an object")),
    **dict.fromkeys(LISTS, (_is_full_list, "a list of schemas")),
    **dict.fromkeys(SINGLE - {"items"}, (_is_schema, "a schema")),
    "items": (lambda value: _is_schema(value) or isinstance(value, list), "a schema"),
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
        (_is_count, "a whole number from 0"),
    ),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), (_is_number, "a number")
    ),
    **dict.fromkeys(("pattern", "format", "$ref"), (_is_text, "a string")),
}
"""What the value of a keyword must be, to a function and in words."""
RANGES = (
    ("minItems", "maxItems"),
    ("minLength", "maxLength"),
    ("minProperties", "maxProperties"),
    ("minimum", "maximum"),
)


def fault_of(root: Any) -> str | None:
    """Describe the first thing that is wrong in a schema, with its keyword; None: nothing is found."""
    for place in places(root):
        schema = place.schema
        if not isinstance(schema, dict):
            if not isinstance(schema, bool):
                return f"'{place.path or 'it'}' must be a schema, an object"
            continue
        for key, value in schema.items():
            is_right, right = MUST_BE.get(key, (None, ""))
            if is_right is not None and not is_right(value):
                return f"'{place.at(key)}' must be {right}"
        for low, high in RANGES:
            if low in schema and high in schema and schema[low] > schema[high]:
                return f"'{place.at(low)}' is above '{high}'"
        if "$ref" in schema and not _resolves(root, schema["$ref"]):
            return f"'{place.at('$ref')}' names nothing in the schema: it must be '#' or begin with '#/'"
    return None


def _resolves(root: Any, ref: str) -> bool:
    """Return whether a reference leads to something in its own schema."""
    if not ref.startswith("#/"):
        return ref == "#"
    found = root
    for step in ref[2:].split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return False
    return True


# What a grammar does not hold.

NEVER_HELD = frozenset({"dependentRequired", "dependentSchemas", "else", "if", "not", "then"})
"""Keywords that xgrammar leaves out."""
ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum")
"""Keywords of which it takes one, and leaves out all others that stand beside it."""
OF_NUMBERS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"})
OF_TEXTS = frozenset({"format", "maxLength", "minLength", "pattern"})
OF_LISTS = frozenset(
    {"contains", "items", "maxContains", "maxItems", "minContains", "minItems", "prefixItems", "uniqueItems"}
)
OF_OBJECTS = frozenset(
    {
        *("additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties"),
        *("propertyNames", "required", "unevaluatedProperties"),
    }
)
ASSERTIONS = NEVER_HELD | OF_NUMBERS | OF_TEXTS | OF_LISTS | OF_OBJECTS | {"type", *ALONE}
"""Keywords that ask for something."""


def not_held(root: Any, *, alone: bool) -> set[str]:
    """Return the keywords of a schema that a grammar made of it leaves out.

    Args:
        alone: whether the schema is the whole constraint, not one of a tool's: vLLM looks for some keywords
            then, and gives a schema that has one to another compiler, which holds them all.
    """
    found, elsewhere = set[str](), set[str]()
    for place in places(root):
        if isinstance(place.schema, dict):
            found |= _left_out(place.schema)
            elsewhere |= _looked_for(place.schema)
    return (set() if elsewhere else found) if alone else found | elsewhere


def _left_out(schema: dict[str, Any]) -> set[str]:
    keys = schema.keys() & ASSERTIONS
    for keyword in ALONE:
        if keyword in schema:
            # Whoever lists values names their type too.
            return set(keys - {keyword} - ({"type"} if keyword == "enum" else set()))
    found = keys & NEVER_HELD
    if "type" not in schema:
        found |= keys & (OF_NUMBERS | OF_TEXTS)
        found |= keys & {"required"} if keys & OF_OBJECTS == {"required"} else set()
    return found


def _looked_for(schema: dict[str, Any]) -> set[str]:
    """Return the keywords for which vLLM has another compiler take a schema that stands alone."""
    given = schema.get("type")
    types = set(given) if isinstance(given, list) else {given}
    found = set[str]()
    if "number" in types:
        found |= schema.keys() & {"multipleOf"}
    if "array" in types:
        found |= schema.keys() & {"contains", "maxContains", "minContains"}
        found |= {"uniqueItems"} if schema.get("uniqueItems") else set()
    if "string" in types and schema.keys() & {"format", "pattern"}:
        found |= schema.keys() & {"maxLength", "minLength"}
    if "object" in types and schema.keys() & {"properties", "patternProperties"}:
        found |= schema.keys() & {"propertyNames"}
    several = schema.get("allOf")
    return found | ({"allOf"} if isinstance(several, list) and len(several) > 1 else set())
