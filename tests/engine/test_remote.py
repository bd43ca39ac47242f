"""An engine that plain vLLM with a key answers for, for real; one that another Baton answers for is in test_shared.py."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.gateways import RealGateway
from support.vllm_server import ONE_PROCESS, VllmServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
MESSAGES = [{"role": "user", "content": "Say a few words about the sea."}]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealGateway, VllmServer]]:
    """A gateway whose one engine is `vllm serve` with a key, and that server."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "key").write_text("the-key-of-vllm")
    words, environment = ONE_PROCESS
    server = VllmServer(folder, words, environment | {"VLLM_API_KEY": "the-key-of-vllm"})
    near = folder / "near"
    near.mkdir()
    with server:
        server.wait_until_ready()
        config = near / "baton.toml"
        config.write_text(
            f'[responses]\nbudget = 0\n[[engines]]\nname = "chat"\nmodel = "smollm2"\nurl = "{server.url}/v1"\n'
            f'handoff = true\n[engines.remote]\nkey_file = "{folder / "key"}"\n'
            f'[handoffs]\nstore = "file:{near / "store"}"\n'
        )
        with RealGateway(["--config", str(config)], near, forked=True) as gateway:
            gateway.wait_until_ready()
            yield gateway, server


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The sea is", "max_tokens": 8, "temperature": 0},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8, "temperature": 0},
    "/v1/responses": {"input": "The sea is", "max_output_tokens": 8, "temperature": 0},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8, "temperature": 0},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "The sea is"},
    "/detokenize": {"tokens": [504, 4301, 314]},
}
CHANGING = ("id", "created", "created_at")


def direct(server: VllmServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": "Bearer the-key-of-vllm"}, timeout=120)


def unchanging(answer: Any) -> Any:
    """An answer without what each has of its own."""
    if isinstance(answer, dict):
        return {key: unchanging(value) for key, value in answer.items() if key not in CHANGING}
    return [unchanging(each) for each in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize("path", REQUESTS)
def test_plain_vllm_s_answers_are_passed_on_as_they_are(
    plain: tuple[RealGateway, VllmServer], path: str
) -> None:
    gateway, server = plain
    with gateway.client() as client, direct(server) as theirs:
        answer = client.post(path, json={"model": "chat"} | REQUESTS[path])
        expected = theirs.post(path, json={"model": "smollm2"} | REQUESTS[path])
    assert answer.status_code == expected.status_code == 200, answer.text
    if path == "/v1/responses":  # the gateway adds what it says of stored responses
        assert answer.json()["output"][0]["content"] == expected.json()["output"][0]["content"]
        return
    named = {"model": "chat"} if "model" in expected.json() else {}
    assert unchanging(answer.json()) == unchanging(expected.json() | named)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_plain_vllm_s_streams_are_passed_on_event_by_event(
    plain: tuple[RealGateway, VllmServer], path: str
) -> None:
    gateway, server = plain
    with gateway.client() as client, direct(server) as theirs:
        answer = client.post(path, json={"model": "chat", "stream": True} | REQUESTS[path])
        expected = theirs.post(path, json={"model": "smollm2", "stream": True} | REQUESTS[path])
    assert text_of(answer.text) == text_of(expected.text) != ""
    # How many tokens an event has is its server's: vLLM joins those that wait for a busy processor.
    assert 1 < len(said_in(answer.text)) <= 8
    assert '"model": "smollm2"' not in answer.text
    assert "event: error" not in answer.text


def text_of(stream: str) -> str:
    return "".join(said_in(stream))


def said_in(stream: str) -> list[str]:
    """The texts of a stream's events, but for empty ones."""
    said = []
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            for choice in event.get("choices") or ():
                said.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
            if event.get("type") in ("response.output_text.delta", "content_block_delta"):
                delta = event["delta"]
                said.append(delta if isinstance(delta, str) else delta.get("text", ""))
    return [each for each in said if each]


@pytest.mark.fault("I9")
def test_plain_vllm_s_refusals_are_passed_on(plain: tuple[RealGateway, VllmServer]) -> None:
    gateway, server = plain
    body = {"prompt": "a " * 3000, "max_tokens": 2}
    with gateway.client() as client, direct(server) as theirs:
        answer = client.post("/v1/completions", json={"model": "chat"} | body)
        expected = theirs.post("/v1/completions", json={"model": "smollm2"} | body)
        assert answer.status_code == expected.status_code == 400
        ours = answer.json()["error"]
        assert ours.pop("request_id") == answer.headers["x-request-id"]
        assert ours == expected.json()["error"]
        embeddings = client.post("/v1/embeddings", json={"model": "chat", "input": "a"})
        assert 400 <= embeddings.status_code < 500, embeddings.text
        handoff = client.post(
            "/v1/completions", json={"model": "chat", "prompt": "a", "handoff": {"save": True}}
        )
        assert "it is no Baton gateway" in handoff.json()["error"]["message"]


@pytest.mark.fault("I10")
@pytest.mark.parametrize("stream", [False, True])
def test_plain_vllm_drops_the_request_of_a_client_that_leaves(
    plain: tuple[RealGateway, VllmServer], stream: bool
) -> None:
    gateway, server = plain
    body = {"model": "chat", "prompt": "The sea is", "max_tokens": 1500, "ignore_eos": True, "stream": stream}

    def running() -> float:
        page = httpx.get(f"{server.url}/metrics").text
        return sum(
            float(each) for each in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", page, re.MULTILINE)
        )

    began = time.monotonic()
    with (
        gateway.client(timeout=None if stream else 1.5) as client,
        contextlib.suppress(httpx.TimeoutException),
    ):
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert next(answer.iter_lines()), "only a stream has begun by now"
        assert stream, "it left before the answer"
    left = time.monotonic()
    while running():
        assert time.monotonic() < left + 10, "vLLM goes on"
        time.sleep(0.05)
    assert time.monotonic() - began < 30


def test_plain_vllm_s_tokens_are_counted(plain: tuple[RealGateway, VllmServer]) -> None:
    gateway, _ = plain

    def counted() -> dict[str, float]:
        page = httpx.get(f"{gateway.metrics_url}/metrics").text
        found = re.findall(r'baton_tenant_tokens_total\{kind="(\w+)",tenant="local"\} (\S+)', page)
        return {kind: float(value) for kind, value in found}

    for stream in (False, True):
        before = counted()
        with gateway.client() as client:
            body = {"model": "chat", "stream": stream} | REQUESTS["/v1/completions"]
            assert client.post("/v1/completions", json=body).status_code == 200
        deadline = time.monotonic() + 20
        while (after := counted()) == before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert after["generated"] - before["generated"] == 8
        assert after["prompt"] - before["prompt"] == 3
