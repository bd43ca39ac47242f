"""What Claude Code, Codex and pickers of models ask of a gateway beside the answers themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake

from baton.engines.backend import CAPABILITIES, ImageInput
from baton.engines.fake.engine import FakeEngine

ANTHROPIC = {"anthropic-version": "2023-06-01"}
CLAUDE_CODE = ANTHROPIC | {
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.197 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one two"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one two"}]},
    "/v1/responses": {"input": "one two"},
    "/v1/messages": {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 4},
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[FakeGateway]:
    engines = (
        FakeEngine("chat", aliases=("talk", "claude-*", "gpt-*-mini"), default=True),
        FakeEngine("other", aliases=("claude-fable", "gpt-*"), images=ImageInput(limit=1)),
        FakeEngine("embed", pooling=True),
    )
    with run_fake(*engines) as running:
        yield running


@pytest.fixture
def client(gateway: FakeGateway) -> Iterator[httpx.Client]:
    with gateway.client() as found:
        yield found


def models_in(response: httpx.Response) -> set[str]:
    """Every `model` of an answer, or of the events of a stream."""
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    answers = [json.loads(line) for line in lines or [response.text]]
    places = [
        place for each in answers for place in (each, each.get("response"), each.get("message")) if place
    ]
    return {place["model"] for place in places if "model" in place}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_calls_the_model_what_the_request_called_it(
    gateway: FakeGateway, client: httpx.Client, path: str, stream: bool
) -> None:
    asked = gateway.engine("chat").bodies
    for name in ("chat", "talk", "claude-opus-4-8", "claude-x[1m]", "gpt-9-mini"):
        answer = client.post(path, json=ASKED[path] | {"model": name, "stream": stream})
        assert models_in(answer) == {name}
        assert asked[-1]["model"] == "chat", "an engine knows the names that it had at its start"
    assert models_in(client.post(path, json=ASKED[path] | {"stream": stream})) == {"chat"}


def test_a_name_goes_before_a_pattern_and_the_first_pattern_before_the_next(
    gateway: FakeGateway, client: httpx.Client
) -> None:
    engines = {name: gateway.engine(name) for name in ("chat", "other")}
    for name, picked in (("claude-fable", "other"), ("gpt-5", "other"), ("gpt-5-mini", "chat")):
        before = len(engines[picked].bodies)
        assert client.post("/v1/completions", json={"model": name, "prompt": "x"}).status_code == 200
        assert len(engines[picked].bodies) == before + 1, name


@pytest.mark.parametrize(
    "name", ["Claude-x", "claude", "x-claude-y", "claude-\n", "claude- x", "claude-" + "x" * 122]
)
def test_a_name_that_no_pattern_fits_is_not_found(client: httpx.Client, name: str) -> None:
    """Answers repeat a name, event by event: those that a pattern fits are short, and have no spaces."""
    refused = client.post("/v1/completions", json={"model": name, "prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "Served are: chat, other, embed, talk, claude-fable." in refused.json()["error"]["message"]


def test_a_request_without_a_model_gets_the_default_one_of_its_kind(client: httpx.Client) -> None:
    assert models_in(client.post("/v1/completions", json={"prompt": "x"})) == {"chat"}
    assert models_in(client.post("/v1/embeddings", json={"input": "x"})) == {"embed"}


def test_cards_say_what_a_model_can_do_and_leave_patterns_out(client: httpx.Client) -> None:
    cards = {card["id"]: card["capabilities"] for card in client.get("/v1/models").json()["data"]}
    assert cards == {
        "chat": ["generate"],
        "talk": ["generate"],
        "other": ["generate", "vision"],
        "claude-fable": ["generate", "vision"],
        "embed": ["embeddings"],
    }
    assert {word for words in cards.values() for word in words} <= set(CAPABILITIES)
    assert client.get("/v1/models/claude-opus-4-8").json()["id"] == "claude-opus-4-8"


def test_models_have_anthropics_shape_for_its_clients_and_only_those_that_generate(
    client: httpx.Client,
) -> None:
    page = client.get("/v1/models", headers=ANTHROPIC, params={"limit": 2}).json()
    assert [card["id"] for card in page["data"]] == ["chat", "talk"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("chat", "talk", True)
    assert {card["type"] for card in page["data"]} == {"model"}
    rest = client.get("/v1/models", headers=ANTHROPIC, params={"after_id": "talk"}).json()
    assert [card["id"] for card in rest["data"]] == ["other", "claude-fable"]
    assert rest["has_more"] is False
    before = client.get("/v1/models", headers=ANTHROPIC, params={"before_id": "other", "limit": 1}).json()
    assert ([card["id"] for card in before["data"]], before["has_more"]) == (["talk"], True)
    one = client.get("/v1/models/claude-opus-4-8", headers=ANTHROPIC).json()
    assert one == page["data"][0] | {"id": "claude-opus-4-8", "display_name": "claude-opus-4-8"}
    assert (one["max_input_tokens"], one["created_at"][-1]) == (8192, "Z")
    for path in ("/v1/models?after_id=none", "/v1/models?limit=0", "/v1/models/none"):
        assert client.get(path, headers=ANTHROPIC).status_code in (400, 404)


def test_what_anthropics_programs_add_to_a_request_does_no_harm(client: httpx.Client) -> None:
    body = ASKED["/v1/messages"] | {
        "model": "claude-opus-4-8",
        "system": [
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        ],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    for stream in (False, True):
        answer = client.post(
            "/v1/messages", params={"beta": "true"}, headers=CLAUDE_CODE, json=body | {"stream": stream}
        )
        assert models_in(answer) == {"claude-opus-4-8"}
        assert '"id": "msg_' in answer.text
    counted = {key: body[key] for key in ("model", "messages", "system")}
    answer = client.post("/v1/messages/count_tokens?beta=true", headers=CLAUDE_CODE, json=counted)
    assert answer.json()["input_tokens"] > 0
    assert client.head("/", headers=CLAUDE_CODE).status_code == 200  # the page
    assert client.get("/v1/models?client_version=0.171.0").status_code == 200
