"""The relay on the wire, with a fake engine: its handoffs are tokens only, so every reuse is a recompute."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake
from support.handoff_requests import CHAT, CONTEXT, TEXT, first_handoff, leave, post

from baton.engines.fake.engine import FakeEngine


@pytest.fixture
def relay() -> Iterator[FakeGateway]:
    engines = (
        FakeEngine("a", supports_handoffs=True),
        FakeEngine("same", supports_handoffs=True),
        FakeEngine("other", supports_handoffs=True, weights="others"),
        FakeEngine("plain"),
    )
    with run_fake(*engines) as gateway:
        yield gateway


def test_b_s_prompt_is_a_s_whole_context_and_then_its_own(relay: FakeGateway) -> None:
    handoff = leave(relay)
    answer = post(relay, TEXT | {"model": "same", "prompt": "7 8", "handoff": {"from": handoff}}).json()
    assert relay.engine("same").bodies[-1]["prompt"] == [*CONTEXT, 7, 8]
    source = answer["handoff"]["source"]
    assert (source["id"], source["tokens"], source["loaded_tokens"]) == (handoff, 6, 0)
    assert (source["outcome"], source["reason"]) == ("recomputed", "kv_gone")


def test_a_chain_grows_and_remembers_its_parent(relay: FakeGateway) -> None:
    first = leave(relay)
    second = post(relay, TEXT | {"prompt": [7], "handoff": {"from": first, "save": {"label": "b"}}}).json()
    told = second["handoff"]
    assert (told["parent"], told["label"], told["tokens"]) == (first, "b", 6 + 1 + 3)
    post(relay, TEXT | {"prompt": "", "handoff": {"from": told["id"]}})
    assert relay.engine("a").bodies[-1]["prompt"][:7] == [*CONTEXT, 7]


def test_a_stream_tells_of_its_handoff_before_it_is_done(relay: FakeGateway) -> None:
    text = post(relay, TEXT | {"stream": True, "handoff": {"save": True}}).text
    events = [event for event in text.split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    chunk = json.loads(events[-2].removeprefix("data: "))
    assert (chunk["choices"], chunk["handoff"]["state"], chunk["handoff"]["tokens"]) == ([], "ready", 6)
    assert chunk["id"] == json.loads(events[0].removeprefix("data: "))["id"]


def test_a_chat_leaves_a_handoff_that_a_completion_starts_from(relay: FakeGateway) -> None:
    chat = {"model": "a", "messages": [{"role": "user", "content": "21 22"}], "max_tokens": 1}
    left = post(relay, chat | {"handoff": {"save": True}}, "/v1/chat/completions").json()["handoff"]["id"]
    post(relay, TEXT | {"handoff": {"from": left}})
    assert relay.engine("a").bodies[-1]["prompt"][:3] == [21, 22, 21]


def test_requests_without_a_handoff_are_answered_as_ever(relay: FakeGateway) -> None:
    assert "handoff" not in post(relay, TEXT).json()
    assert "handoff" not in post(relay, TEXT | {"stream": True}).text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"handoff": 7}, "handoff"),
    ({"handoff": {"save": "yes"}}, "handoff"),
    ({"handoff": {"sav": True}}, "handoff"),
    ({"handoff": {"from": 7}}, "handoff"),
    ({"handoff": {"save": {"ttl_s": 0}}}, "handoff"),
    ({"handoff": {"save": True}, "n": 2}, "n"),
    ({"handoff": {"save": True}, "prompt": ["a", "b"]}, "prompt"),
    ({"handoff": {"save": True}, "prompt": [[1], [2]]}, "prompt"),
]


@pytest.mark.parametrize(("more", "param"), BAD)
def test_a_handoff_that_is_none_is_a_400_that_names_the_field(
    relay: FakeGateway, more: dict[str, Any], param: str
) -> None:
    response = post(relay, TEXT | more)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert relay.engine("a").bodies == []


def test_a_field_that_does_not_exist_is_named(relay: FakeGateway) -> None:
    for handoff in ({"sav": True}, {"save": {"ttl": 5}}):
        error = post(relay, TEXT | {"handoff": handoff}).json()["error"]
        assert f"'{'sav' if 'sav' in handoff else 'ttl'}'" in error["message"]


@pytest.mark.parametrize(
    ("path", "model"), [("/v1/completions", "plain"), ("/v1/embeddings", "a"), ("/tokenize", "a")]
)
def test_where_nothing_is_handed_over_it_is_said(relay: FakeGateway, path: str, model: str) -> None:
    response = post(relay, TEXT | {"model": model, "handoff": {"save": True}}, path)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "operation_unsupported")


@pytest.mark.fault("D6")
def test_another_models_handoff_is_a_409_that_names_both(relay: FakeGateway) -> None:
    response = post(relay, TEXT | {"model": "other", "handoff": {"from": leave(relay)}})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (409, "handoff_incompatible")
    assert "'a'" in error["message"]
    assert "'other'" in error["message"]


@pytest.mark.fault("D3")
def test_a_consumer_waits_for_a_pending_handoff_and_then_gets_it(relay: FakeGateway) -> None:
    relay.engine("a").behaviour.token_seconds = 0.1
    answers: list[httpx.Response] = []
    slow = threading.Thread(
        target=lambda: answers.append(post(relay, TEXT | {"max_tokens": 8, "handoff": {"save": True}}))
    )
    slow.start()
    pending = first_handoff(relay)
    answer = post(relay, TEXT | {"model": "same", "prompt": "7", "handoff": {"from": pending}})
    slow.join()
    assert answer.status_code == 200
    assert answer.json()["handoff"]["source"]["tokens"] == 3 + 8
    assert answers[0].json()["handoff"]["id"] == pending


@pytest.mark.fault("D3")
def test_a_pending_handoff_that_does_not_come_is_a_409_to_retry() -> None:
    with run_fake(FakeEngine("a", supports_handoffs=True), handoffs={"wait_s": 0.05}) as gateway:
        gateway.engine("a").behaviour.token_seconds = 0.2
        slow = threading.Thread(target=lambda: post(gateway, TEXT | {"handoff": {"save": True}}))
        slow.start()
        response = post(gateway, TEXT | {"handoff": {"from": first_handoff(gateway)}})
        slow.join()
    assert (response.status_code, response.json()["error"]["code"]) == (409, "handoff_pending")
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.fault("D2")
def test_an_aborted_producer_leaves_no_handoff(relay: FakeGateway) -> None:
    relay.engine("a").behaviour.token_seconds = 0.05
    sent = TEXT | {"max_tokens": 400, "stream": True, "handoff": {"save": True}}
    with relay.client() as client, client.stream("POST", "/v1/completions", json=sent) as response:
        lines = response.iter_lines()
        next(lines)
        left = client.get("/v1/handoffs").json()["data"][0]["id"]
    deadline = time.monotonic() + 20
    with relay.client() as client:
        while client.get(f"/v1/handoffs/{left}").json()["state"] == "pending":
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert post(relay, TEXT | {"handoff": {"from": left}}).status_code == 404


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"echo": True}, "echo"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0].input_audio",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:x"}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": None}]}]},
            "messages[0].content[0]",
        ),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ],
)
def test_what_neither_token_ids_nor_images_tell_is_not_handed_over(
    relay: FakeGateway, more: dict[str, Any], param: str
) -> None:
    chat = {"model": "a", "messages": [{"role": "user", "content": "x"}], "handoff": {"save": True}}
    response = post(relay, chat | more, "/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_the_metrics_say_where_the_kv_came_from(relay: FakeGateway) -> None:
    post(relay, TEXT | {"handoff": {"from": leave(relay)}})
    with relay.client() as client:
        page = client.get("/metrics").text
    assert "baton_handoff_created_total 1.0" in page
    assert 'baton_handoff_consumed_total{outcome="recomputed"} 1.0' in page


def test_an_answer_s_header_names_its_handoff(relay: FakeGateway) -> None:
    for stream in (False, True):
        response = post(relay, TEXT | {"stream": stream, "handoff": {"save": True}})
        assert response.headers["x-handoff-id"] in response.text
    assert "x-handoff-id" not in post(relay, TEXT).headers


@pytest.mark.fault("G5")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_answer_names_the_store_s_entries(relay: FakeGateway, path: str, stream: bool) -> None:
    """The engine's own transfer parameters do, which the fake sends as the connector does."""
    engine = relay.engine("a")
    body = {"model": "a", "prompt": "1"} if "chat" not in path else CHAT
    response = post(relay, body | {"stream": stream, "handoff": {"save": True}}, path)
    assert response.status_code == 200, response.text
    assert response.headers["x-handoff-id"] in response.text
    key = engine.transfers[-1].save
    assert key is not None
    namespace, _, _ = key.partition("/")
    for secret in ("kv_transfer_params", key, namespace):
        assert secret not in response.text


def test_the_planner_says_what_it_did_and_why(relay: FakeGateway) -> None:
    engine = relay.engine("a")
    for _ in range(3):
        engine.throughput.prefilled(1000, 1.0)
        engine.throughput.loaded(1000, 0.001)
    told = post(relay, TEXT | {"handoff": {"from": leave(relay)}}).json()["handoff"]["source"]
    assert told["decision"] == "load"
    assert told["estimated_load_ms"] is None, "a handoff without KV has nothing to load"
    assert told["estimated_prefill_ms"] == 6.0
