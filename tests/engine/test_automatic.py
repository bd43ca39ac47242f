"""Requests that name no handoff start from stored KV by themselves, on real weights, through every API."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import RealGateway
from support.saved_contexts import LAST_TOKENS, SavedContexts, total_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
OFF = {"X-Baton-Handoff": "off"}
CHAT = "/v1/chat/completions"


def document(name: str, chapters: int = 30) -> str:
    """A text of some 13 tokens a chapter, another one for each name from its first word."""
    return " ".join(f"{name} {number} tells of {number * 37 % 101} birds." for number in range(chapters))


@pytest.fixture(scope="module")
def gateway(relay_gateway: RealGateway) -> RealGateway:
    return relay_gateway


@pytest.fixture(scope="module")
def contexts(relay_config: Path) -> SavedContexts:
    return SavedContexts(relay_config.parent / "store")


def post(
    gateway: RealGateway, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    with gateway.client() as client:
        response = client.post(path, json={"model": "reader", "temperature": 0} | body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def saved(contexts: SavedContexts, work: Callable[[], Any]) -> Any:
    """What the work returns, once the context of its answer is saved."""
    before = contexts.names()
    answer = work()
    tokens = total_tokens(answer)
    contexts.wait_for(before, tokens - LAST_TOKENS, tokens)
    return answer


def chat(
    gateway: RealGateway, messages: list[dict[str, str]], headers: dict[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 8, "return_token_ids": True} | more
    answer: dict[str, Any] = post(gateway, CHAT, body, headers).json()
    assert "handoff" not in answer
    assert not answer.get("kv_transfer_params")
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def test_a_resent_conversation_is_prefilled_once_and_answered_as_without(
    gateway: RealGateway, contexts: SavedContexts
) -> None:
    history = [
        {"role": "system", "content": document("Canto")},
        {"role": "user", "content": "Which birds are there?"},
    ]
    context = 0
    for turn in range(3):
        asked = list(history)
        answer = saved(contexts, lambda: chat(gateway, asked))  # noqa: B023  # called at once
        prompt, said = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        plain = chat(gateway, history, OFF)
        assert (plain["choices"][0]["token_ids"], cached(plain)) == (said, 0)
        assert cached(answer) >= context - 4, "but for the token that ends an answer"
        context = len(prompt) + len(said)
        history += [
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
            {"role": "user", "content": f"And then, {turn}? {document('Verse', 12)}"},
        ]


MESSAGES = [{"role": "user", "content": "How many birds?"}]
DIALECTS: dict[str, tuple[str, Callable[[str], dict[str, Any]], Callable[[dict[str, Any]], int]]] = {
    "responses": (
        "/v1/responses",
        lambda text: {"instructions": text, "input": "How many birds?", "max_output_tokens": 8},
        lambda usage: usage["input_tokens_details"]["cached_tokens"],
    ),
    "messages": (
        "/v1/messages",
        lambda text: {"system": text, "messages": MESSAGES, "max_tokens": 8},
        lambda usage: usage.get("cache_read_input_tokens") or 0,
    ),
    "completions": (
        "/v1/completions",
        lambda text: {"prompt": text, "max_tokens": 8},
        lambda usage: (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_api_says_truly_what_was_not_prefilled(
    gateway: RealGateway, contexts: SavedContexts, dialect: str
) -> None:
    path, body_of, cached_of = DIALECTS[dialect]
    body = body_of(document(dialect.title()))
    if dialect == "completions":  # a prompt of this length is saved when it comes again
        assert cached_of(post(gateway, path, body).json()["usage"]) == 0
    first = saved(contexts, lambda: post(gateway, path, body)).json()
    assert cached_of(first["usage"]) == 0
    again = post(gateway, path, body).json()
    prompt = again["usage"].get("prompt_tokens") or again["usage"]["input_tokens"]
    total = prompt + (cached_of(again["usage"]) if dialect == "messages" else 0)
    assert cached_of(again["usage"]) == total - 1, "all but the last token, which is always computed"
    assert cached_of(post(gateway, path, body, OFF).json()["usage"]) == 0


def test_a_stream_is_as_it_is_without(gateway: RealGateway, contexts: SavedContexts) -> None:
    body = {"messages": [{"role": "user", "content": document("Ode")}], "max_tokens": 6, "stream": True}
    body["stream_options"] = {"include_usage": True}
    first = saved(contexts, lambda: post(gateway, CHAT, body)).text
    second = post(gateway, CHAT, body).text
    for text in (first, second):
        assert "handoff" not in text
        assert "baton_kv" not in text
    chunks = [json.loads(line[6:]) for line in second.splitlines() if line.startswith("data: {")]
    assert cached(chunks[-1]) == chunks[-1]["usage"]["prompt_tokens"] - 1


def test_the_header_saves_and_names_handoffs_for_clients_that_set_no_fields(gateway: RealGateway) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    body = {"messages": messages, "max_tokens": 6}
    first = post(gateway, CHAT, body, {"X-Baton-Handoff": "save"})
    left = first.headers["x-handoff-id"]
    assert first.json()["handoff"]["id"] == left
    history = [*messages, first.json()["choices"][0]["message"], {"role": "user", "content": "Another?"}]
    second = post(gateway, CHAT, body | {"messages": history}, {"X-Baton-Handoff": left}).json()
    assert second["handoff"]["source"]["id"] == left
    assert second["handoff"]["source"]["resent_messages"] == 2


def test_several_answers_and_probabilities_of_the_prompt_are_whole(
    gateway: RealGateway, contexts: SavedContexts
) -> None:
    messages = [{"role": "user", "content": document("Song")}]
    first = saved(contexts, lambda: chat(gateway, messages))
    several = chat(gateway, messages, n=2, temperature=1)
    assert [len(choice["token_ids"]) > 0 for choice in several["choices"]] == [True, True]
    assert cached(several) == len(first["prompt_token_ids"]) - 1
    with_probabilities = chat(gateway, messages, prompt_logprobs=1)
    assert len(with_probabilities["prompt_logprobs"]) == len(first["prompt_token_ids"])
    assert all(with_probabilities["prompt_logprobs"][1:])


def test_damaged_kv_costs_only_its_reuse_and_the_usage_says_so(
    gateway: RealGateway, contexts: SavedContexts, relay_config: Path
) -> None:
    entries = relay_config.parent / "store" / "entries"
    before = set(entries.rglob("*.kv"))
    messages = [{"role": "user", "content": document("Ballad")}]
    first = saved(contexts, lambda: chat(gateway, messages))
    (path,) = set(entries.rglob("*.kv")) - before
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = saved(contexts, lambda: chat(gateway, messages))
    assert cached(again) == 0
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]


def test_a_response_that_is_continued_by_its_id_is_not_prefilled_again(
    gateway: RealGateway, contexts: SavedContexts
) -> None:
    path = "/v1/responses"
    body = {"input": document("Epode"), "max_output_tokens": 8}
    first = saved(contexts, lambda: post(gateway, path, body)).json()
    new = {"input": "And then?", "max_output_tokens": 8}
    second = post(gateway, path, new | {"previous_response_id": first["id"]}).json()
    usage = second["usage"]
    assert usage["input_tokens"] > first["usage"]["total_tokens"], "the whole conversation"
    assert usage["input_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 8
    whole = [
        {"role": "user", "content": body["input"]},
        *first["output"],
        {"role": "user", "content": "And then?"},
    ]
    resent = post(gateway, path, new | {"input": whole}, OFF).json()
    assert resent["usage"]["input_tokens"] == usage["input_tokens"]
    assert resent["output"][0]["content"][0]["text"] == second["output"][0]["content"][0]["text"]
