"""What vLLM's handlers answer wrongly, or in two ways, the gateway answers in one way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from support.scripted_engines import ScriptedGateway, run_scripted  # after the skip

from baton.engines.backend import Operation
from baton.relay.report import DIAGNOSTICS, explained_events
from baton.telemetry.ids import RequestContext

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TOOL = {"name": "look", "parameters": {"type": "object"}}
ASKED = [{"role": "user", "content": "Look."}]


@pytest.fixture(scope="module")
def gateway() -> Iterator[ScriptedGateway]:
    serving = {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "exclude_tools_when_tool_choice_none": True,
    }
    with run_scripted(**serving) as running:
        yield running


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The name and the data of each event of a stream."""
    blocks = [block.partition("\ndata: ") for block in text.split("\n\n") if block.startswith("event: ")]
    return [(head.removeprefix("event: "), json.loads(data)) for head, _, data in blocks]


@pytest.mark.fault("E17")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut"])
def test_a_response_that_was_cut_is_incomplete_and_so_is_its_last_item(
    gateway: ScriptedGateway, whole: bool
) -> None:
    status = "completed" if whole else "incomplete"
    body = {"input": "Count.", "max_output_tokens": 16 if whole else 3}
    for stream in (False, True):
        gateway.says("1, 2, 3, 4")
        response = gateway.post(RESPONSES, body | {"stream": stream})
        assert response.status_code == 200, response.text
        found: dict[str, Any] = {} if stream else response.json()
        if stream:
            told = events(response.text)
            assert [name for name, _ in told[:2]] == ["response.created", "response.in_progress"]
            assert [name for name, data in told if name != data["type"]] == []
            assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
            (done,) = [data["item"] for name, data in told if name == "response.output_item.done"]
            assert done["status"] == status
            name, last = told[-1]
            assert name == f"response.{status}"
            found = last["response"]
        assert found["status"] == status
        assert [item["status"] for item in found["output"]] == [status]
        assert (found["incomplete_details"] is None) is whole


@pytest.mark.parametrize(
    ("arguments", "given"),
    [('{"at": 1}', {"at": 1}), ("[1, 2]", [1, 2]), ('"north"', "north"), ("7", 7), ("null", None)],
)
def test_a_call_whose_arguments_are_no_object_is_given_as_it_is_within_one(
    gateway: ScriptedGateway, arguments: str, given: Any
) -> None:
    body = {
        "messages": ASKED,
        "max_tokens": 60,
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    }
    call = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
    gateway.says(call)
    whole = gateway.post(MESSAGES, body)
    assert whole.status_code == 200, whole.text
    (block,) = [block for block in whole.json()["content"] if block["type"] == "tool_use"]
    gateway.says(call)
    streamed = events(gateway.post(MESSAGES, body | {"stream": True}).text)
    pieces = [
        data["delta"].get("partial_json", "") for name, data in streamed if name == "content_block_delta"
    ]
    assert json.loads("".join(pieces)) == given
    told = given if isinstance(given, dict) else {"INVALID_JSON": arguments}
    assert (block["name"], block["input"]) == ("look", told)
    back = [{"role": "assistant", "content": [block]}]
    back += [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "No."}]}
    ]
    again = gateway.post(MESSAGES, body | {"messages": ASKED + back})
    assert again.status_code == 200, again.text


WORDS = (" dog", " cat")


