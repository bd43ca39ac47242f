"""Chats through the client, at a gateway with a fake engine: its answers repeat the prompt's words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.gateways import FakeGateway, run_fake

from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import GenerationFailed
from baton_client import BadAnswer, Baton, Conflict, ConnectionLost, InvalidRequest, NotFound, ServerFailed
from baton_client.wire import ChatStream


def test_a_text_is_one_message_and_the_answer_has_its_parts(baton: Baton) -> None:
    answer = baton.chat("a", "11 12", max_tokens=2)
    assert answer.text.split() == ["11", "12"]
    assert (answer.handoff, answer.source) == (None, None)
    assert answer.usage["completion_tokens"] == 2
    assert answer.body["object"] == "chat.completion"


def test_a_chat_starts_from_what_another_saved(gateway: FakeGateway, baton: Baton) -> None:
    first = baton.chat("a", "11 12", save=True, max_tokens=1)
    assert first.handoff is not None
    assert first.handoff.state == "ready"
    second = baton.chat("same", "7", start=first.handoff, max_tokens=1)
    assert second.handoff is None
    assert second.source is not None
    assert (second.source.id, second.source.outcome) == (first.handoff.id, "recomputed")
    assert second.source.tokens == first.handoff.tokens
    assert len(gateway.engine("same").bodies[-1]["prompt"]) > first.handoff.tokens


def test_how_it_is_saved_is_said_without_saying_save(baton: Baton) -> None:
    saved = baton.chat("a", "11", label="days", pin=True, ttl_s=60, max_tokens=1).handoff
    assert saved is not None
    assert (saved.label, saved.pin) == ("days", True)
    assert saved.expires_at - saved.created_at == pytest.approx(60, abs=1)
    thought = baton.chat("a", "11", latent_steps=3, max_tokens=1).handoff
    assert thought is not None
    assert thought.latent_steps == 3


def test_further_fields_reach_the_engine(gateway: FakeGateway, baton: Baton) -> None:
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    baton.chat("a", messages, max_tokens=1, temperature=0.25)
    body = gateway.engine("a").bodies[-1]
    assert (body["temperature"], len(body["messages"])) == (0.25, 2)


def test_a_stream_is_refused_before_it_is_sent(gateway: FakeGateway, baton: Baton) -> None:
    with pytest.raises(ValueError, match="Give `told`"):
        baton.chat("a", "11", stream=True)
    assert gateway.engine("a").bodies == []


def test_an_error_is_of_the_class_of_its_status_and_says_what_the_gateway_says(baton: Baton) -> None:
    with pytest.raises(NotFound) as missing:
        baton.chat("a", "11", start="unknown")
    assert (missing.value.status, missing.value.code) == (404, "handoff_not_found")
    assert "expired or deleted" in str(missing.value)
    assert missing.value.request_id
    with pytest.raises(InvalidRequest) as refused:
        baton.chat("a", "11", max_tokens="many")
    assert refused.value.param == "max_tokens"
    saved = baton.chat("a", "11", save=True, max_tokens=1).handoff
    assert saved is not None
    with pytest.raises(Conflict, match="'other'"):
        baton.chat("other", "11", start=saved)


def test_the_address_may_be_that_of_the_openai_api(gateway: FakeGateway) -> None:
    with Baton(f"{gateway.url}/v1/", retries=0) as client:
        assert client.chat("a", "11", max_tokens=1).text == "11"


def test_a_text_is_told_piece_by_piece_and_the_answer_is_that_of_a_whole_one(baton: Baton) -> None:
    pieces: list[str] = []
    asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0}
    told = baton.chat("a", "one two", save=True, told=pieces.append, **asked)
    whole = baton.chat("a", "one two", save=True, **asked)
    assert pieces == ["one", " two", " one"]
    assert told.text == whole.text == "one two one"
    assert told.usage == whole.usage
    assert told.handoff is not None
    assert whole.handoff is not None
    assert told.handoff.tokens == whole.handoff.tokens
    assert told.body["choices"][0]["message"] == whole.body["choices"][0]["message"]
    further = baton.chat("a", "more", start=told.handoff, told=pieces.append, **asked)
    assert further.source is not None
    assert further.source.id == told.handoff.id


def test_an_error_of_a_stream_is_raised_and_never_asked_again() -> None:
    behaviour = FakeBehaviour(stream_error=GenerationFailed(), stream_error_after=2)
    engine, pieces = FakeEngine("a", behaviour=behaviour), list[str]()
    with (
        run_fake(engine) as gateway,
        Baton(gateway.url, retries=2) as client,
        pytest.raises(ServerFailed) as failed,
    ):
        client.chat("a", "one two", told=pieces.append)
    assert failed.value.code == "generation_failed"
    assert len(engine.bodies) == 1
    assert pieces == ["one", " two"]


EVENTS = (
    b'data: {"id": "x", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
    b": keep-alive\n\n"
    b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "h\xc3\xa9"}}, {"index": 1, "delta": {"content": "no"}}]}\n\n'
    b'data: {"id": "x", "choices": [{"index": 0, "delta": {"reasoning": "a", "tool_calls": [{"index": 0, "id": "1", '
    b'"type": "function", "function": {"name": "f", "arguments": "{\\"a"}}]}}]}\r\n\r\n'
    b'data: {"id": "x", "choices": [{"index": 0, "delta": {"reasoning": "b", "tool_calls": [{"index": 0, '
    b'"function": {"arguments": "\\": 1}"}}]}, "finish_reason": "tool_calls"}]}\n\n'
    b'data: {"id": "x", "choices": [], "usage": {"prompt_tokens": 3}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_events_are_put_together_wherever_they_are_cut(size: int) -> None:
    pieces: list[str] = []
    stream = ChatStream(pieces.append)
    for at in range(0, len(EVENTS), size):
        stream.write(EVENTS[at : at + size])
    body = json.loads(stream.end(200, {}).content)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": "hé", "reasoning": "ab", "tool_calls": [call]}
    assert body["choices"] == [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
    assert body["usage"] == {"prompt_tokens": 3}
    assert pieces == ["hé"]


def test_a_stream_without_its_last_event_is_lost_and_one_that_is_no_chat_is_a_bad_answer() -> None:
    cut = ChatStream(lambda _text: None)
    cut.write(EVENTS[:-20])
    with pytest.raises(ConnectionLost, match="broke off") as lost:
        cut.end(200, {})
    assert not lost.value.resend
    for nonsense in (
        b"data: {\n",
        b"data: 3\n",
        b'data: {"choices": [3]}\n',
        b"data: " + b"[" * 100_000 + b"\n",
    ):
        with pytest.raises(BadAnswer, match="not in the API's form"):
            ChatStream(lambda _text: None).write(nonsense)
