"""A request whose engine is lost goes on, at the other engine or at its own once it is back, as if nothing had been."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.gateways import RealGateway
from support.relay_requests import DOCUMENT, ask, ids, once_saved, told
from support.resumed_streams import core_of, stream, two_engines, wait_until_both_are_ready
from support.watched_streams import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.fault("A15"), pytest.mark.timeout(300)]
LENGTH = 48


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    with two_engines(tmp_path_factory.mktemp("resumed")) as running:
        yield running


COMPLETION = {
    "model": "one",
    "prompt": DOCUMENT,
    "max_tokens": LENGTH,
    "temperature": 0,
    "logprobs": 1,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}


def said(found: list[dict[str, Any]]) -> tuple[list[int], str, list[float], dict[str, Any]]:
    """Token ids, text, log probabilities and usage of a streamed completion."""
    choices = [event["choices"][0] for event in found if event["choices"]]
    tokens = [token for choice in choices for token in choice["token_ids"] or ()]
    numbers = [
        number for choice in choices for number in (choice["logprobs"] or {}).get("token_logprobs", ())
    ]
    usage = next(event["usage"] for event in reversed(found) if event.get("usage"))
    return tokens, "".join(choice["text"] for choice in choices), numbers, usage


def without_cache(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


@pytest.mark.parametrize("both", [False, True], ids=["at the other engine", "at its own once it is back"])
def test_a_greedy_stream_goes_on_with_the_very_tokens(gateway: RealGateway, both: bool) -> None:
    tokens, text, numbers, usage = said(stream(gateway, "/v1/completions", COMPLETION).events)
    again = said(stream(gateway, "/v1/completions", COMPLETION, 7, both=both).events)
    assert again[:2] == (tokens, text)
    assert again[2] == pytest.approx(numbers, abs=2e-3)
    assert without_cache(again[3]) == without_cache(usage)


@pytest.mark.chaos
def test_an_answer_in_one_piece_goes_on_and_its_header_says_so(gateway: RealGateway) -> None:
    """The request of no stream has had no event: it is killed while it works."""
    wait_until_both_are_ready(gateway)
    whole = ask(gateway, "two", DOCUMENT, max_tokens=120)
    core = core_of(gateway, "one")
    body = {"model": "one", "prompt": DOCUMENT, "max_tokens": 120, "temperature": 0, "return_token_ids": True}
    with ThreadPoolExecutor(1) as pool, gateway.client() as client:
        answer = pool.submit(client.post, "/v1/completions", json=body)
        wait_for(lambda: running(gateway, "one"), 20)
        core.kill()
        got = answer.result(120)
    assert got.status_code == 200, got.text
    assert got.json()["choices"][0]["token_ids"] == ids(whole)[1]
    assert got.headers["x-baton-resumed"] == "1"


def running(gateway: RealGateway, engine: str) -> bool:
    """Whether an engine works on a request."""
    page = httpx.get(f"{gateway.metrics_url}/metrics").text
    return bool(re.search(rf'^vllm:num_requests_running{{[^}}]*"{engine}"[^}}]*}} 1', page, re.MULTILINE))


CHAT = {
    "model": "one",
    "messages": [{"role": "user", "content": "Count from one to thirty."}],
    "max_tokens": LENGTH,
    "temperature": 0,
    "stream_options": {"include_usage": True},
}


def chat_text(found: list[dict[str, Any]]) -> str:
    return "".join(
        event["choices"][0]["delta"].get("content") or "" for event in found if event.get("choices")
    )


@pytest.mark.chaos
@pytest.mark.parametrize(
    "more",
    [{"stop": ["12", "nothing of this kind"]}, {"repetition_penalty": 1.2, "min_tokens": LENGTH}],
    ids=["stop", "repetition"],
)
def test_a_chat_goes_on(gateway: RealGateway, more: dict[str, Any]) -> None:
    whole = stream(gateway, "/v1/chat/completions", CHAT | more).events
    again = stream(gateway, "/v1/chat/completions", CHAT | more, 4).events
    assert chat_text(again) == chat_text(whole)
    assert [event["choices"][0]["finish_reason"] for event in again if event["choices"]][-1] == [
        event["choices"][0]["finish_reason"] for event in whole if event["choices"]
    ][-1]
    assert without_cache(again[-1]["usage"]) == without_cache(whole[-1]["usage"])


@pytest.mark.chaos
def test_each_of_several_sampled_answers_goes_on(gateway: RealGateway) -> None:
    body = CHAT | {"n": 3, "temperature": 1, "seed": 7, "ignore_eos": True}
    found = stream(gateway, "/v1/chat/completions", body, 9).events
    ends = [
        choice["finish_reason"] for event in found for choice in event["choices"] if choice["finish_reason"]
    ]
    assert ends == ["length"] * 3
    assert found[-1]["usage"]["completion_tokens"] == 3 * LENGTH


@pytest.mark.fault("A16")
def test_an_answer_in_a_shape_goes_on_in_it(gateway: RealGateway) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "string", "maxLength": 60}},
        "required": ["n"],
    }
    body = CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    whole = chat_text(stream(gateway, "/v1/chat/completions", body).events)
    assert json.loads(whole).keys() == {"n"}
    again = stream(gateway, "/v1/chat/completions", body, 9).events
    assert chat_text(again) == whole
    assert again[-1]["usage"]["completion_tokens"] > 9


@pytest.mark.chaos
def test_what_a_core_alone_knows_ends_as_before_and_says_why(gateway: RealGateway) -> None:
    found = stream(gateway, "/v1/chat/completions", CHAT | {"presence_penalty": 0.5}, 4).events
    assert found[-1]["error"]["code"] == "engine_restarting"
    assert "`presence_penalty` depends on what was said" in gateway.log


def test_the_handoff_of_an_answer_that_went_on_is_exact(gateway: RealGateway) -> None:
    body = COMPLETION | {"handoff": {"save": True}}
    found = stream(gateway, "/v1/completions", body, 9).events
    handoff = next(event["handoff"] for event in reversed(found) if event.get("handoff"))
    saved = once_saved(gateway, handoff)
    assert saved["state"] == "ready"
    relayed = ask(gateway, "two", " In the end", handoff={"from": saved["id"]})
    assert ids(relayed)[1] == ids(ask(gateway, "two", ids(relayed)[0]))[1]
    assert told(relayed)["source"]["outcome"] in ("loaded", "resident")


@pytest.mark.chaos
def test_a_request_that_started_from_a_handoff_goes_on(gateway: RealGateway) -> None:
    wait_until_both_are_ready(gateway)
    saved = once_saved(gateway, told(ask(gateway, "one", DOCUMENT, handoff={"save": True})))
    body = COMPLETION | {"prompt": " In the end", "handoff": {"from": saved["id"]}}
    whole = said(stream(gateway, "/v1/completions", body).events)
    assert said(stream(gateway, "/v1/completions", body, 9).events)[:2] == whole[:2]
