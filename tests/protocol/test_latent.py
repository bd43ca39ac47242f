"""Latent steps on the wire, with a fake engine: what is asked for, put in, refused and told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake

from baton.engines.fake.engine import FakeEngine

STEP = 99
TEXT: dict[str, Any] = {"model": "a", "prompt": "11 12 13", "max_tokens": 3}
CHAT: dict[str, Any] = {"model": "a", "messages": [{"role": "user", "content": "11 12"}], "max_tokens": 2}


@pytest.fixture
def thinking() -> Iterator[FakeGateway]:
    engines = (
        FakeEngine("a", supports_handoffs=True, placeholder=STEP),
        FakeEngine("same", supports_handoffs=True, placeholder=STEP),
        FakeEngine("marks-otherwise", supports_handoffs=True, placeholder=STEP + 1),
        FakeEngine("silent", supports_handoffs=True),
    )
    with run_fake(*engines) as gateway:
        yield gateway


def post(gateway: FakeGateway, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    with gateway.client() as client:
        return client.post(path, json=body)


def leave(gateway: FakeGateway, steps: int, **more: Any) -> dict[str, Any]:
    answer = post(gateway, TEXT | {"handoff": {"save": {"latent_steps": steps}}} | more)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()["handoff"]
    return told


def given(gateway: FakeGateway, engine: str = "a") -> Any:
    return gateway.engine(engine).bodies[-1]["prompt"]


@pytest.mark.parametrize("prompt", ["11 12 13", [11, 12, 13]])
def test_steps_are_put_after_the_prompt(thinking: FakeGateway, prompt: Any) -> None:
    told = leave(thinking, 4, prompt=prompt)
    assert given(thinking) == [11, 12, 13, *[STEP] * 4]
    assert (told["latent_steps"], told["tokens"], told["state"]) == (4, 3 + 4 + 3, "ready")


def test_none_changes_nothing(thinking: FakeGateway) -> None:
    assert leave(thinking, 0)["latent_steps"] == 0
    assert given(thinking) == "11 12 13"


def test_a_chain_thinks_on(thinking: FakeGateway) -> None:
    first = leave(thinking, 2)
    second = leave(thinking, 3, prompt="7", handoff={"from": first["id"], "save": {"latent_steps": 3}})
    context = given(thinking)
    assert context[:5] == [11, 12, 13, STEP, STEP]
    assert context[-4:] == [7, STEP, STEP, STEP]
    assert second["latent_steps"] == 5
    third = post(
        thinking, TEXT | {"model": "same", "prompt": "8", "handoff": {"from": second["id"], "save": True}}
    )
    assert third.json()["handoff"]["latent_steps"] == 5
    assert given(thinking, "same").count(STEP) == 5


def test_a_handoff_without_an_answer_may_think(thinking: FakeGateway) -> None:
    answer = post(thinking, {"model": "a", "prompt": "11 12", "latent_steps": 3}, "/v1/handoffs")
    assert answer.status_code == 201
    assert (answer.json()["latent_steps"], answer.json()["tokens"]) == (3, 5)
    assert given(thinking) == [11, 12, STEP, STEP, STEP]
    with thinking.client() as client:
        assert client.get(f"/v1/handoffs/{answer.json()['id']}").json()["latent_steps"] == 3


@pytest.mark.parametrize("scope", ["context", "prompt"])
def test_a_chat_thinks_and_goes_on(thinking: FakeGateway, scope: str) -> None:
    first = post(
        thinking, CHAT | {"handoff": {"save": {"latent_steps": 2, "scope": scope}}}, "/v1/chat/completions"
    ).json()["handoff"]
    assert first["latent_steps"] == 2
    more = {"messages": [{"role": "user", "content": "21"}], "handoff": {"from": first["id"]}}
    answer = post(thinking, CHAT | more, "/v1/chat/completions")
    assert answer.status_code == 200, answer.text
    assert given(thinking).count(STEP) == 2


def test_a_chat_s_context_may_think_before_anything_is_asked(thinking: FakeGateway) -> None:
    rules = {"model": "a", "messages": [{"role": "system", "content": "5 6"}], "latent_steps": 2}
    first = post(thinking, rules, "/v1/handoffs").json()
    assert first["latent_steps"] == 2
    answer = post(thinking, CHAT | {"handoff": {"from": first["id"]}}, "/v1/chat/completions")
    assert answer.status_code == 200, answer.text
    assert given(thinking).count(STEP) == 2


def test_what_was_thought_is_no_word_of_an_answer(thinking: FakeGateway) -> None:
    """A chat's open answer goes on as a completion that thinks, and then as a chat again."""
    path, asked = "/v1/chat/completions", {"role": "user", "content": "21"}
    first = post(thinking, CHAT | {"handoff": {"save": True}}, path).json()["handoff"]
    second = leave(thinking, 2, prompt="5", handoff={"from": first["id"], "save": {"latent_steps": 2}})
    assert given(thinking) == [11, 12, 11, 12, 5, STEP, STEP]
    body = CHAT | {"messages": [asked], "handoff": {"from": second["id"], "save": True}}
    third = post(thinking, body, path)
    assert third.status_code == 200, third.text
    assert given(thinking).count(STEP) == 2
    read_back = [sent["tokens"] for sent in thinking.engine("a").bodies if "tokens" in sent]
    assert read_back == [[11, 12, 5, 11, 12, 11]]
    answer = {"role": "assistant", "content": "11 12 5 11 12 11"}
    again = post(thinking, body | {"messages": [*CHAT["messages"], answer, asked]}, path).json()["handoff"]
    assert again["source"]["resent_messages"] == 2
    assert again["tokens"] == third.json()["handoff"]["tokens"]


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ({"handoff": {"save": {"latent_steps": 65}}}, "invalid_request", "at most 64"),
        ({"handoff": {"save": {"latent_steps": -1}}}, "invalid_request", "latent_steps"),
        ({"handoff": {"save": {"latent_steps": True}}}, "invalid_request", "latent_steps"),
        ({"handoff": {"save": {"latent_steps": 2.5}}}, "invalid_request", "latent_steps"),
        (
            {"model": "silent", "handoff": {"save": {"latent_steps": 1}}},
            "operation_unsupported",
            "`latent = true`",
        ),
        ({"prompt": "", "handoff": {"save": {"latent_steps": 1}}}, "invalid_request", "at least one token"),
        (
            {"prompt_logprobs": 1, "handoff": {"save": {"latent_steps": 1}}},
            "invalid_request",
            "prompt_logprobs",
        ),
    ],
)
def test_what_is_refused(thinking: FakeGateway, more: dict[str, Any], code: str, said: str) -> None:
    answer = post(thinking, TEXT | more)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], said in error["message"]) == (code, True), error


