"""What a request's constraints cost is counted: what people write passes, what takes minutes is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schemas import DEAR, ORDINARY, flat

from baton.config.groups import LimitSettings
from baton.errors import InvalidRequest
from baton.http.body.schemas import CHEAP, constraints_of, cost_of_schema, require_moderate

LIMITS = LimitSettings()


@pytest.mark.fault("E14")
@pytest.mark.parametrize("name", ORDINARY)
def test_what_people_write_is_not_refused(name: str) -> None:
    require_moderate(ORDINARY[name], LIMITS)
    assert list(constraints_of(ORDINARY[name])), "nothing was looked at"


@pytest.mark.fault("E14")
@pytest.mark.parametrize("name", DEAR)
def test_what_takes_long_to_compile_is_refused_with_its_field(name: str) -> None:
    body, param = DEAR[name]
    with pytest.raises(InvalidRequest) as refused:
        require_moderate(body, LIMITS)
    assert refused.value.param == param
    assert "limits.schema_cost" in refused.value.message


def test_the_bound_is_one_for_the_whole_request() -> None:
    """Each of two fields passes alone, both together do not."""
    body, _ = DEAR["tools and a format, either of which would pass"]
    for field in body:
        require_moderate({field: body[field]}, LIMITS)


def test_tools_that_may_not_be_called_are_not_counted() -> None:
    body, _ = DEAR["512 tools of 25"]
    require_moderate(body | {"tool_choice": "none"}, LIMITS)


def test_small_constraints_need_no_trial() -> None:
    assert require_moderate({"tools": [{"name": "f", "input_schema": flat(5)}]}, LIMITS) == []


@pytest.mark.parametrize(
    "schema", [{"pattern": "a"}, {"allOf": [{}, {}]}, {"patternProperties": {"a": {}}}, {"not": {}}]
)
def test_what_may_cost_more_than_it_shows_is_always_tried(schema: dict[str, Any]) -> None:
    assert cost_of_schema(schema) > CHEAP


def test_tools_in_a_namespace_and_their_grammars_are_found() -> None:
    """As the Responses API takes them."""
    custom = {"type": "custom", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
    body = {"tools": [{"type": "namespace", "tools": [{"name": "f", "parameters": flat(2)}, custom]}]}
    found = [(constraint.param, constraint.kind) for constraint in constraints_of(body)]
    assert found == [("tools", "json"), ("tools[0].tools[1].format", "regex")]


@pytest.mark.fault("E14")
@pytest.mark.parametrize("schema", [{}, {"parameters": {}}, {"parameters": None}], ids=str)
def test_a_tool_without_parameters_counts_by_its_name(schema: dict[str, Any]) -> None:
    for wrap in (
        lambda tool: tool,
        lambda tool: {"function": tool},
        lambda tool: {"type": "custom", "custom": tool},
    ):
        tools = [wrap({"name": f"{number:03}".ljust(128, "x")} | schema) for number in range(300)]
        (found,) = require_moderate({"tools": tools}, LIMITS)
        assert found.text.count("xxx")


COSTLY = flat(160) | {"minProperties": 50, "maxProperties": 100}


@pytest.mark.fault("E14")
@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "name": "f", "parameters": COSTLY, "function": {}},
        {"name": "f", "input_schema": COSTLY, "function": {"parameters": {}}},
        {"type": "function", "function": {"name": "f", "parameters": COSTLY}, "parameters": {}},
    ],
)
def test_no_second_place_for_a_schema_hides_the_first(tool: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        require_moderate({"tools": [tool]}, LIMITS)


@pytest.mark.fault("E14")
def test_a_tool_that_a_message_defines_counts_as_the_others() -> None:
    """Anthropic's messages may add tools."""
    definition = {"name": "f", "input_schema": COSTLY}
    block = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}}
    with pytest.raises(InvalidRequest) as refused:
        require_moderate({"messages": [{"role": "system", "content": [block]}]}, LIMITS)
    assert refused.value.param == "messages[0].content[0].tool.definition.input_schema"


@pytest.mark.fault("E14")
def test_a_grammar_within_a_structural_tag_is_tried() -> None:
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": 'root ::= "a"'}}
    for body in ({"response_format": tag}, {"structured_outputs": {"structural_tag": tag}}):
        assert [constraint.kind for constraint in require_moderate(body, LIMITS)] == ["structural_tag"]


def optional(count: int) -> dict[str, Any]:
    """Optional fields as pydantic writes them, each with a sentence about it."""
    text = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "description": "x" * 120}
    return {"type": "object", "properties": {f"field_{number}": text for number in range(count)}}


def numbers(count: int) -> dict[str, Any]:
    """Whole numbers as zod writes them."""
    most = 2**53 - 1
    number = {"type": "integer", "minimum": -most, "maximum": most}
    names = [f"number_{at}" for at in range(count)]
    return {"type": "object", "properties": dict.fromkeys(names, number), "required": names}


def referring(count: int) -> dict[str, Any]:
    """References as pydantic wrote them before 2.9."""
    one = {"allOf": [{"$ref": "#/$defs/Kind"}], "description": "one of them"}
    kinds = {"Kind": {"enum": ["a", "b"], "type": "string"}}
    return {"properties": {f"kind_{at}": one for at in range(count)}, "$defs": kinds}


@pytest.mark.parametrize(("schema", "tools"), [(optional(15), 64), (numbers(3), 100), (referring(1), 100)])
def test_the_tools_of_real_agents_pass(schema: dict[str, Any], tools: int) -> None:
    body = {"tools": [{"name": f"f{at}", "input_schema": schema} for at in range(tools)]}
    require_moderate(body, LIMITS)


KEYS = st.sampled_from(
    [
        *(
            "p",
            "q",
            "r",
            "properties",
            "required",
            "minProperties",
            "maxProperties",
            "minLength",
            "maxLength",
        ),
        *("minimum", "pattern", "patternProperties", "enum", "json_schema", "schema", "format", "function"),
        *("parameters", "json", "regex", "choice", "grammar", "tools", "type", "$defs"),
    ]
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0.5, -1e300, "", "x", "(a+", "(" * 40, "{", "[]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
FIELDS = ("response_format", "structured_outputs", "text", "output_config", "tools", "functions")


@given(st.dictionaries(st.sampled_from(FIELDS), anything))
def test_values_of_any_type_are_counted_or_left_to_vllm(body: dict[str, Any]) -> None:
    try:
        constraints = require_moderate(body, LIMITS)
    except InvalidRequest:
        return
    assert all(constraint.cost > CHEAP for constraint in constraints)
