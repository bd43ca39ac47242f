"""Handoffs through Anthropic's and OpenAI's other APIs: the prompt is what the request says, KV comes along."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake

from baton.engines.fake.engine import FakeEngine

APIS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [{"role": "user", "content": "11 22 33"}], "max_tokens": 2},
    "/v1/responses": {"input": "11 22 33", "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[FakeGateway]:
    with run_fake(FakeEngine("a", supports_handoffs=True, placeholder=999)) as gateway:
        yield gateway


def post(gateway: FakeGateway, path: str, body: dict[str, Any]) -> httpx.Response:
    with gateway.client() as client:
        return client.post(path, json={"model": "a"} | body)


def shown(gateway: FakeGateway, handoff: str) -> dict[str, Any]:
    with gateway.client() as client:
        found: dict[str, Any] = client.get(f"/v1/handoffs/{handoff}").json()
        return found


@pytest.mark.parametrize("path", APIS)
def test_a_handoff_is_saved_and_named(gateway: FakeGateway, path: str) -> None:
    first = post(gateway, path, APIS[path] | {"handoff": {"save": {"label": "one"}}})
    handoff = first.json()["handoff"]
    assert first.headers["x-handoff-id"] == handoff["id"]
    assert (handoff["state"], handoff["tokens"], handoff["label"]) == ("ready", 5, "one")
    second = post(gateway, path, APIS[path] | {"handoff": {"from": handoff["id"]}})
    transfer = gateway.engine("a").transfers[-1]
    assert transfer.prompt is None, "the engine writes it from the request"
    assert transfer.load is not None
    assert transfer.load.endswith(handoff["id"])
    source = second.json()["handoff"]["source"]
    assert (source["id"], source["shared_tokens"]) == (handoff["id"], 3)


@pytest.mark.parametrize("path", APIS)
def test_a_chat_does_not_continue_it_as_its_messages_are_not_known(gateway: FakeGateway, path: str) -> None:
    left = post(gateway, path, APIS[path] | {"handoff": {"save": True}}).json()["handoff"]["id"]
    chat = {"messages": [{"role": "user", "content": "44"}], "max_tokens": 2, "handoff": {"from": left}}
    error = post(gateway, "/v1/chat/completions", chat).json()["error"]
    assert error["code"] == "handoff_template_unsupported"
    text = {"prompt": "44", "max_tokens": 2, "handoff": {"from": left}}
    assert post(gateway, "/v1/completions", text).status_code == 200


@pytest.mark.parametrize("path", APIS)
def test_a_stream_has_its_own_events_alone_and_the_id_in_its_header(gateway: FakeGateway, path: str) -> None:
    plain = post(gateway, path, APIS[path] | {"stream": True})
    saving = post(gateway, path, APIS[path] | {"stream": True, "handoff": {"save": True}})
    assert saving.text.count("event: ") == plain.text.count("event: ")
    assert "handoff" not in saving.text
    left = shown(gateway, saving.headers["x-handoff-id"])
    assert (left["state"], left["tokens"]) == ("ready", 5)


@pytest.mark.parametrize("path", APIS)
def test_latent_steps_are_for_the_other_apis(gateway: FakeGateway, path: str) -> None:
    error = post(gateway, path, APIS[path] | {"handoff": {"save": {"latent_steps": 2}}}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "handoff.save.latent_steps")
    with gateway.client() as client:
        made = client.post("/v1/handoffs", json={"model": "a", "prompt": "11", "latent_steps": 2}).json()
    error = post(gateway, path, APIS[path] | {"handoff": {"from": made["id"]}}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "handoff")


def test_what_counts_tokens_has_no_handoff(gateway: FakeGateway) -> None:
    body = APIS["/v1/messages"] | {"handoff": {"save": True}}
    response = post(gateway, "/v1/messages/count_tokens", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "handoff")
