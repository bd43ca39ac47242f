"""Engines killed at every token of five hundred streams of all kinds: none loses a token or says one twice."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.gateways import RealGateway
from support.look_requests import body_of, image, text
from support.lora import write_adapter
from support.relay_requests import DOCUMENT, ask, once_saved, told
from support.resumed_streams import Told, core_of, read, stream, two_engines, wait_until_both_are_ready
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


OTHERS = """
[supervision]
restarts = 1000
backoff_s = 0
[handoffs]
store = "file:{folder}/store"
auto = "off"
[[engines]]
name = "one"
model = "smollm2"
kv_cache_memory = "192 MiB"
adapters = {{ a = "{folder}/a" }}
args = {{ max_model_len = 1024, max_num_seqs = 8, dtype = "float32", max_lora_rank = 8 }}
[[engines]]
name = "look"
model = "look-tiny"
kv_cache_memory = "128 MiB"
args = {{ max_model_len = 2048, max_num_seqs = 8, dtype = "float32" }}
"""


@pytest.mark.fault("A17")
@pytest.mark.fault("A18")
def test_adapters_and_images_are_there_again(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", 1)
    (tmp_path / "baton.toml").write_text(OTHERS.format(folder=tmp_path))
    with RealGateway(["--config", str(tmp_path / "baton.toml")], tmp_path, forked=True) as gateway:
        gateway.wait_until_ready()
        _, completion = kinds("")["completion"]
        adapted = stream(gateway, "/v1/completions", completion | {"model": "a"})
        plain = stream(gateway, "/v1/completions", completion)
        assert content(adapted.events) != content(plain.events)
        for at in (1, 9, 30):
            again = stream(gateway, "/v1/completions", completion | {"model": "a"}, at, both=True)
            assert content(again.events) == content(adapted.events), at
        for at in (1, 5, 12):
            shown = body_of(image(at), text("What is it?"), max_tokens=24, ignore_eos=True)
            asked = ("/v1/chat/completions", shown | {"model": "look"})
            again = stream(gateway, *asked, at, both=True)
            assert not failed(again.events), again.events[-1]
            whole = stream(gateway, *asked)
            assert content(again.events) == content(whole.events), at
        ended = stream(gateway, *asked, 5, both=True)  # the core has this image, and none was sent
        assert ended.events[-1]["error"]["code"] == "engine_restarting"
        assert "an image that only the lost engine had" in gateway.log
