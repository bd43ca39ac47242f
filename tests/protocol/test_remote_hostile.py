"""Neither a hostile client nor a hostile server gets more through an engine elsewhere than it should."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from support.gateways import FakeGateway
from support.raw_requests import metric, wait_for
from support.remote_gateways import (
    DONE,
    OtherServer,
    asking,
    chunk,
    complete,
    completion,
    error,
    other_server,
    remote,
    run_near,
    settings_of,
    streamed,
)

from baton.engines.backend import EngineState
from baton.engines.elsewhere import server as probe
from baton.engines.elsewhere.keys import RemoteKeys


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeGateway, OtherServer]]:
    with other_server() as server, run_near(remote(server.url)) as gateway:
        yield gateway, server


@pytest.fixture
def asked(running: tuple[FakeGateway, OtherServer]) -> Iterator[tuple[httpx.Client, OtherServer]]:
    with asking(*running) as client_and_server:
        yield client_and_server


# Clients


@pytest.mark.fault("I11")
@pytest.mark.parametrize("state", ["ä=1", "a=\xff", "a=\tb", "a=" + "x" * 600, "a=1\x7f"])
def test_trace_state_of_any_bytes_fails_no_request(
    asked: tuple[httpx.Client, OtherServer], state: str
) -> None:
    """It is sent on, or not; a request with it is answered."""
    client, server = asked
    headers = {
        "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        "tracestate": state.encode("latin-1"),
    }
    answer = client.post("/v1/completions", json={"model": "near", "prompt": "a"}, headers=headers)  # type: ignore[arg-type]  # httpx takes bytes too
    assert answer.status_code == 200, answer.text
    assert "tracestate" not in server.asked[-1].headers or server.asked[-1].headers["tracestate"].isascii()


@pytest.mark.fault("I11")
@pytest.mark.parametrize(
    ("stream", "streams"),
    [("false", False), ("true", True), (1, True), (0, False), ("off", False), (None, False)],
)
def test_stream_means_here_what_it_means_there(
    asked: tuple[httpx.Client, OtherServer], stream: object, streams: bool
) -> None:
    """vLLM reads `"false"` as false; taken for true here, its answer was no stream and the client got 502."""
    client, server = asked
    server.answer = lambda got: (
        streamed(chunk("a"), DONE) if got.body["stream"] else JSONResponse(completion("far", "a"))
    )
    answer = complete(client, stream=stream)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream" if streams else "application/json")
    assert server.asked[-1].body["stream"] in (streams, None)


@pytest.mark.parametrize("stream", ["perhaps", 2, [], {}, 0.5])
def test_a_stream_that_is_neither_is_the_clients_fault(
    asked: tuple[httpx.Client, OtherServer], stream: object
) -> None:
    client, server = asked
    server.answer = lambda _: error(400, message="stream", type="t", param="stream", code="c")
    answer = complete(client, stream=stream)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


URLS = ("http://169.254.169.254/latest", "file:///etc/passwd")


@pytest.mark.fault("I11")
@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "kind", ["image_url", "video_url", "audio_url", "input_image", "input_file", "image", "video"]
)
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/pooling"]
)
def test_no_address_of_media_is_sent_on(running: Any, path: str, kind: str, url: str) -> None:
    _, plain = running
    shapes: dict[str, dict[str, Any]] = {
        "input_image": {"type": kind, "image_url": url},
        "input_file": {"type": kind, "file_url": url},
        "image": {"type": kind, "source": {"type": "url", "url": url}},
        "video": {"type": kind, "source": {"type": "url", "url": url}},
    }
    part = shapes.get(kind, {"type": kind, kind: {"url": url}})
    turn = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    body = {"input": turn} if path == "/v1/responses" else {"messages": turn, "max_tokens": 2}
    with running[0].client() as client:
        plain.asked.clear()
        answer = client.post(path, json={"model": "near"} | body)
        assert answer.status_code in (400, 403, 422), (answer.status_code, answer.text, plain.asked)
        assert not plain.asked


PART = {"type": "image_url", "image_url": {"url": URLS[0]}}
ELSEWHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "a tool server": (
        "/v1/responses",
        {"input": "a", "tools": [{"type": "mcp", "server_label": "x", "server_url": URLS[0]}]},
    ),
    "a connector": (
        "/v1/responses",
        {"input": "a", "tools": [{"type": "mcp", "connector_id": "connector_dropbox"}]},
    ),
    "a tool server of a chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "mcp", "server_url": URLS[0]}]},
    ),
    "a tool server of Anthropic's": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 2,
            "mcp_servers": [{"type": "url", "url": URLS[0], "name": "x"}],
        },
    ),
    "a query's image": ("/score", {"queries": {"content": [PART]}, "documents": ["a"]}),
    "a document's image": ("/v1/rerank", {"query": "a", "documents": [{"content": [PART]}]}),
    "an older document's image": ("/score", {"text_1": "a", "text_2": {"content": [PART]}}),
    "an embedding's image": ("/v1/embeddings", {"messages": [{"role": "user", "content": [PART]}]}),
    "a classified image": ("/classify", {"messages": [{"role": "user", "content": [PART]}]}),
}


@pytest.mark.fault("I11")
@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_address_that_the_server_would_fetch_is_sent_on(
    asked: tuple[httpx.Client, OtherServer], name: str
) -> None:
    client, server = asked
    path, body = ELSEWHERE[name]
    answer = client.post(path, json={"model": "near"} | body)
    assert answer.status_code == 400, (answer.text, server.asked)
    assert not server.asked


# Servers


@pytest.mark.fault("I8")
@pytest.mark.parametrize("last", [b": more\n\n", chunk("never"), b"x" * 1000])
def test_what_follows_the_last_event_holds_no_client(
    asked: tuple[httpx.Client, OtherServer], last: bytes
) -> None:
    """A server that goes on and on after `[DONE]` kept the request, its place and its client."""
    client, server = asked

    async def events() -> AsyncIterator[bytes]:
        yield chunk("a") + DONE
        for _ in range(600):
            yield last
            await asyncio.sleep(0.1)

    server.answer = lambda _: StreamingResponse(events(), media_type="text/event-stream")
    began = time.monotonic()
    answer = complete(client, stream=True)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert "never" not in answer.text
    assert time.monotonic() - began < 20


HEADERS = ["é", "✓", "a b/../c", "x" * 5000, "../../x", "//evil.example"]


@pytest.mark.fault("I8")
@pytest.mark.parametrize("value", HEADERS)
def test_headers_of_the_server_that_are_no_ids_are_dropped(
    asked: tuple[httpx.Client, OtherServer], value: str
) -> None:
    client, server = asked
    server.answer = lambda _: _with_raw(value.encode())
    answer = complete(client)
    assert answer.status_code == 200, answer.text
    assert "x-handoff-id" not in answer.headers


def _with_raw(value: bytes) -> Response:
    response = JSONResponse(completion("far", "a"))
    response.raw_headers.append((b"x-handoff-id", value))
    return response


@pytest.mark.fault("I8")
@pytest.mark.parametrize("usage", [10**30, 10**400, -1, 1.5, True, "3"], ids=lambda usage: str(usage)[:6])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_of_any_size_fails_no_request(
    running: tuple[FakeGateway, OtherServer], usage: object, stream: bool
) -> None:
    gateway, server = running
    told = completion("far", "a") | {"usage": {"prompt_tokens": usage, "completion_tokens": usage}}
    server.answer = lambda _: (
        streamed(f"data: {json.dumps(told)}\n\n".encode(), DONE) if stream else JSONResponse(told)
    )
    with gateway.client() as client:
        assert complete(client, stream=stream).status_code == 200
    metric(gateway, 'baton_tenant_tokens_total{kind="generated",tenant="local"}')
    assert httpx.get(f"{gateway.metrics_url}/metrics").status_code == 200
    counted = metric(gateway, 'baton_tenant_tokens_total{kind="prompt",tenant="local"}')
    assert counted < 10**9


@pytest.mark.fault("I2")
def test_an_answer_that_drips_is_a_504() -> None:
    """Each of its bytes came in time; the client waited for hours."""
    with (
        other_server() as server,
        run_near(remote(server.url, remote={"answer_s": 0.5})) as gateway,
        gateway.client() as client,
    ):
        for status in (200, 400):
            server.answer = lambda _, status=status: StreamingResponse(
                _dripping(), status, media_type="application/json"
            )
            answer = complete(client)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "remote_timeout")


@pytest.mark.fault("I8")
def test_texts_of_a_servers_refusals_are_scrubbed_as_those_of_vllm_here_are(
    asked: tuple[httpx.Client, OtherServer],
) -> None:
    client, server = asked
    told = {"message": "ValueError: no file /srv/models/a.json", "type": "t", "param": None, "code": 400}
    server.answer = lambda _: error(400, host="10.0.0.7", **told)
    ours = complete(client).json()["error"]
    assert ours.keys() == {"message", "type", "param", "code", "request_id"}
    assert ours["message"] == "no file <path>"
    server.answer = lambda _: error(
        400, more=1, request_id="a", **told | {"message": "Use /v1/chat/completions."}
    )
    ours = complete(client).json()["error"]
    assert (ours["message"], ours["more"]) == ("Use /v1/chat/completions.", 1)


@pytest.mark.fault("I8")
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_inside_vllm_is_not_told_in_a_stream_either(
    asked: tuple[httpx.Client, OtherServer], stream: bool
) -> None:
    """In one piece its text was hidden; in a stream the client read paths and class names of the other machine."""
    client, server = asked
    secret = {
        "message": "CUDA error in /srv/secret/model.py",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    server.answer = lambda _: (
        streamed(chunk("a"), f"data: {json.dumps({'error': secret})}\n\n".encode())
        if stream
        else error(500, **secret)
    )
    answer = complete(client, stream=stream)
    assert "secret" not in answer.text
    assert "error" in answer.text


@pytest.mark.fault("I2")
def test_a_list_of_models_that_never_ends_is_a_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watch waited for each of its bytes anew: keys were read no more, and the engine stayed ready."""
    monkeypatch.setattr(probe, "ANSWER_S", 0.3)
    with other_server() as server:
        near = remote(server.url, remote={"probe_s": 0.1, "failures": 1, "connect_s": 0.3})
        with run_near(near) as gateway:
            server.models = lambda: StreamingResponse(_dripping(), media_type="application/json")
            wait_for(lambda: gateway.fleet.states["near"] is EngineState.UNREACHABLE, "it was found out", 20)


