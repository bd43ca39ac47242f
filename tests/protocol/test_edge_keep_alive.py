"""Streams in which nothing is said for a while: comments keep proxies waiting, and clients see none of them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.types import Message
from support.gateways import FakeGateway, run_fake
from support.raw_requests import (
    connect,
    metric,
    request,
    rest_of,
    slow_reader,
    small_buffers,
    statuses,
    wait_for,
)

from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import EngineRestarting, GenerationFailed
from baton.http.request import KEY, RequestState
from baton.http.sse import KEEP_ALIVE, KeptAlive, event_stream
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import GatewayMetrics

SILENCE_S = 0.02
TOKEN_S = 15 * SILENCE_S
PROMPT = {"model": "a", "max_tokens": 2}
CHAT = [{"role": "user", "content": "one two"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": PROMPT | {"prompt": "one two"},
    "/v1/chat/completions": PROMPT | {"messages": CHAT},
    "/v1/responses": {"model": "a", "max_output_tokens": 2, "input": "one two"},
    "/v1/messages": PROMPT | {"messages": CHAT},
}
COMMENT = KEEP_ALIVE.encode()


@pytest.fixture(scope="module")
def slow() -> Iterator[FakeGateway]:
    """An engine that takes longer for each token than a stream may be silent."""
    with run_slow() as gateway:
        yield gateway


@contextlib.contextmanager
def run_slow(keep_alive_s: float = SILENCE_S, **behaviour: Any) -> Iterator[FakeGateway]:
    engine = FakeEngine(
        "a", supports_handoffs=True, behaviour=FakeBehaviour(**({"token_seconds": TOKEN_S} | behaviour))
    )
    with run_fake(engine, edge={"keep_alive_s": keep_alive_s}) as gateway:
        yield gateway


def streamed(gateway: FakeGateway, path: str, **more: Any) -> bytes:
    with gateway.client() as client:
        answer = client.post(path, json=BODIES[path] | {"stream": True} | more)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        return answer.content


def without_ids(stream: bytes) -> bytes:
    return re.sub(rb'[0-9a-f]{32}|"created(?:_at)?": \d+', b"", stream)


@pytest.mark.parametrize("path", BODIES)
def test_comments_go_before_the_first_token_and_between_tokens(slow: FakeGateway, path: str) -> None:
    with run_slow(keep_alive_s=0, token_seconds=0.0) as silent:
        expected = streamed(silent, path)
    stream = streamed(slow, path)
    blocks = stream.split(b"\n\n")
    first = next(number for number, block in enumerate(blocks) if block != COMMENT.strip())
    later = blocks[first:].count(COMMENT.strip())
    print(f"keep-alive: {path}: comments before the first token {first}, between tokens {later}")
    assert first >= 1
    assert later >= 1
    assert COMMENT not in expected
    assert without_ids(stream.replace(COMMENT, b"")) == without_ids(expected)


def test_a_stream_that_is_not_silent_so_long_has_no_comment() -> None:
    with run_slow(keep_alive_s=60, token_seconds=0.0) as gateway:
        assert COMMENT not in streamed(gateway, "/v1/completions")


def test_the_openai_and_anthropic_sdks_pass_over_comments(slow: FakeGateway) -> None:
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        pieces = client.completions.create(model="a", prompt="one two", max_tokens=2, stream=True)
        assert "".join(chunk.choices[0].text for chunk in pieces) == "one two"
        chat: Any = client.chat.completions.create(model="a", messages=CHAT, max_tokens=2, stream=True)  # type: ignore[call-overload]  # plain dicts
        assert "".join(chunk.choices[0].delta.content for chunk in chat) == "one two"
        said = "response.output_text.delta"
        events: Any = client.responses.create(model="a", input="one two", max_output_tokens=2, stream=True)
        assert "".join(event.delta for event in events if event.type == said) == "one two"
    with anthropic.Anthropic(base_url=slow.url, api_key="none", max_retries=0) as other:
        parts: Any = other.messages.create(model="a", messages=CHAT, max_tokens=2, stream=True)  # type: ignore[call-overload]  # plain dicts
        texts = [part.delta.text for part in parts if part.type == "content_block_delta"]
        assert "".join(texts) == "one two"


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_before_the_first_comment_has_its_status(path: str) -> None:
    with run_slow(keep_alive_s=60, stream_error=EngineRestarting(), stream_error_after=0) as gateway:
        failed = httpx.post(f"{gateway.url}{path}", json=BODIES[path] | {"stream": True})
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_restarting")
    assert failed.headers["retry-after"]


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_after_a_comment_is_the_streams_last_event(path: str) -> None:
    with run_slow(stream_error=EngineRestarting(), stream_error_after=0) as gateway:
        stream = streamed(gateway, path)
        counted = 'baton_rejections_total{reason="engine_restarting"}'
        wait_for(lambda: metric(gateway, counted) == 1, "it is not counted")
    assert stream.startswith(COMMENT)
    last = stream.replace(COMMENT, b"")
    assert last.startswith(b"event: error\ndata: {")
    assert b'"code": "engine_restarting"' in last
    assert last.count(b"\n\n") == 1


def test_the_handoffs_id_goes_out_with_the_first_comment(slow: FakeGateway) -> None:
    with slow.client() as client:
        body = BODIES["/v1/completions"] | {"stream": True, "handoff": {"save": True}}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            handoff = answer.headers["x-handoff-id"]
            stream = answer.read()
    assert stream.startswith(COMMENT)
    assert handoff.encode() in stream


@pytest.mark.parametrize("comments", [0, 1])
def test_a_client_that_leaves_before_the_first_token_frees_the_engine(comments: int) -> None:
    with run_slow(token_seconds=60.0) as gateway:
        engine = gateway.engine("a")
        with connect(gateway) as client:
            client.sendall(request({"stream": True}))
            wait_for(lambda: engine.active == 1, "the engine was not asked")
            received = b""
            while received.count(COMMENT) < comments:
                received += client.recv(4096)
        wait_for(lambda: engine.active == 0, "the engine goes on")
        assert engine.aborted == 1
        wait_for(lambda: metric(gateway, 'baton_admission_running{engine="a"}') == 0, "it keeps its place")
        left = sum(
            metric(gateway, f'baton_client_disconnects_total{{phase="{phase}"}}')
            for phase in ("request", "stream")
        )
        assert left == 1


def test_comments_do_not_keep_a_client_that_does_not_read() -> None:
    """They wait like events until the client has read, and it is cut off in the same time."""
    engine = FakeEngine("a")
    with run_fake(engine, edge={"send_s": 0.5, "keep_alive_s": 0.01}) as gateway:
        small_buffers(gateway)
        with slow_reader(gateway, {"prompt": "w" * 2000, "max_tokens": 150, "stream": True}):
            counted = 'baton_client_disconnects_total{phase="slow_reader"}'
            wait_for(lambda: metric(gateway, counted) == 1, "a slow reader stays", seconds=10)
            wait_for(lambda: engine.active == 0, "the engine goes on")
        assert engine.aborted == 1


def test_a_stop_ends_a_stream_that_only_had_comments_with_an_error_event() -> None:
    with run_slow(token_seconds=60.0) as gateway, connect(gateway) as client:
        client.sendall(request({"stream": True}, extra="Connection: close\r\n"))
        received = b""
        while COMMENT not in received:
            received += client.recv(4096)
        loop_of(gateway, gateway.app.state.gateway.drain.cut)
        received += rest_of(client)
    assert statuses(received) == [200]
    assert received.count(b"event: error") == 1
    assert b'"code": "shutting_down"' in received


def loop_of(gateway: FakeGateway, work: Callable[[], None]) -> None:
    gateway.app.state.started.get_loop().call_soon_threadsafe(work)


async def nothing(seconds: float) -> AsyncIterator[str]:
    await asyncio.sleep(seconds)
    return
    yield ""


SCOPE: dict[str, Any] = {
    "type": "http",
    "path": "/v1/completions",
    KEY: RequestState(RequestContext("0" * 32)),
}


async def connected() -> Message:
    """The client stays."""
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("seconds", [0.0, SILENCE_S * 3])
async def test_an_engine_that_says_nothing_at_all_has_failed(seconds: float) -> None:
    """With a status as long as there is one to give, with an event afterwards."""
    metrics = GatewayMetrics()

    async def body() -> str:
        stream = await event_stream(nothing(seconds), metrics, {}, keep_alive_s=SILENCE_S)
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await stream(SCOPE, connected, send)
        return b"".join(message.get("body", b"") for message in sent).decode()

    if not seconds:
        with pytest.raises(GenerationFailed):
            await body()
        return
    told = await body()
    assert told.startswith(KEEP_ALIVE)
    assert told.replace(KEEP_ALIVE, "").startswith("event: error\n")
    assert '"code": "generation_failed"' in told


async def test_no_comment_follows_the_end_of_an_answer_that_waited_for_its_reader() -> None:
    """The comment was due while a full buffer held up everything; the answer's end goes first."""
    sent: list[Message] = []

    room = asyncio.Event()
    room.set()

    async def send(message: Message) -> None:
        await room.wait()
        sent.append(message)

    kept = KeptAlive(send, SILENCE_S)
    kept.start()
    room.clear()
    await asyncio.sleep(3 * SILENCE_S)
    kept.stop()
    room.set()
    await asyncio.sleep(2 * SILENCE_S)
    assert sent == []
