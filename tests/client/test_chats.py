"""Chats through the client, at a gateway with a fake engine: its answers repeat the prompt's words."""

from __future__ import annotations

import pytest
from support.gateways import FakeGateway

from baton_client import Baton, Conflict, InvalidRequest, NotFound


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
    with pytest.raises(ValueError, match="does not stream"):
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
