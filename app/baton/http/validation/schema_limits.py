"""Limit the size and the cost of a request's schemas, patterns and grammars."""

from __future__ import annotations

from typing import Any

from jiter import from_json
from pydantic_core import to_json

from baton.config.groups import LimitSettings
from baton.errors import InvalidRequest
from baton.http.validation.regex_cost import TooCostly, expanded_size

ENUM = 4096
"""Most values of one `enum` or `choice`."""

PATTERNS = frozenset({"pattern", "regex", "whitespace_pattern", "guided_regex", "guided_whitespace_pattern"})
GRAMMARS = frozenset({"grammar", "guided_grammar", "definition"})
LISTS = frozenset({"enum", "choice", "guided_choice"})
WRITTEN = frozenset({"json", "guided_json", "structural_tag"})
"""Fields that may hold JSON as a string."""


def check_schema(name: str, value: Any, limits: LimitSettings) -> None:
    """Check every schema, pattern and grammar in a field, at any depth.

    Args:
        name: the field, for the error.
        value: its value: an object that holds schemas, a pattern or a grammar.
        limits: the limits.

    Raises:
        InvalidRequest: a limit is exceeded.
    """
    if isinstance(value, dict | list):
        size = len(to_json(value)) - _grammar_bytes(value)
        if size > limits.schema_bytes:
            raise _too_long(name, f"{size} bytes of JSON", "schema_bytes", limits.schema_bytes, name)
    _walk(name, value, limits)


def _grammar_bytes(value: Any) -> int:
    """Return the bytes of a value's grammars, which have a limit of their own."""
    texts = [value.get(key) for key in GRAMMARS] if isinstance(value, dict) else []
    return sum(len(to_json(text)) for text in texts if isinstance(text, str))


def _too_long(key: str, given: str, setting: str, most: int, name: str) -> InvalidRequest:
    said = f"'{key}' holds {given}; at most {int(most)} are allowed (setting limits.{setting})."
    return InvalidRequest(said, param=name)


def _walk(name: str, root: Any, limits: LimitSettings) -> None:
    open_values: list[tuple[str, Any, int]] = [(name, root, 0)]
    while open_values:
        key, value, depth = open_values.pop()
        if isinstance(value, str):
            value = _check_text(key, value, name, limits, outermost=depth <= 1)
        if not isinstance(value, dict | list):
            continue
        if depth >= limits.schema_depth:
            raise InvalidRequest(
                f"'{name}' is nested more than {limits.schema_depth} levels deep "
                "(setting limits.schema_depth).",
                param=name,
            )
        if isinstance(value, list):
            if key in LISTS and len(value) > ENUM:
                raise InvalidRequest(
                    f"'{key}' has {len(value)} values; at most {ENUM} are allowed.", param=name
                )
            open_values += [("", item, depth + 1) for item in value if isinstance(item, dict | list)]
        else:
            for pattern in _pattern_keys(value):
                _check_pattern("patternProperties", pattern, name, limits)
            open_values += [(inner, item, depth + 1) for inner, item in value.items() if item]


def _pattern_keys(value: dict[str, Any]) -> list[str]:
    found = value.get("patternProperties")
    return list(found) if isinstance(found, dict) else []


def _check_text(key: str, text: str, name: str, limits: LimitSettings, *, outermost: bool) -> Any:
    """Check a string by its key; returns the JSON that is written in it, if there is any."""
    if key in PATTERNS:
        _check_pattern(key, text, name, limits)
    elif key in GRAMMARS:
        size = len(text.encode())
        if size > limits.grammar_bytes:
            raise _too_long(key, f"a grammar of {size} bytes", "grammar_bytes", limits.grammar_bytes, name)
        _check_cost(key, text, name, limits, grammar=True)
    elif key in WRITTEN and outermost:
        size = len(text.encode())
        if size > limits.schema_bytes:
            raise _too_long(key, f"{size} bytes of JSON", "schema_bytes", limits.schema_bytes, name)
        return _written(key, text, name)
    return None


def _written(key: str, text: str, name: str) -> Any:
    try:
        return from_json(text.encode(), allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError:
        raise InvalidRequest(f"'{key}' is a string that is not valid JSON.", param=name) from None


def _check_pattern(key: str, text: str, name: str, limits: LimitSettings) -> None:
    if len(text) > limits.pattern_bytes:
        given = f"a pattern of {len(text)} characters"
        raise _too_long(key, given, "pattern_bytes", limits.pattern_bytes, name)
    _check_cost(key, text, name, limits, grammar=False)


def _check_cost(key: str, text: str, name: str, limits: LimitSettings, *, grammar: bool) -> None:
    try:
        expanded_size(text, limits.schema_depth, grammar=grammar)
    except TooCostly as error:
        kind = "grammar" if grammar else "pattern"
        raise InvalidRequest(
            f"The {kind} in '{key}' costs too much to compile: {error}.", param=name
        ) from None
