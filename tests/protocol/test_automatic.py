"""What is automatic for requests that name no handoff, and the header that says otherwise, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake

from baton.engines.fake.engine import FakeEngine

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "11 " * 200}], "max_tokens": 2}


@pytest.fixture(scope="module")
def gateway() -> Iterator[FakeGateway]:
    engines = FakeEngine("a", supports_handoffs=True), FakeEngine("plain"), FakeEngine("e", pooling=True)
    with run_fake(*engines, handoffs={"auto": "on"}) as gateway:
        yield gateway


@pytest.fixture
def relay(gateway: FakeGateway) -> FakeGateway:
    for name in ("a", "plain", "e"):
        gateway.engine(name).transfers.clear()
    return gateway


def post(
    gateway: FakeGateway, body: dict[str, Any], header: str | None = None, path: str = CHAT
) -> httpx.Response:
    headers = {"X-Baton-Handoff": header} if header is not None else {}
    with gateway.client() as client:
        return client.post(path, json={"model": "a"} | body, headers=headers)


@pytest.mark.parametrize("header", [None, "auto", "AUTO"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_context_is_saved_without_a_word_of_it(
    relay: FakeGateway, header: str | None, stream: bool
) -> None:
    number = str(hash((header, stream)) % 10**6)  # equal prompts at the same time are saved once
    messages = [{"role": "user", "content": f"{number} " * 200}]
    response = post(relay, LONG | {"messages": messages, "stream": stream}, header)
    (transfer,) = relay.engine("a").transfers
    assert (transfer.save is not None, transfer.load, transfer.prompt) == (True, None, None)
    assert transfer.report.output_ids == [int(number)] * 2
    assert "handoff" not in response.text
    assert "kv_transfer_params" not in response.text
    assert "x-handoff-id" not in response.headers


@pytest.mark.parametrize("header", ["off", "Off"])
def test_a_request_that_wants_none_of_it_gets_none(relay: FakeGateway, header: str) -> None:
    assert post(relay, LONG, header).status_code == 200
    assert relay.engine("a").transfers == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"model": "plain"} | LONG),
        ("/v1/embeddings", {"model": "e", "input": "11"}),
        ("/tokenize", {"prompt": "11"}),
        ("/v1/completions", {"prompt": "11", "use_beam_search": True, "n": 2}),
    ],
    ids=["no handoffs", "embeddings", "tokenize", "beam search"],
)
def test_nothing_is_automatic_elsewhere(relay: FakeGateway, path: str, body: dict[str, Any]) -> None:
    assert post(relay, body, None, path).status_code == 200
    assert [relay.engine(name).transfers for name in ("a", "plain", "e")] == [[], [], []]


def test_a_request_with_a_handoff_has_only_that(relay: FakeGateway) -> None:
    assert post(relay, LONG | {"handoff": {"save": True}}).status_code == 200
    (transfer,) = relay.engine("a").transfers
    assert transfer.least == 0


def test_the_header_saves_a_handoff_and_names_one(relay: FakeGateway) -> None:
    first = post(relay, LONG, "save")
    left = first.headers["x-handoff-id"]
    assert first.json()["handoff"]["id"] == left
    new = {"messages": [{"role": "user", "content": "22"}], "max_tokens": 2}
    assert post(relay, new, left).json()["handoff"]["source"]["id"] == left
    unknown = post(relay, new, "x" * 32)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "handoff_not_found")


@pytest.mark.parametrize("header", ["save", "x" * 32])
def test_header_and_field_do_not_go_together(relay: FakeGateway, header: str) -> None:
    response = post(relay, LONG | {"handoff": {"save": True}}, header)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "handoff")
    assert "X-Baton-Handoff" in error["message"]
    for other in ("auto", "off"):
        assert post(relay, LONG | {"handoff": {"save": True}}, other).status_code == 200


def test_a_header_too_long_for_an_id_is_refused_with_its_reason(relay: FakeGateway) -> None:
    response = post(relay, LONG, "x" * 200)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "handoff")