def test_a_context_holds_so_many_steps_and_no_more(thinking: FakeGateway) -> None:
    """Where its KV is lost all of them are thought within one step of the engine, and everyone waits."""
    last = None
    for _ in range(8):
        start = {} if last is None else {"from": last["id"]}
        last = leave(thinking, 64, handoff=start | {"save": {"latent_steps": 64}})
    assert last is not None
    assert last["latent_steps"] == 512
    answer = post(thinking, TEXT | {"handoff": {"from": last["id"], "save": {"latent_steps": 1}}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "latent_steps")
    assert "513 latent steps" in error["message"]
    assert given(thinking) == "11 12 13", "it was tokenised, and no more"
    assert post(thinking, TEXT | {"handoff": {"from": last["id"], "save": True}}).status_code == 200


def test_too_many_and_none_to_be_had_without_an_answer_too(thinking: FakeGateway) -> None:
    for model, steps, code in (("a", 65, "invalid_request"), ("silent", 1, "operation_unsupported")):
        answer = post(thinking, {"model": model, "prompt": "11", "latent_steps": steps}, "/v1/handoffs")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize("model", ["silent", "marks-otherwise"])
def test_who_cannot_think_cannot_go_on_from_a_thought(thinking: FakeGateway, model: str) -> None:
    told = leave(thinking, 2)
    answer = post(thinking, TEXT | {"model": model, "handoff": {"from": told["id"]}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "handoff_incompatible")
    spoken = leave(thinking, 0)
    assert post(thinking, TEXT | {"model": model, "handoff": {"from": spoken["id"]}}).status_code == 200


def test_no_prompt_of_a_thought_has_log_probabilities(thinking: FakeGateway) -> None:
    told = leave(thinking, 2)
    answer = post(thinking, TEXT | {"prompt_logprobs": 1, "handoff": {"from": told["id"]}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