async def _dripping() -> AsyncIterator[bytes]:
    import asyncio

    for _ in range(600):
        yield b" "
        await asyncio.sleep(0.05)


@pytest.mark.fault("I4")
def test_a_gateway_that_fails_once_is_still_a_gateway() -> None:
    """One 502 of a proxy before it, at a look, and it was none for ever."""
    with other_server() as server:
        answers = [
            PlainTextResponse("bad gateway", 502),
            JSONResponse({"object": "peer", "tenant": "local", "store": None, "handoff": False}),
        ]
        server.peer = lambda: answers.pop(0) if len(answers) > 1 else answers[0]
        near = remote(server.url, remote={"probe_s": 0.1})
        with run_near(near):
            wait_for(lambda: near.forwarding.is_gateway, "it was asked again")
            answers.insert(0, PlainTextResponse("bad gateway", 502))
            wait_for(lambda: len(answers) == 1, "it was asked again")
            assert near.forwarding.is_gateway


@pytest.mark.fault("I6")
def test_tenants_whose_files_hold_one_key_are_not_apart(tmp_path: Path) -> None:
    """The server takes them for one tenant, so neither's contexts may be kept there by themselves."""
    for name, key in {"acme": "one", "beta": "one", "gamma": "two", "delta": "common"}.items():
        (tmp_path / name).write_text(key)
    (tmp_path / ".common").write_text("common")
    keys = RemoteKeys(
        settings_of("http://a", remote={"keys_dir": tmp_path, "key_file": tmp_path / ".common"})
    )
    assert {name: keys.of(name).own for name in ("acme", "beta", "gamma", "delta", "other")} == {
        "acme": False,
        "beta": False,
        "gamma": True,
        "delta": False,
        "other": False,
    }


