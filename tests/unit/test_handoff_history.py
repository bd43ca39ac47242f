"""What a resent conversation is recognised by, message by message."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.library.handoff import Conversation
from baton.relay.prompt.resent import Resent, answer_fingerprint, fingerprint, resent
from baton.relay.run import ChatAnswer

USER: dict[str, Any] = {"role": "user", "content": "hi"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Rome."}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function} | more]}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (USER, USER | {"name": None}),
        (USER, {"role": "user", "content": [{"type": "text", "text": "hi"}]}),
        (ANSWER, ANSWER | {"content": " Rome.\n", "tool_calls": [], "refusal": None}),
        (ANSWER, ANSWER | {"content": [{"type": "text", "text": "Rome."}]}),
        (ANSWER, ANSWER | {"reasoning": "Italy", "reasoning_content": "Italy"}),
        (call('{"a": 1, "b": [2]}'), call('{"b":[2],"a":1}', type="function", index=0)),
        (call('{"a": 1}'), call({"a": 1})),
        (call("{}") | {"content": ""}, call("{}")),
    ],
)
def test_a_message_is_the_same_in_every_way_that_sdks_write_it(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (USER, USER | {"content": " hi"}),
        (USER, USER | {"name": "Ann"}),
        (USER, USER | {"role": "system"}),
        (USER, {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}),
        (ANSWER, ANSWER | {"name": "Ann"}),
        (call('{"a": 1}'), call('{"a": 2}')),
        (call("{}"), call("{}", id="2")),
        (call("{}"), ANSWER),
        ({"role": "tool", "content": "1", "tool_call_id": "1"}, {"role": "tool", "content": "1"}),
    ],
)
def test_a_message_that_says_something_else_is_another(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert fingerprint(one) != fingerprint(other)


def test_arguments_that_are_no_json_or_nested_without_end_are_compared_as_they_are() -> None:
    for arguments in ('{"a": ', "[" * 100_000, "9" * 5000, "NaN", 7, None, {"a": []}):
        assert fingerprint(call(arguments)) == fingerprint(call(arguments))
    assert fingerprint(call("[" * 100_000)) != fingerprint(call("[" * 99_999))


def test_a_streamed_answer_is_recognised_by_what_its_chunks_add_up_to() -> None:
    answer = ChatAnswer()
    assert answer.fingerprint is None
    calls = [
        {"index": 1, "id": "2", "function": {"name": "hear", "arguments": "{}"}},
        {"index": 0, "id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a"'}},
        {"index": 0, "function": {"name": None, "arguments": ": 1}"}},
    ]
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"content": "I "},
        {"reasoning": "hm"},
    ]
    for delta in [*deltas, {"content": "look."}, *({"tool_calls": [each]} for each in calls), {}]:
        answer.add({"choices": [{"index": 0, "delta": delta}]})
    answer.add({"choices": [], "usage": {}})
    whole = call('{"a":1}') | {"content": "I look.", "reasoning": "hm"}
    whole["tool_calls"].append({"id": "2", "function": {"name": "hear", "arguments": "{}"}})
    assert answer.fingerprint == answer_fingerprint(whole | {"name": "agent"})


def test_an_answer_that_nobody_remembers_is_known_by_its_tokens() -> None:
    past = Conversation(messages=[USER], answer_from=3)
    assert resent(past, [USER, ANSWER, USER], "Rome.") == Resent(2)
    assert resent(past, [USER, ANSWER, USER], "Paris.") == Resent(1, changed=True)
    assert resent(past, [USER], None) == Resent(0)


def test_a_result_of_a_tool_that_is_sent_again_is_not_written_twice() -> None:
    """Some agents send the last turns only, which may begin with what a tool returned."""
    result = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
    past = Conversation(messages=[{"role": "user", "content": "x"}, {"role": "assistant"}, result])
    new = {"role": "user", "content": "and now?"}
    with pytest.raises(InvalidRequest):
        resent(past, [result, new], None)
    assert resent(past, [result | {"tool_call_id": "call_2"}, new], None) == Resent(0)
