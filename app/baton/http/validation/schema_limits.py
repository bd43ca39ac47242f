"""What a schema, a pattern or a grammar of a request may cost those who compile it."""

from __future__ import annotations

from typing import Any

from jiter import from_json
from pydantic_core import to_json

from baton.config.groups import LimitSettings
from baton.errors import InvalidRequest
from baton.http.validation.regex_cost import TooCostly, examine

ENUM = 4096
"""Most values of one `enum` or `choice`."""

PATTERNS = frozenset({"pattern", "regex", "whitespace_pattern", "guided_regex", "guided_whitespace_pattern"})
GRAMMARS = frozenset({"grammar", "guided_grammar", "definition"})
LISTS = frozenset({"enum", "choice", "guided_choice"})
WRITTEN = frozenset({"json", "guided_json", "structural_tag"})
"""These may hold JSON as text."""


def check_schema(name: str, value: Any, limits: LimitSettings) -> None:
    """Bound what `value` holds, wherever in it that stands.

    Args:
        name: the field, for the error.
        value: what the client sent in it: an object with schemas in it, a pattern, a grammar.
        limits: the limits.

    Raises:
        InvalidRequest: it is too much of something.
    """
    if isinstance(value, dict | list):
        size = len(to_json(value)) - _grammar_bytes(value)
        if size > limits.schema_bytes:
            raise _too_long(name, f"{size} bytes of JSON", "schema_bytes", limits.schema_bytes, name)
    _walk(name, value, limits)


def _grammar_bytes(value: Any) -> int:
    """A grammar has a limit of its own."""
    texts = [value.get(key) for key in GRAMMARS] if isinstance(value, dict) else []
    return sum(len(to_json(text)) for text in texts if isinstance(text, str))


def _too_long(key: str, given: str, setting: str, most: int, name: str) -> InvalidRequest:
    said = f"'{key}' holds {given}; at most {int(most)} are taken (setting limits.{setting})."
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
                    f"'{key}' has {len(value)} values; at most {ENUM} are taken.", param=name
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
    """Bound a text by what its key says it is; JSON written in it is looked at too."""
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
        raise InvalidRequest(f"'{key}' is a text that is not valid JSON.", param=name) from None


def _check_pattern(key: str, text: str, name: str, limits: LimitSettings) -> None:
    if len(text) > limits.pattern_bytes:
        given = f"a pattern of {len(text)} characters"
        raise _too_long(key, given, "pattern_bytes", limits.pattern_bytes, name)
    _check_cost(key, text, name, limits, grammar=False)


def _check_cost(key: str, text: str, name: str, limits: LimitSettings, *, grammar: bool) -> None:
    try:
        examine(text, limits.schema_depth, grammar=grammar)
    except TooCostly as error:
        kind = "grammar" if grammar else "pattern"
        raise InvalidRequest(f"The {kind} in '{key}' costs too much: {error}.", param=name) from None
