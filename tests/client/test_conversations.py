"""Conversations send what is new, and leave behind what they were told to keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway

from baton.errors import GenerationFailed
from baton_client import Answer, Baton, ConnectionLost, ServerFailed


def ids(baton: Baton) -> set[str]:
    return {handoff.id for handoff in baton.handoffs.list()}


def fail(baton: Baton, before: Callable[[], object] = lambda: None) -> None:
    """Have a conversation that ends in an exception."""
    with baton.conversation("a") as talk:
        talk.say("11", max_tokens=1)
        before()
        raise ZeroDivisionError


def lose(baton: Baton) -> None:
    """From now on nothing answers."""
    baton._driver._http.base_url = httpx.URL("http://127.0.0.1:1")


def test_a_turn_sends_the_new_message_and_starts_from_the_turn_before(
    gateway: FakeGateway, baton: Baton
) -> None:
    sent: list[bytes] = []
    http = baton._driver._http
    http.event_hooks = {"request": [lambda request: sent.append(request.content)]}
    with baton.conversation("a", system="be brief") as talk:
        first = talk.say("11", max_tokens=1)
        second = talk.say("12", max_tokens=1)
        assert first.handoff is not None
        assert second.handoff is not None
        assert second.source is not None
        assert second.source.id == first.handoff.id
        assert second.handoff.parent == first.handoff.id
        assert talk.handoff == second.handoff.id
    assert b"brief" in sent[0]
    assert b"brief" not in sent[1]
    assert b'"11"' not in sent[1]
    prompt = gateway.engine("a").bodies[-1]["prompt"]
    assert prompt[: second.source.tokens] == gateway.engine("a").transfers[-1].prompt[: second.source.tokens]


def test_the_results_of_tools_are_sent_by_the_ids_of_their_calls(gateway: FakeGateway, baton: Baton) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    sent: list[dict[str, Any]] = []
    http = baton._driver._http
    http.event_hooks = {"request": [lambda request: sent.append(json.loads(request.content or b"{}"))]}
    with baton.conversation("a") as talk:
        asked = talk.say("11", max_tokens=1)
        assert asked.calls == ()
        found = talk.give({"c1": "rain", "c2": [{"type": "text", "text": "7"}]}, tools=tools, max_tokens=1)
        assert found.source is not None
        assert found.source.id == asked.handoff.id  # type: ignore[union-attr]  # it was saved
        with pytest.raises(ValueError, match="result of each call"):
            talk.give({})
    assert sent[1]["messages"] == [
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "7"}]},
    ]
    assert sent[1]["tools"] == tools
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    answer = Answer.of({"choices": [{"message": {"content": None, "tool_calls": calls}}]})
    assert (answer.text, answer.calls) == ("", calls)


def test_leaving_deletes_what_it_saved_and_not_what_it_was_given(baton: Baton) -> None:
    given = baton.handoffs.create("a", messages="11")
    with baton.conversation("a", start=given) as talk:
        talk.say("12", max_tokens=1)
        talk.say("13", max_tokens=1)
        assert len(ids(baton)) == 3
    assert ids(baton) == {given.id}
    talk.close()
    with pytest.raises(RuntimeError, match="has ended"):
        talk.say("14")
    with pytest.raises(RuntimeError, match="has ended"):
        talk.fork()


def test_a_label_keeps_the_last_turn_and_a_turns_own_label_or_pin_keeps_that_turn(baton: Baton) -> None:
    with baton.conversation("a", label="talk") as talk:
        talk.say("11", max_tokens=1)
        checked = talk.say("12", label="checkpoint", max_tokens=1).handoff
        pinned = talk.say("13", pin=True, max_tokens=1).handoff
        last = talk.say("14", max_tokens=1).handoff
    assert checked is not None
    assert pinned is not None
    assert last is not None
    assert ids(baton) == {checked.id, pinned.id, last.id}
    assert baton.handoffs.find("talk") == baton.handoffs.get(last)
    with baton.conversation("a", start=last) as again:
        answer = again.say("15", max_tokens=1)
    assert answer.source is not None
    assert answer.source.id == last.id


def test_all_is_kept_where_that_is_asked_for(baton: Baton) -> None:
    with baton.conversation("a", keep=True) as talk:
        talk.say("11", max_tokens=1)
        talk.say("12", max_tokens=1)
    assert len(ids(baton)) == 2


def test_an_exception_is_not_hidden_and_all_is_deleted(baton: Baton) -> None:
    with pytest.raises(ZeroDivisionError):
        fail(baton)
    assert ids(baton) == set()


def test_an_exception_stays_the_exception_where_deleting_fails_too(baton: Baton) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        fail(baton, before=lambda: lose(baton))
    assert "will expire" in caught.value.__notes__[0]


def test_a_conversation_that_cannot_delete_says_so(baton: Baton) -> None:
    talk = baton.conversation("a")
    talk.say("11", max_tokens=1)
    lose(baton)
    with pytest.raises(ConnectionLost), talk:
        pass


def test_forks_start_at_the_same_point_and_go_their_ways(baton: Baton) -> None:
    with baton.conversation("a") as talk:
        talk.say("11", max_tokens=1)
        with talk.fork() as one, talk.fork() as two:
            assert one.handoff == two.handoff == talk.handoff
            first, second = one.say("12", max_tokens=1), two.say("13", max_tokens=1)
        assert first.source == second.source
        assert ids(baton) == {talk.handoff}
    assert ids(baton) == set()


def test_forks_outlive_their_parent_whether_they_have_spoken_or_not(
    gateway: FakeGateway, baton: Baton
) -> None:
    with baton.conversation("a") as talk:
        talk.say("11", max_tokens=1)
        silent, spoken = talk.fork(), talk.fork("fork")
        spoken.say("12", max_tokens=1)
        grandchild = silent.fork()
        silent.close()
    assert ids(baton) == {grandchild.handoff, spoken.handoff}
    for fork in (grandchild, spoken):
        with fork:
            fork.say("13", max_tokens=1)
            assert {11, 13} <= set(gateway.engine("a").bodies[-1]["prompt"])
    kept = baton.handoffs.find("fork")
    assert kept is not None
    assert ids(baton) == {kept.id}


def test_a_fork_that_never_spoke_keeps_nothing_of_its_parents(baton: Baton) -> None:
    with baton.conversation("a") as talk:
        talk.say("11", max_tokens=1)
        with talk.fork("label"):
            pass
    assert ids(baton) == set()


def test_a_turn_that_failed_may_be_said_again(gateway: FakeGateway, baton: Baton) -> None:
    with baton.conversation("a", system="9") as talk:
        gateway.engine("a").behaviour.call_error = GenerationFailed()
        with pytest.raises(ServerFailed):
            talk.say("11", max_tokens=1)
        gateway.engine("a").behaviour.call_error = None
        talk.say("11", max_tokens=1)
        prompt = gateway.engine("a").bodies[-1]["messages"]
        assert [message["content"] for message in prompt] == ["9", "11"]
