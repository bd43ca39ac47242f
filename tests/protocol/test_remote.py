"""Requests for an engine that is another Baton: what its clients get is what that one's own clients would."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.gateways import FakeGateway, run_fake
from support.remote_gateways import both, complete, remote, run_near
from support.wire import metric, wait_for

from baton.engines.fake.engine import FakeBehaviour, FakeEngine

CHAT = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 4}
REQUESTS = {
    "/v1/completions": {"prompt": "one two three", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "one two three", "max_output_tokens": 4},
    "/v1/messages": CHAT,
}
ALL = REQUESTS | {
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/embeddings": {"input": "one two"},
    "/pooling": {"input": "one two"},
    "/classify": {"input": "one two"},
    "/score": {"queries": "one", "documents": ["two"]},
    "/v1/rerank": {"query": "one", "documents": ["two"]},
    "/tokenize": {"prompt": "one two"},
    "/detokenize": {"tokens": [1, 2]},
}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[FakeGateway, FakeGateway]]:
    with run_fake(FakeEngine("far"), FakeEngine("far-pooling", pooling=True)) as there:
        near = remote(there.url, aliases=("other-name",))
        pooling = remote(there.url, "near-pooling", model="far-pooling")
        with run_near(near, pooling) as here:
            yield here, there


POOLING = {"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/rerank"}


def without_ids(answer: object) -> object:
    if isinstance(answer, dict):
        dropped = ("id", "created", "created_at")
        return {key: without_ids(value) for key, value in answer.items() if key not in dropped}
    return [without_ids(each) for each in answer] if isinstance(answer, list) else answer


def events(response: httpx.Response) -> list[object]:
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return [without_ids(json.loads(line[6:])) if line[6:] != "[DONE]" else "[DONE]" for line in lines]


@pytest.mark.parametrize("path", ALL)
def test_an_answer_is_the_other_gateways_under_our_models_name(
    pair: tuple[FakeGateway, FakeGateway], path: str
) -> None:
    here, there = pair
    kind = "-pooling" if path in POOLING else ""
    with here.client() as client, there.client() as direct:
        answer = client.post(path, json={"model": f"near{kind}"} | ALL[path])
        plain = direct.post(path, json={"model": f"far{kind}"} | ALL[path])
    assert answer.status_code == plain.status_code == 200, answer.text
    expected = plain.json() | ({"model": f"near{kind}"} if "model" in plain.json() else {})
    assert without_ids(answer.json()) == without_ids(expected)
    assert there.engine(f"far{kind}").bodies[-2]["model"] == f"far{kind}"


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_is_the_other_gateways_event_for_event(
    pair: tuple[FakeGateway, FakeGateway], path: str, usage: bool
) -> None:
    here, there = pair
    more: dict[str, object] = {"stream": True}
    if usage and "completions" in path:
        more["stream_options"] = {"include_usage": True}
    with here.client() as client, there.client() as direct:
        answer = events(client.post(path, json={"model": "near"} | REQUESTS[path] | more))
        plain = events(direct.post(path, json={"model": "far"} | REQUESTS[path] | more))
    assert json.dumps(answer) == json.dumps(plain).replace('"model": "far"', '"model": "near"')


def test_the_models_are_listed_with_what_the_other_gateway_knows_of_them(
    pair: tuple[FakeGateway, FakeGateway],
) -> None:
    here, _ = pair
    with here.client() as client:
        cards = client.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["near", "other-name", "near-pooling"]
        assert {card["max_model_len"] for card in cards} == {8192}
        assert client.get("/v1/models/other-name").status_code == 200
        assert complete(client, model="other-name").json()["model"] == "near"
        assert complete(client, model="far").json()["error"]["code"] == "model_not_found"
