"""What the trial compiler knows of vLLM's choice of a backend: never less than vLLM itself."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.v1.structured_output import backend_xgrammar  # after the skip

from baton.engines.process.compile_server import FORMATS, may_be_refused  # after the skip

leaves = st.sampled_from([{"type": "string"}, {"type": "integer", "multipleOf": 5}, {"format": "email"}, {}])
keywords = st.sampled_from(
    [
        *("properties", "items", "anyOf", "allOf", "patternProperties", "propertyNames", "uniqueItems"),
        *("contains", "minContains", "maxContains", "multipleOf", "additionalProperties"),
    ]
)


def made(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas with these inside."""
    several = st.dictionaries(st.sampled_from("ab"), inner, max_size=2) | st.lists(inner, max_size=2)
    texts = {
        "type": st.sampled_from(["string", "integer", "number", "array", "object", ["string", "null"]]),
        "format": st.sampled_from([*sorted(FORMATS), "regex", "idn-email"]),
        "pattern": st.just("a"),
        "minLength": st.just(1),
        "maxLength": st.just(2),
    }
    return st.builds(
        lambda one, other: one | other,
        st.dictionaries(keywords, inner | several, max_size=3),
        st.fixed_dictionaries({}, optional=texts),
    )


@settings(max_examples=300, deadline=None)
@given(st.recursive(leaves, made, max_leaves=6))
def test_what_vllm_keeps_from_xgrammar_is_tried_with_the_others(schema: dict[str, Any]) -> None:
    if backend_xgrammar.has_xgrammar_unsupported_json_features(schema):
        assert may_be_refused(schema)


def test_the_formats_that_xgrammar_takes_are_vllms() -> None:
    assert set(backend_xgrammar.STRING_SUPPORTED_FORMATS) == set(FORMATS)


PARSE = """
import json, sys
from baton.engines.process.compile_server import Compilers
compilers = Compilers()
for kind, text in json.load(sys.stdin):
    parsed = compilers.parse(kind, text)
    compilers.compile(parsed)
    print([type(item).__name__ for item in parsed])
"""


def test_every_kind_of_constraint_is_compiled_and_not_only_refused() -> None:
    """A call that the installed compilers do not have would look like a schema that they refuse."""
    patterns = {"type": "object", "properties": {}, "patternProperties": {"^x": {"type": "string"}}}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "object"}}}
    older = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}
    jobs = [
        ("json", json.dumps({"type": "object"})),
        ("json", json.dumps(patterns)),
        ("json", json.dumps({"type": "integer", "multipleOf": 2})),
        ("regex", "[ab]{1,3}"),
        ("grammar", 'root ::= "a" | "b"'),
        ("grammar", 'start: "a" | "b"'),
        ("structural_tag", json.dumps(tag)),
        ("structural_tag", json.dumps(older)),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input=json.dumps(jobs), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "['Grammar']",
        "['Grammar', 'str']",
        "['Grammar', 'NoneType']",
        "['Grammar', 'str']",
        "['Grammar']",
        "['Grammar']",
        "['Grammar']",
        "['Grammar']",
    ]