def test_a_long_code_of_the_servers_does_not_fill_the_log(asked: tuple[httpx.Client, OtherServer]) -> None:
    client, server = asked
    server.answer = lambda _: error(400, message="No.", type="t", param=None, code="x" * 50_000)
    answer = complete(client)
    assert answer.status_code == 400
    assert len(answer.text) < 1000


@pytest.mark.fault("I13")
def test_a_stream_of_comments_alone_ends() -> None:
    """Each of them came in time; its client, and its place at the engine, were held for good."""

    async def comments() -> AsyncIterator[bytes]:
        for _ in range(6000):
            yield b": still here\n\n"
            await asyncio.sleep(0.01)

    with (
        other_server() as server,
        run_near(remote(server.url, remote={"answer_s": 0.5})) as gateway,
        gateway.client() as client,
    ):
        server.answer = lambda _: StreamingResponse(comments(), media_type="text/event-stream")
        answer = complete(client, stream=True)
        assert "remote_timeout" in answer.text
        wait_for(lambda: metric(gateway, 'baton_admission_running{engine="near"}') == 0, "it keeps its place")


@pytest.mark.fault("I13")
@pytest.mark.parametrize("named", ["\ud800", None, 7, "resp_equal", ["x"], "x" * 10_000])
def test_a_response_has_a_name_of_ours_whatever_the_server_calls_it(tmp_path: Path, named: object) -> None:
    """`"\\ud800"` was 500, none was stored as "None", and an equal one cost another tenant its own."""
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
    text = message | {"content": [{"type": "output_text", "text": "hello", "annotations": []}]}
    told = {"id": named, "object": "response", "status": "completed", "model": "far", "output": [text]}
    done = {"type": "response.completed", "response": told}
    near = {"responses": {"budget": "1MiB", "folder": tmp_path / "responses"}}
    with (
        other_server() as server,
        run_near(remote(server.url), **near) as gateway,
        gateway.client() as client,
    ):
        ids = []
        for streams in (False, False, True):
            server.answer = lambda _, streams=streams: (
                streamed(f"event: response.completed\ndata: {json.dumps(done)}\n\n".encode())
                if streams
                else Response(json.dumps(told), media_type="application/json")
            )
            answer = client.post("/v1/responses", json={"model": "near", "input": "a", "stream": streams})
            assert answer.status_code == 200, answer.text
            shown = json.loads(answer.text.partition("data: ")[2])["response"] if streams else answer.json()
            ids.append(shown["id"])
            assert client.get(f"/v1/responses/{shown['id']}").json()["id"] == shown["id"]
        assert len({*ids, named if isinstance(named, str) else ""}) == 4
        assert all(re.fullmatch(r"resp_[0-9a-f]{32}", each) for each in ids)


