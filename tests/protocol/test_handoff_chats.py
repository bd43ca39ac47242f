"""A chat that starts from a handoff says what its template says after the past, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake

from baton.engines.fake.answers import token_ids
from baton.engines.fake.engine import FakeEngine

CHAT = "/v1/chat/completions"
FIRST: dict[str, Any] = {"model": "a", "messages": [{"role": "user", "content": "11"}], "max_tokens": 2}


@pytest.fixture
def relay() -> Iterator[FakeGateway]:
    with run_fake(FakeEngine("a", supports_handoffs=True)) as gateway:
        yield gateway


def post(gateway: FakeGateway, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
    with gateway.client() as client:
        return client.post(path, json=body)


def leave(gateway: FakeGateway, body: dict[str, Any], path: str = CHAT) -> str:
    response = post(gateway, body | {"handoff": {"save": True} | body.get("handoff", {})}, path)
    assert response.status_code == 200, response.text
    found: str = response.json()["handoff"]["id"]
    return found


def chat_from(gateway: FakeGateway, handoff: str, *messages: dict[str, str], **more: Any) -> httpx.Response:
    body = {"model": "a", "messages": list(messages), "max_tokens": 2}
    return post(gateway, body | {"handoff": {"from": handoff} | more})


def prompts(gateway: FakeGateway) -> list[list[int]]:
    """What the engine was given, of the requests whose prompt was written in full."""
    return [body["prompt"] for body in gateway.engine("a").bodies if isinstance(body.get("prompt"), list)]


USER = {"role": "user", "content": "22"}
PAST = token_ids("<system> be kind <end> <user> 11 <end> <assistant>")
ANSWER = [11, 11]
"""What the fake says after `PAST` when the engine writes the chat itself: its prompt's words again."""


def test_new_messages_go_on_after_the_answer_with_no_second_system_prompt(relay: FakeGateway) -> None:
    handoff = leave(relay, FIRST)
    assert chat_from(relay, handoff, USER).status_code == 200
    assert prompts(relay)[-1] == [*[11], *ANSWER, *token_ids("<end> <user> 22 <end> <assistant>")]


def test_a_chain_of_chats_keeps_every_turn_once(relay: FakeGateway) -> None:
    first = leave(relay, FIRST)
    second = chat_from(relay, first, USER, save=True).json()["handoff"]
    said = [11, 11]
    assert chat_from(relay, second["id"], {"role": "user", "content": "33"}).status_code == 200
    turn = token_ids("<end> <user> 22 <end> <assistant>")
    assert prompts(relay)[-1] == [
        *[11, *ANSWER, *turn, *said],
        *token_ids("<end> <user> 33 <end> <assistant>"),
    ]


def test_an_answer_that_says_the_end_of_a_turn_goes_on_as_its_client_sends_it(relay: FakeGateway) -> None:
    (end,) = token_ids("<end>")
    body = FIRST | {"messages": [{"role": "user", "content": f"11 {end}"}]}
    handoff = leave(relay, body)  # the fake says 11 and then the word that ends a turn
    chat_from(relay, handoff, USER)
    assert prompts(relay)[-1] == [11, end, 11, end, *token_ids("<end> <user> 22 <end> <assistant>")]


def test_the_token_that_ended_an_answer_gives_way_to_the_template_s_own_end(relay: FakeGateway) -> None:
    relay.engine("a").behaviour.ends_answers = True
    handoff = leave(relay, FIRST)
    chat_from(relay, handoff, USER)
    assert prompts(relay)[-1] == [11, *ANSWER[:-1], *token_ids("<end> <user> 22 <end> <assistant>")]


