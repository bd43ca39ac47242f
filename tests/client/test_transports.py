"""The header goes out under OpenAI's and Anthropic's own SDKs, and ids come back."""

from __future__ import annotations

import httpx
import pytest
from support.gateways import FakeGateway

from baton_client import AsyncHandoffTransport, HandoffTransport
from baton_client.handoff_header import HandoffHeader

httpx2 = pytest.importorskip("httpx2", reason="the SDKs of today bring it")
from anthropic import Anthropic, AsyncAnthropic  # noqa: E402  # after the check above
from openai import AsyncOpenAI, OpenAI  # noqa: E402  # as above

from baton_client import httpx2 as on_httpx2  # noqa: E402  # as above

QUESTION = {"model": "a", "max_tokens": 1, "messages": [{"role": "user", "content": "11"}]}


def test_the_openai_sdk_saves_and_then_starts_from_what_it_saved(gateway: FakeGateway) -> None:
    transport = on_httpx2.HandoffTransport("save")
    with (
        httpx2.Client(transport=transport) as http,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=http) as client,
    ):
        saved = client.chat.completions.create(**QUESTION)
        assert transport.last == saved.handoff["id"]
        with client.chat.completions.create(**QUESTION, stream=True) as stream:
            assert list(stream)[-1].handoff["id"] == transport.last
        client.completions.create(model="a", prompt="1 2", max_tokens=1)
        client.responses.create(model="a", input="11", max_output_tokens=1, store=False)
        assert len(set(transport.ids)) == 4
        transport.handoff = saved.handoff["id"]
        again = client.chat.completions.create(**QUESTION | {"messages": [{"role": "user", "content": "12"}]})
        assert again.handoff["source"]["id"] == saved.handoff["id"]
        client.models.list()
        assert len(transport.ids) == 4


def test_the_anthropic_sdk_saves(gateway: FakeGateway) -> None:
    transport = on_httpx2.HandoffTransport("save")
    with (
        httpx2.Client(transport=transport) as http,
        Anthropic(base_url=gateway.url, api_key="none", http_client=http) as client,
    ):
        client.messages.create(**QUESTION)
        first = transport.last
        with client.messages.create(**QUESTION, stream=True) as stream:
            assert list(stream)
        client.messages.count_tokens(model="a", messages=QUESTION["messages"])
    assert len(transport.ids) == 2
    with gateway.client() as plain:
        assert plain.get(f"/v1/handoffs/{first}").json()["state"] == "ready"


async def test_the_async_sdks_save(gateway: FakeGateway) -> None:
    transport = on_httpx2.AsyncHandoffTransport("save")
    async with httpx2.AsyncClient(transport=transport) as http:
        openai = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=http)
        answer = await openai.chat.completions.create(**QUESTION)
        anthropic = AsyncAnthropic(base_url=gateway.url, api_key="none", http_client=http)
        await anthropic.messages.create(**QUESTION)
    assert transport.ids[0] == answer.handoff["id"]
    assert len(transport.ids) == 2


def test_the_openai_sdk_takes_the_transport_of_httpx_too(gateway: FakeGateway) -> None:
    transport = HandoffTransport("save")
    with (
        httpx.Client(transport=transport) as http,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=http) as client,
    ):
        assert transport.last is None
        answer = client.chat.completions.create(**QUESTION)
    assert transport.last == answer.handoff["id"]


async def test_httpx_itself_async(gateway: FakeGateway) -> None:
    transport = AsyncHandoffTransport("save")
    async with httpx.AsyncClient(base_url=gateway.url, transport=transport) as client:
        await client.post("/v1/chat/completions", json=QUESTION)
    assert transport.last is not None


def test_a_header_or_a_field_of_the_requests_own_wins(gateway: FakeGateway) -> None:
    transport = on_httpx2.HandoffTransport("save")
    with (
        httpx2.Client(transport=transport) as http,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=http) as client,
    ):
        client.chat.completions.create(**QUESTION, extra_headers={"x-baton-handoff": "off"})
        assert transport.last is None
        labelled = client.chat.completions.create(
            **QUESTION,
            extra_headers={"X-Baton-Handoff": "auto"},
            extra_body={"handoff": {"save": {"label": "mine"}}},
        )
    assert labelled.handoff["label"] == "mine"


@pytest.mark.parametrize(
    ("method", "path", "marked"),
    [
        ("POST", "/v1/chat/completions", True),
        ("POST", "/prefix/v1/messages/", True),
        ("POST", "/v1/messages/count_tokens", False),
        ("POST", "/v1/responses/r1/cancel", False),
        ("POST", "/v1/embeddings", False),
        ("POST", "/v1/handoffs", False),
        ("GET", "/v1/responses", False),
    ],
)
def test_only_requests_that_generate_are_marked(method: str, path: str, marked: bool) -> None:
    headers = httpx.Headers()
    HandoffHeader("save").mark(method, path, headers)
    assert ("X-Baton-Handoff" in headers) is marked


def test_the_ids_it_keeps_are_bounded() -> None:
    header = HandoffHeader("save", remember=2)
    for number in range(3):
        header.note({"X-Handoff-Id": f"h{number}"})
    assert list(header.ids) == ["h1", "h2"]


@pytest.mark.parametrize("value", ["", "two words", "x" * 65, "a\r\nB: c", "ä"])
def test_what_cannot_be_a_header_is_refused_at_once(value: str) -> None:
    with pytest.raises(ValueError, match="'handoff' is"):
        HandoffTransport(value)


def test_what_is_wrapped_is_entered_and_closed_with_it() -> None:
    class Wrapped(httpx.MockTransport):
        seen: list[str] = []  # noqa: RUF012  # of this class alone

        def __enter__(self) -> Wrapped:
            self.seen.append("entered")
            return self

        def close(self) -> None:
            self.seen.append("closed")

    wrapped = Wrapped(lambda request: httpx.Response(200))
    with httpx.Client(transport=HandoffTransport(wrapped=wrapped)) as client:
        assert client.get("http://x/").status_code == 200
    HandoffTransport(wrapped=wrapped).close()
    assert Wrapped.seen == ["entered", "closed", "closed"]