@pytest.mark.fault("E18")
@pytest.mark.parametrize(
    ("allowed", "constraints", "left"),
    [
        (WORDS, {}, True),
        (WORDS, {"bad_words": ["dog"]}, True),
        (WORDS, {"bad_words": ["dog", "cat"]}, False),
        ((" dog",), {"bad_words": ["cat dog"]}, True),
        ((" dog",), {"bad_words": [" dog dog"]}, False),
        (WORDS, {"bad_words": [" dog dog", " dog cat"]}, False),
        (WORDS, {"bad_words": [" dog dog", " cat cat"]}, True),
        (("<|im_end|>",), {}, True),
        (("<|im_end|>",), {"min_tokens": 3}, False),
        (("<|im_end|>", " dog"), {"min_tokens": 3}, True),
        (("<|im_end|>", " dog"), {"min_tokens": 3, "bad_words": ["dog"]}, False),
        (("<|im_end|>", " dog"), {"bad_words": ["dog"]}, True),
        (("<|im_end|>", " dog"), {"min_tokens": 1, "bad_words": [" dog dog"]}, True),
        (("<|im_end|>", " dog"), {"min_tokens": 2, "bad_words": [" dog dog"]}, False),
    ],
)
@pytest.mark.parametrize("route", [TEXT, CHAT])
def test_constraints_that_leave_no_token_are_refused_before_the_engine_sees_them(
    gateway: ScriptedGateway, allowed: tuple[str, ...], constraints: dict[str, Any], left: bool, route: str
) -> None:
    tokens = [token for text in allowed for token in gateway.tokens(text)]
    assert len(tokens) == len(allowed)
    before = len(gateway.engine.client.prompts)
    body = {"allowed_token_ids": tokens, "max_tokens": 4} | constraints
    for stream in (False, True):
        asked = {"prompt": "My"} if route == TEXT else {"messages": ASKED}
        response = gateway.post(route, body | asked | {"stream": stream})
        assert response.status_code == (200 if left else 400), response.text
        if not left:
            assert response.json()["error"]["param"] == "allowed_token_ids"
    assert len(gateway.engine.client.prompts) - before == (2 if left else 0)


def test_a_chat_whose_tools_are_left_out_goes_on_without_them(gateway: ScriptedGateway) -> None:
    """As `exclude_tools_when_tool_choice_none` has it: the handoff's own messages are written so too."""
    tools = [{"type": "function", "function": TOOL}]
    gateway.says("Yes.")
    asked = {"messages": ASKED, "tools": tools, "tool_choice": "none"}
    first = gateway.post(CHAT, asked | {"handoff": {"save": True}}).json()
    again = [*ASKED, {"role": "assistant", "content": "Yes."}, *ASKED]
    prompts = []
    for more in ({"messages": ASKED, "handoff": {"from": first["handoff"]["id"]}}, {"messages": again}):
        response = gateway.post(CHAT, asked | more | {"max_tokens": 1})
        assert response.status_code == 200, response.text
        prompts.append(gateway.engine.text(gateway.engine.client.prompts[-1]))
    assert prompts[0] == prompts[1]
    assert "look" not in prompts[0]


HINTS = {
    "cache_control": st.just({"type": "ephemeral"}),
    "annotations": st.just([]),
    "logprobs": st.just(None),
}