def test_a_chat_too_large_to_remember_goes_on_as_text_only(
    relay: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.relay.prompt.chat.MAX_BYTES", 60)
    handoff = leave(relay, FIRST | {"messages": [{"role": "user", "content": "11 " * 30}]})
    assert chat_from(relay, handoff, USER).json()["error"]["code"] == "handoff_template_unsupported"
    text = {"model": "a", "prompt": "5", "max_tokens": 1, "handoff": {"from": handoff}}
    assert post(relay, text, "/v1/completions").status_code == 200


def test_a_chat_after_plain_text_begins_as_a_chat_does(relay: FakeGateway) -> None:
    text = {"model": "a", "prompt": "7 8", "max_tokens": 1}
    handoff = leave(relay, text, "/v1/completions")
    chat_from(relay, handoff, USER)
    whole = token_ids("<system> be kind <end> <user> 22 <end> <assistant>")
    assert prompts(relay)[-1] == [7, 8, 7, *whole]


def test_a_completion_goes_on_in_a_chat_s_open_answer(relay: FakeGateway) -> None:
    first = leave(relay, FIRST)
    more = {"model": "a", "prompt": "5", "max_tokens": 1, "handoff": {"from": first}}
    second = leave(relay, more, "/v1/completions")
    chat_from(relay, second, USER)
    assert prompts(relay)[-1] == [11, *ANSWER, 5, 11, *token_ids("<end> <user> 22 <end> <assistant>")]


def test_a_template_that_rewrites_the_past_writes_the_whole_prompt_again(relay: FakeGateway) -> None:
    """Templates of reasoning models drop earlier thoughts: KV is of use up to there."""
    handoff = leave(relay, FIRST)
    relay.engine("a").behaviour.forgets_answers = True
    source = chat_from(relay, handoff, USER).json()["handoff"]["source"]
    whole = token_ids("<system> be kind <end> <user> 11 <end> <user> 22 <end> <assistant>")
    assert prompts(relay)[-1] == whole
    assert (source["resent_messages"], source["shared_tokens"]) == (0, 0), (
        "the engine wrote the first as '11'"
    )
    second = leave(relay, {"model": "a", "max_tokens": 2, "messages": [USER], "handoff": {"from": handoff}})
    source = chat_from(relay, second, USER).json()["handoff"]["source"]
    assert prompts(relay)[-1] == token_ids(
        "<system> be kind <end> <user> 11 <end> <user> 22 <end> <user> 22 <end> <assistant>"
    )
    assert source["shared_tokens"] == len(whole) - 1


def test_a_context_with_latent_steps_is_never_written_again(relay: FakeGateway) -> None:
    relay.engine("a").placeholder = 999
    try:
        handoff = leave(relay, FIRST | {"handoff": {"save": {"latent_steps": 2}}})
        relay.engine("a").behaviour.forgets_answers = True
        error = chat_from(relay, handoff, USER).json()["error"]
    finally:
        relay.engine("a").placeholder = None
    assert error["code"] == "handoff_template_unsupported"
    assert "/v1/completions" in error["message"]


def test_a_context_is_computed_and_left_without_an_answer(relay: FakeGateway) -> None:
    body = {"model": "a", "messages": FIRST["messages"], "label": "read"}
    response = post(relay, body, "/v1/handoffs")
    told = response.json()
    rest = token_ids("<system> be kind <end> <user> 11 <end>")
    assert (response.status_code, told["state"], told["tokens"]) == (201, "ready", len(rest))
    assert response.headers["location"] == f"/v1/handoffs/{told['id']}"
    assert relay.engine("a").bodies[-1]["prompt"] == rest
    chat_from(relay, told["id"], USER)
    assert prompts(relay)[-1] == [*rest, *token_ids("<user> 22 <end> <assistant>")]


def test_a_text_is_computed_and_left_and_another_goes_on_from_it(relay: FakeGateway) -> None:
    first = post(relay, {"model": "a", "prompt": "1 2 3"}, "/v1/handoffs").json()
    second = post(relay, {"model": "a", "prompt": [4], "from": first["id"]}, "/v1/handoffs").json()
    assert (second["tokens"], second["parent"]) == (4, first["id"])
    assert second["source"]["tokens"] == 3


def test_the_prompt_alone_can_be_left_behind_for_several_answers(relay: FakeGateway) -> None:
    save = {"handoff": {"save": {"scope": "prompt"}}, "n": 2}
    text = {"model": "a", "prompt": "1 2 3", "max_tokens": 2}
    assert post(relay, text | save, "/v1/completions").json()["handoff"]["tokens"] == 3
    told = post(relay, FIRST | save).json()["handoff"]
    assert told["tokens"] == len(token_ids("<system> be kind <end> <user> 11 <end>"))
    chat_from(relay, told["id"], USER)
    assert prompts(relay)[-1][told["tokens"] :] == token_ids("<user> 22 <end> <assistant>")


def test_text_after_messages_that_wait_for_no_answer_ends_the_chat(relay: FakeGateway) -> None:
    read = post(relay, {"model": "a", "messages": FIRST["messages"]}, "/v1/handoffs").json()["id"]
    more = {"model": "a", "prompt": "5", "max_tokens": 1, "handoff": {"from": read}}
    torn = leave(relay, more, "/v1/completions")
    assert chat_from(relay, torn, USER).json()["error"]["code"] == "handoff_template_unsupported"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "1", "messages": []}, None),
        ({}, None),
        ({"prompt": "1", "latent_steps": 3}, "latent_steps"),
        ({"prompt": "1", "ttl_s": 0}, "ttl_s"),
        ({"prompt": ["a"]}, "prompt.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        ({"prompt": "1", "from": "x" * 65}, "from"),
    ],
)
def test_a_handoff_that_cannot_be_made_is_a_400(
    relay: FakeGateway, body: dict[str, Any], param: str | None
) -> None:
    response = post(relay, {"model": "a"} | body, "/v1/handoffs")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert relay.engine("a").bodies == []


@pytest.mark.parametrize("more", [{"continue_final_message": True}, {"add_generation_prompt": False}])
def test_a_chat_that_is_not_to_be_answered_leaves_no_handoff(
    relay: FakeGateway, more: dict[str, Any]
) -> None:
    assert post(relay, FIRST | more | {"handoff": {"save": True}}).status_code == 400


def test_messages_that_are_none_are_a_400(relay: FakeGateway) -> None:
    handoff = leave(relay, FIRST)
    for messages in ("x", [7], [{"role": "user"}], []):
        body = {"model": "a", "messages": messages, "handoff": {"from": handoff}}
        assert post(relay, body).status_code == 400, messages
