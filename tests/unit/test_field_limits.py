"""No field of vLLM's requests can ask for much without a limit; patterns are read in one go."""

from __future__ import annotations

import contextlib
import json
import time
from importlib.resources import files
from typing import Any

import pytest

from baton.config.groups import LimitSettings
from baton.errors import InvalidRequest
from baton.http.body.fields import FIELD_LIMITS, STEERING_KEYS, check_field_limits
from baton.http.body.schemas import TooCostly, expanded_size

UNCAPPED = {
    "data": "the plugin's own, which bounds it",
    "dimensions": "vLLM knows those a model has",
    "max_tool_calls": "nothing is called here",
    "reasoning": "a few fixed fields",
    "routed_experts_prompt_start": "a place in the prompt",
    "seed": "64 bits",
    "stream_interval": "less output, the more it is",
    "stream_options": "a few fixed fields",
    "thinking": "a few fixed fields",
    "tokens": "one prompt's; limits.body_values bounds it",
    "top_k": "a threshold; above the vocabulary it is none",
    "top_n": "a threshold",
}
"""Fields that need no limit of their own, and why."""


def fields() -> dict[str, list[Any]]:
    """Every field of every request of vLLM's, with its schemas."""
    document = json.loads((files("baton.http") / "vllm_schemas.json").read_text())
    found: dict[str, list[Any]] = {}

    def add(schema: dict[str, Any]) -> None:
        for option in schema.get("anyOf", []) + schema.get("oneOf", []):
            add(option)
        if "$ref" in schema:
            add(document["components"][schema["$ref"].rpartition("/")[2]])
        for name, field in schema.get("properties", {}).items():
            found.setdefault(name, []).append(field)

    for operation in document["operations"].values():
        add(operation["request"])
    return found


def is_amount(schema: dict[str, Any]) -> bool:
    """Whether a field can hold a whole number, a list or an object."""
    options = schema.get("anyOf", []) + schema.get("oneOf", [])
    many = (
        schema.get("type") in ("integer", "array", "object")
        or "$ref" in schema
        or not schema.get("type", options)
    )
    return many or any(is_amount(option) for option in options)


def test_no_field_of_vllms_requests_is_forgotten() -> None:
    amounts = {name for name, schemas in fields().items() if any(map(is_amount, schemas))}
    assert len(amounts) > 50
    assert amounts - set(FIELD_LIMITS) - set(UNCAPPED) - set(STEERING_KEYS) == set()
    assert set(UNCAPPED) <= amounts, "a reason for a field that is no longer there"
    assert not set(UNCAPPED) & set(FIELD_LIMITS)


ODD: tuple[Any, ...] = ("", "x", 0, -2, True, 1.5, [], {}, [None], [[]], {"x": None}, [{}], "9" * 5000)


@pytest.mark.parametrize("name", FIELD_LIMITS)
def test_a_value_of_any_type_is_refused_in_our_words_or_left_to_vllm(name: str) -> None:
    for value in ODD:
        with contextlib.suppress(InvalidRequest):
            check_field_limits({name: value}, LimitSettings())
    check_field_limits({name: None}, LimitSettings())


FAIR = (
    r"^[a-z0-9]+(-[a-z0-9]+)*$",
    r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$",
    r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:\d{2})$",
    r"^(?:[A-Z][a-z]+ ?)+$",
    r"(a{100}){100}",
    r"a+?b*?",
    r"(\(a+\))+",
    r"[(+*]+[^]+]+",
    r"^((25[0-5]|2[0-4]\d|1?\d?\d)(\.|$)){4}$",
    "(" * 32 + "a" + ")" * 32,
    "(",
    "a)",
    "+",
    "[",
    "\\",
    "{1",
)
COSTLY = (
    "(a+)+b",
    "(a*)*",
    "(?:a+?)+",
    r"(\w+\s?)+$",
    "((a+))+",
    "(a|a+)+",
    "(|a+)*",
    "(a+){2,}",
    "a{1000}{1000}",
    "(a{1000}){1000}",
    "((a{50}){50}){50}",
    "a{99999999999999999999}",
    "a{1,10001}",
    "(" * 33,
)


@pytest.mark.parametrize("pattern", FAIR)
def test_a_pattern_people_write_passes(pattern: str) -> None:
    expanded_size(pattern, 32)


@pytest.mark.parametrize("pattern", COSTLY)
def test_a_pattern_that_costs_too_much_is_refused(pattern: str) -> None:
    with pytest.raises(TooCostly):
        expanded_size(pattern, 32)


def test_a_grammar_may_repeat_repetitions_and_name_brackets() -> None:
    grammar = 'root ::= (ws item+)+ "((((((((" | \'(\' # it\'s\nitem ::= [a-z(]{1,100} "\\""\n'
    expanded_size(grammar * 1000, 4, grammar=True)
    with pytest.raises(TooCostly):
        expanded_size(grammar + "x ::= ('a'{1000}){1000}", 4, grammar=True)


@pytest.mark.parametrize(
    "piece",
    [
        "[",
        "[a",
        "[^]",
        "[\\",
        "(",
        "((?P<",
        "{",
        "{1",
        "{1,",
        "'",
        "'\\",
        '"\\',
        "\\",
        "a",
        "*",
        "(?P<aaaa",
        "a{2}",
    ],
)
@pytest.mark.parametrize("grammar", [True, False])
@pytest.mark.fault("E10")
def test_parsing_a_pattern_is_fast_for_every_input(piece: str, grammar: bool) -> None:
    """As long as the longest grammar; a way of reading that looks twice at each character takes minutes."""
    text = piece * (64 * 1024 // len(piece))
    began = time.process_time()
    with contextlib.suppress(TooCostly):
        expanded_size(text, 32, grammar=grammar)
    assert time.process_time() - began < 0.5


NAMES = ["x" * 129, 'a"b', "a'b", "a\nb", "a\x00b", "<a>", "a\\b", "\x85", "a\u2028b"]


@pytest.mark.fault("E14")
@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize(
    "tool",
    [
        lambda name: {"type": "function", "function": {"name": name}},
        lambda name: {"type": "function", "name": name},
        lambda name: {"type": "custom", "name": name},
        lambda name: {"type": "custom", "custom": {"name": name}},
        lambda name: {"name": name, "input_schema": {}},
        lambda name: {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": name}]},
    ],
)
def test_names_that_no_tool_has_are_refused_by_their_field(tool: Any, name: str) -> None:
    for field in ("tools", "functions"):
        with pytest.raises(InvalidRequest) as refused:
            check_field_limits({field: [{"name": "good"}, tool(name)]}, LimitSettings())
        assert refused.value.param is not None
        assert refused.value.param.startswith(f"{field}[1].")
        assert refused.value.param.endswith(".name")
        assert "128" in refused.value.message
    added = [
        {"role": "system", "content": [{"type": "tool_addition", "tool": {"definition": {"name": name}}}]}
    ]
    with pytest.raises(InvalidRequest):
        check_field_limits({"messages": added}, LimitSettings())


@pytest.mark.parametrize("name", ["x" * 128, "mcp__files.read-all/2", "Suche_für_Größe", "天気", "a b:c"])
def test_names_that_people_give_pass(name: str) -> None:
    check_field_limits({"tools": [{"name": name}]}, LimitSettings())
