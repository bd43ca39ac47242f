"""Engines killed at every token of five hundred streams of all kinds: none loses a token or says one twice."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.gateways import RealGateway
from support.relay_requests import DOCUMENT, ask, once_saved, told
from support.resumed_streams import Told, core_of, read, two_engines, wait_until_both_are_ready
from support.watched_streams import cores

pytestmark = [pytest.mark.chaos, pytest.mark.fault("A15"), pytest.mark.timeout(1800)]
LENGTH = 40
SHAPE = {"type": "object", "properties": {"n": {"type": "string", "maxLength": 60}}, "required": ["n"]}
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    with two_engines(tmp_path_factory.mktemp("resumed")) as running:
        yield running


def kinds(handoff: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The path and body of each kind of stream."""
    usual = {"model": "one", "temperature": 0}
    chat = usual | {"max_tokens": LENGTH, "stream_options": {"include_usage": True}}
    words = [{"role": "user", "content": "Count from one to thirty."}]
    completion = chat | {"prompt": DOCUMENT, "return_token_ids": True}
    return {
        "completion": ("/v1/completions", completion),
        "probabilities": ("/v1/completions", completion | {"logprobs": 2}),
        "stopped": ("/v1/completions", completion | {"stop": ["no such text", "nor this one"]}),
        "from a handoff": (
            "/v1/completions",
            completion | {"prompt": " In the end", "handoff": {"from": handoff}},
        ),
        "to a handoff": ("/v1/completions", completion | {"handoff": {"save": True}}),
        "chat": ("/v1/chat/completions", chat | {"messages": words}),
        "tools": (
            "/v1/chat/completions",
            chat | {"messages": words, "tools": [{"type": "function", "function": TOOL}]},
        ),
        "schema": (
            "/v1/chat/completions",
            chat
            | {"messages": words}
            | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SHAPE}}},
        ),
        "responses": ("/v1/responses", usual | {"input": words, "max_output_tokens": LENGTH}),
        "messages": ("/v1/messages", usual | {"messages": words, "max_tokens": LENGTH}),
    }


def content(found: list[dict[str, Any]]) -> tuple[list[str], list[int]]:
    """The text of each of a stream's answers, and its token ids where it has them."""
    texts, tokens = ["", ""], list[int]()
    for event in found:
        for choice in event.get("choices", ()):
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            tokens += choice.get("token_ids") or ()
        if event.get("type") == "response.output_text.delta":
            texts[0] += event["delta"]
        elif event.get("type") == "content_block_delta":
            texts[0] += event["delta"].get("text", "")
    return texts, tokens


def spent(found: list[dict[str, Any]]) -> list[int]:
    """Tokens of the prompt and of the answer, by the usage that was told last."""
    usages = [event.get("usage") or event.get("response", {}).get("usage") for event in found]
    usage = next(usage for usage in reversed(usages) if usage)
    return [usage.get("completion_tokens", usage.get("output_tokens"))]


def failed(found: list[dict[str, Any]]) -> bool:
    return any(event.get("error") or event.get("type") in ("error", "response.failed") for event in found)


@pytest.mark.parametrize("both", [False, True], ids=["with a second engine", "without one"])
def test_no_token_is_lost_or_said_twice(gateway: RealGateway, both: bool) -> None:
    kept = once_saved(gateway, told(ask(gateway, "two", DOCUMENT, handoff={"save": True})))["id"]
    all_kinds = kinds(kept)
    wait_until_both_are_ready(gateway)
    whole = {name: read(gateway, *asked) for name, asked in all_kinds.items()}
    gaps, streams = list[float](), 0
    for position in range(1, LENGTH, 2 if both else 1):
        leader = list(all_kinds)[position % len(all_kinds)]
        wait_until_both_are_ready(gateway)
        doomed = cores(gateway.process.pid) if both else [core_of(gateway, "one")]

        def kill(doomed: Any = tuple(doomed)) -> None:
            for core in doomed:
                core.kill()

        with ThreadPoolExecutor(len(all_kinds)) as pool:
            asked = {
                name: pool.submit(
                    read, gateway, *each, at=position, then=kill if name == leader else lambda: None
                )
                for name, each in all_kinds.items()
            }
            found: dict[str, Told] = {name: answer.result() for name, answer in asked.items()}
        for name, answer in found.items():
            streams += 1
            assert not failed(answer.events), (position, name, answer.events[-1])
            assert content(answer.events) == content(whole[name].events), (position, name)
            assert spent(answer.events) == spent(whole[name].events), (position, name)
            if name == "schema":
                assert "n" in json.loads(content(answer.events)[0][0]), position
            gaps.append(answer.gap_s)
    gaps.sort()
    print(
        f"\nA15, {'both' if both else 'one'} killed: {streams} streams; longest gap "
        f"p50 {statistics.median(gaps):.2f} s, p99 {gaps[int(0.99 * len(gaps))]:.2f} s"
    )
