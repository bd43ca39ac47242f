"""Operators stop, start and restart real engines: streams end whole, no process is left, and handoffs are loaded after."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.event_streams import Following
from support.gateways import RealGateway
from support.raw_requests import wait_for
from support.relay_requests import once_saved

pytestmark = pytest.mark.engine

SETTINGS = """
log_format = "json"
drain_timeout_s = 60

[on_demand]
budget = "8GiB"

[handoffs]
store = "file:{folder}/store"
auto = "off"

[[engines]]
name = "smollm2"
model = "smollm2"
handoff = true
kv_cache_memory = "192MiB"
args = {{ dtype = "float32", max_model_len = 1024 }}

[[engines]]
name = "flood-tiny"
model = "flood-tiny"
runner = "pooling"

[[engines]]
name = "guest"
model = "smollm2"
start = "on_demand"
idle_s = 2
handoff = true
auto = "on"
kv_cache_memory = "192MiB"
args = {{ dtype = "float32", max_model_len = 1024 }}
"""
QUESTION = {
    "role": "user",
    "content": "Name three rivers of France, and say of each where it rises and where it ends.",
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    folder = tmp_path_factory.mktemp("operators")
    config = folder / "baton.toml"
    config.write_text(SETTINGS.format(folder=folder))
    with RealGateway(["--config", str(config)], folder, forked=True) as running:
        running.wait_until_ready()
        yield running


def row(gateway: RealGateway, name: str = "smollm2") -> dict[str, Any]:
    with gateway.client() as client:
        rows = client.get("/v1/engines").json()["data"]
    return next(each for each in rows if each["name"] == name)


def act(gateway: RealGateway, what: str) -> None:
    with gateway.client() as client:
        assert client.post(f"/v1/engines/smollm2/{what}").status_code == 202


def until_state(gateway: RealGateway, state: str) -> None:
    wait_for(lambda: row(gateway)["state"] == state, f"it is not {state}:\n{gateway.log[-2000:]}", 120)


def chat(gateway: RealGateway, *messages: dict[str, str], **more: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": list(messages), "temperature": 0, "max_tokens": 24} | more
    with gateway.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cores(gateway: RealGateway) -> int:
    """How many engine cores run; one that has ended and only waits to be reaped does not."""
    found = 0
    for child in psutil.Process(gateway.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += "EngineCor" in child.name() and child.status() != psutil.STATUS_ZOMBIE
    return found


def test_the_engines_say_what_they_are_and_take(gateway: RealGateway) -> None:
    chat(gateway, QUESTION)
    language, maps = row(gateway), row(gateway, "flood-tiny")
    assert (language["kind"], language["state"], language["why"]) == ("generate", "ready", None)
    assert {"generate", "handoffs"} <= set(language["can"])
    assert language["memory_bytes"] > 2**27
    assert 0 <= language["kv_used"] < 1
    wait_for(lambda: row(gateway)["tokens_per_s"] > 0, "its tokens are not counted")
    assert (maps["kind"], maps["can"]) == ("pooling", ["pooling", "map"])


def test_a_handoffs_messages_are_those_of_the_chat(gateway: RealGateway) -> None:
    answer = chat(gateway, QUESTION, handoff={"save": True})
    handoff = once_saved(gateway, answer["handoff"])["id"]
    with gateway.client() as client:
        shown = client.get(f"/v1/handoffs/{handoff}/messages").json()
        listed = client.get("/v1/handoffs").json()["data"][0]
    said = answer["choices"][0]["message"]["content"]
    assert [each["role"] for each in shown["data"]] == ["user", "assistant"]
    assert (shown["data"][0], shown["complete"]) == (QUESTION, True)
    assert shown["data"][1]["content"].strip() == said.strip()
    assert (listed["id"], listed["tier"], listed["uses"]) == (handoff, "here", 0)


def test_a_stop_lets_streams_end_and_a_start_loads_what_was_left(gateway: RealGateway) -> None:
    """Turn two after the engine was away says what it says without that, and its context is not prefilled."""
    left = chat(gateway, QUESTION, handoff={"save": True})["handoff"]["id"]
    more = {"role": "user", "content": "And of Spain?"}
    before = chat(gateway, more, handoff={"from": left})["choices"][0]["message"]["content"]
    running = cores(gateway)
    body = {"model": "smollm2", "messages": [QUESTION], "temperature": 0, "max_tokens": 96, "stream": True}
    with Following(gateway.url) as following, gateway.client() as client:
        with client.stream("POST", "/v1/chat/completions", json=body | {"ignore_eos": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            act(gateway, "stop")
            until_state(gateway, "stopping")
            refused = client.post("/v1/chat/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert not [chunk for chunk in chunks if "error" in chunk]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        following.wait_for_state("smollm2", "stopped")
        assert cores(gateway) == running - 1
        stopped = row(gateway)
        assert (stopped["memory_bytes"], stopped["started_at"]) == (None, None)
        shown = client.get(f"/v1/handoffs/{left}/messages").json()
        assert (shown["data"], shown["complete"]) == ([QUESTION], False)
        assert row(gateway, "flood-tiny")["state"] == "ready"
        act(gateway, "start")
        until_state(gateway, "ready")
    after = chat(gateway, more, handoff={"from": left})
    assert after["choices"][0]["message"]["content"] == before
    source = after["handoff"]["source"]
    assert source["outcome"] == "loaded", source
    with gateway.client() as client:
        used = client.get(f"/v1/handoffs/{left}").json()
    assert (used["uses"], used["last_outcome"], used["last_reason"]) == (2, "loaded", None)


@pytest.mark.fault("A13")
def test_a_stop_during_a_start_leaves_no_process_and_the_next_start_works(gateway: RealGateway) -> None:
    running = cores(gateway)
    act(gateway, "restart")
    until_state(gateway, "starting")
    act(gateway, "stop")
    until_state(gateway, "stopped")
    assert cores(gateway) == running - 1
    act(gateway, "start")
    until_state(gateway, "starting")
    wait_for(lambda: cores(gateway) == running or row(gateway)["state"] == "ready", "no core began", 120)
    act(gateway, "stop")
    until_state(gateway, "stopped")
    assert cores(gateway) == running - 1
    pressing = [threading.Thread(target=act, args=(gateway, what)) for what in ("start", "restart", "start")]
    for each in pressing:
        each.start()
    for each in pressing:
        each.join()
    until_state(gateway, "ready")
    assert chat(gateway, QUESTION)["choices"]
    assert cores(gateway) == running
    assert "Traceback" not in gateway.log


def test_a_dead_engine_that_an_operator_restarts_comes_back(gateway: RealGateway, tmp_path: Path) -> None:
    children = psutil.Process(gateway.process.pid).children(recursive=True)
    core = max(
        (each for each in children if "EngineCor" in each.name()), key=lambda each: each.memory_info().rss
    )
    core.kill()
    act(gateway, "restart")
    until_state(gateway, "ready")
    assert chat(gateway, QUESTION)["choices"]


def computed(usage: dict[str, Any]) -> tuple[int, int]:
    """The tokens of a prompt, and how many of them were computed."""
    tokens: int = usage.get("prompt_tokens", usage.get("input_tokens"))
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return tokens, tokens - int(details["cached_tokens"])


@pytest.mark.fault("A28")
def test_what_a_model_knew_before_it_was_unloaded_costs_no_prefill_after_it(gateway: RealGateway) -> None:
    """A handoff, a stored response and an automatic context: the second turn computes what it adds alone."""
    more = {"role": "user", "content": "And of Spain?"}
    histories = [{"role": "user", "content": f"{name}: {QUESTION['content']} " * 5} for name in "HRA"]
    with Following(gateway.url) as following, gateway.client() as client:

        def respond(**body: Any) -> dict[str, Any]:
            told = {"model": "guest", "temperature": 0, "max_output_tokens": 24, "store": True} | body
            answer = client.post("/v1/responses", json=told)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        handed = chat(gateway, histories[0], model="guest", handoff={"save": True})
        stored = respond(input=histories[1]["content"])
        resent = chat(gateway, histories[2], model="guest")
        said = resent["choices"][0]["message"]
        following.wait_for_state("guest", "unloading")
        following.wait_for_state("guest", "unloaded")
        assert row(gateway, "guest")["memory_bytes"] is None
        before = [handed["usage"], stored["usage"], resent["usage"]]
        answers = [
            chat(gateway, more, model="guest", handoff={"from": handed["handoff"]["id"]}),
            respond(input=more["content"], previous_response_id=stored["id"]),
            chat(
                gateway, histories[2], {"role": "assistant", "content": said["content"]}, more, model="guest"
            ),
        ]
        figures = [(computed(old), computed(new["usage"])) for old, new in zip(before, answers, strict=True)]
        print(f"A28: (tokens of a prompt, of these computed), first and second turn: {figures}")
        print([(each.get("handoff"), each.get("prompt_cache_diagnostics")) for each in answers])
        for (tokens, first), (longer, second) in figures:
            assert first == tokens, "the first turn has nothing to begin with"
            assert second <= longer - tokens - 24 + 16 + 1, figures
        wait_for(lambda: row(gateway, "guest")["state"] == "unloaded", "it is not unloaded again")