def parts(kinds: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Content parts with what clients add to them."""
    return st.builds(
        lambda kind, text, hints: {"type": kind, "text": text} | hints,
        st.sampled_from(kinds),
        st.sampled_from(["one", "two", " three"]),
        st.fixed_dictionaries({}, optional=HINTS | {"citations": st.none(), "id": st.just("p1")}),
    )


BODIES = {
    CHAT: (["text", "input_text"], "messages"),
    MESSAGES: (["text"], "messages"),
    RESPONSES: (["input_text"], "input"),
}


@pytest.mark.parametrize("route", BODIES)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_what_is_valid_without_a_handoff_is_valid_with_one(
    gateway: ScriptedGateway, route: str, data: st.DataObject
) -> None:
    kinds, field = BODIES[route]
    content = data.draw(st.lists(parts(kinds), min_size=1, max_size=3))
    limit = {"max_output_tokens" if route == RESPONSES else "max_tokens": 4}
    asked = {field: [{"role": "user", "content": content}]} | limit
    gateway.says("Yes.")
    plain = gateway.post(route, asked)
    gateway.says("Yes.")
    saved = gateway.post(route, asked | {"handoff": {"save": True}})
    assert saved.status_code == plain.status_code, saved.text
    if plain.status_code != 200:
        return
    left = saved.headers["x-handoff-id"]
    answer = {"role": "assistant", "content": "Yes."}
    again = {field: [*asked[field], answer, {"role": "user", "content": content[::-1]}]} | limit
    said = gateway.post(route, again)
    wanted = gateway.engine.client.prompts[-1]
    handed = gateway.post(route, again | {"handoff": {"from": left}})
    assert (handed.status_code, said.status_code) == (200, 200), handed.text
    assert gateway.engine.text(gateway.engine.client.prompts[-1]) == gateway.engine.text(wanted)


def test_hints_that_a_client_moves_from_turn_to_turn_make_no_other_conversation(
    gateway: ScriptedGateway,
) -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    first = [{"role": "user", "content": [{"type": "text", "text": "Look."} | hint]} | hint]
    gateway.says("Yes.")
    left = gateway.post(CHAT, {"messages": first, "handoff": {"save": True}}).json()["handoff"]["id"]
    plain = [{"role": "user", "content": [{"type": "text", "text": "Look.", "annotations": []}]}]
    last = {"role": "user", "content": [{"type": "text", "text": "And?"} | hint]}
    again = [*plain, {"role": "assistant", "content": "Yes."}, last]
    shown = gateway.post(CHAT, {"messages": again, "max_tokens": 1, "handoff": {"from": left}}).json()
    assert shown["handoff"]["source"]["resent_messages"] == 2


STREAMS: dict[Operation, tuple[str, dict[str, Any]]] = {
    Operation.COMPLETIONS: (TEXT, {"prompt": "A", "stream_options": {"include_usage": True}}),
    Operation.CHAT: (CHAT, {"messages": ASKED, "stream_options": {"include_usage": True}}),
    Operation.RESPONSES: (RESPONSES, {"input": "A"}),
    Operation.MESSAGES: (MESSAGES, {"messages": ASKED, "max_tokens": 32}),
}


@pytest.mark.parametrize("operation", STREAMS)
async def test_why_a_prompt_missed_stands_once_in_each_of_vllm_s_streams(
    gateway: ScriptedGateway, operation: Operation
) -> None:
    """Where its usage is, in the shape in which vLLM writes it; the rest goes on as it was."""
    path, body = STREAMS[operation]
    said = 'Say "choices":[] and event: message_delta'
    gateway.says(said)
    text = gateway.post(path, body | {"stream": True}).text
    sent = [f"{event}\n\n" for event in text.split("\n\n") if event]

    async def stream() -> AsyncIterator[str]:
        for event in sent:
            yield event

    found = {"type": "cache_hit"}
    got = [event async for event in explained_events(stream(), operation, lambda: found)]
    changed = [(one, other) for one, other in zip(sent, got, strict=True) if one != other]
    assert len(changed) == 1, (operation, sent)
    before, after = (json.loads(event.partition("data: ")[2]) for event in changed[0])
    held = after.get("response", after)
    assert held.pop(DIAGNOSTICS) == found
    assert after == before
    assert held["usage"]


@pytest.mark.fault("A13")
@pytest.mark.parametrize(
    ("operation", "body"),
    [
        (Operation.COMPLETIONS, {"prompt": "Look."}),
        (Operation.CHAT, {"messages": ASKED}),
        (Operation.MESSAGES, {"messages": ASKED, "max_tokens": 8}),
        (Operation.RESPONSES, {"input": "Look."}),
    ],
)
def test_a_call_that_is_cancelled_ends_cancelled(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, operation: Operation, body: dict[str, Any]
) -> None:
    """vLLM's handlers answer an error instead: whoever stopped an engine that warmed up waited for ever."""

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        reached.set()
        await asyncio.Event().wait()
        yield None

    async def call() -> None:
        asked = gateway.engine.call(operation, {"model": "a"} | body, RequestContext("cancelled"))
        task = asyncio.create_task(asked)
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    reached = asyncio.Event()
    monkeypatch.setattr(gateway.engine.client, "generate", generate)
    asyncio.run(call())