@pytest.mark.fault("I13")
def test_the_answers_of_all_requests_share_one_memory_budget(tmp_path: Path) -> None:
    """A dozen answers of 55 MB took 1.1 GiB, though each was within `remote.answer_bytes`."""
    mib = 1024 * 1024
    body = json.dumps(completion("far", "a") | {"padding": "x" * 6 * mib}).encode()
    release, asked = threading.Event(), []

    async def dripping() -> AsyncIterator[bytes]:
        yield body[:-1]
        while not release.is_set():  # noqa: ASYNC110  # it is set by the test's thread
            await asyncio.sleep(0.01)
        yield body[-1:]

    limits = {"body_bytes": "1MiB", "bodies_bytes": "56MiB"}
    with (
        other_server() as server,
        run_near(remote(server.url), limits=limits) as gateway,
        ThreadPoolExecutor(12) as pool,
    ):
        headers = {"content-length": str(len(body))}
        server.answer = lambda _: StreamingResponse(
            dripping(), headers=headers, media_type="application/json"
        )

        def ask() -> int:
            with gateway.client() as client:
                return complete(client).status_code

        def held() -> float:
            return metric(gateway, 'baton_bodies_bytes{place="memory"}')

        asked += [pool.submit(ask) for _ in range(4)]
        wait_for(lambda: held() > 4 * 11 * mib, "they are not counted")
        later = [pool.submit(ask) for _ in range(8)]
        refused = [each.result() for each in later]
        most = held()
        release.set()
        told = [each.result() for each in asked]
    assert (refused.count(503), told) == (8, [200] * 4)
    assert most <= 56 * mib
