"""What another server answers, and does not answer, reaches clients as errors of ours, or as its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from support.gateways import FakeGateway, free_port
from support.raw_requests import metric, wait_for
from support.remote_gateways import (
    DONE,
    USAGE,
    OtherServer,
    chunk,
    complete,
    completion,
    error,
    other_server,
    remote,
    run_near,
    streamed,
)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeGateway, OtherServer]]:
    limits = {"answer_bytes": 64 * 1024, "answer_s": 2, "silence_s": 1, "connect_s": 0.5}
    with other_server() as server, run_near(remote(server.url, remote=limits)) as gateway:
        yield gateway, server


@pytest.fixture
def asked(running: tuple[FakeGateway, OtherServer]) -> Iterator[tuple[httpx.Client, OtherServer]]:
    gateway, server = running
    server.asked.clear()
    with gateway.client() as client:
        yield client, server


PASSED_ON = [
    (
        400,
        {
            "message": "Too long.",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
        },
    ),
    (400, {"message": "Bad.", "type": "BadRequestError", "param": None, "code": 400}),
    (
        404,
        {
            "message": "No such handoff.",
            "type": "not_found_error",
            "param": None,
            "code": "handoff_not_found",
        },
    ),
    (409, {"message": "Pending.", "type": "x", "param": None, "code": "handoff_pending", "more": {"a": 1}}),
    (413, {"message": "Too large.", "type": "x", "param": None, "code": "body_too_large"}),
    (422, {"message": "No.", "type": "x", "param": "a.b", "code": "unprocessable"}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "fields"), PASSED_ON)
def test_a_refusal_is_passed_on_as_it_is_with_our_request_id(
    asked: tuple[httpx.Client, OtherServer], status: int, fields: dict[str, Any], stream: bool
) -> None:
    client, server = asked
    server.answer = lambda _: error(status, request_id="theirs", **fields)
    answer = complete(client, stream=stream)
    assert answer.status_code == status
    assert answer.json() == {"error": fields | {"request_id": answer.headers["x-request-id"]}}


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("header", "least", "most"), [("7", 7, 7), ("99999999", 3600, 3600), ("soon", 1, 1), (None, 1, 1)]
)
def test_a_server_that_is_busy_says_when_to_come_again(
    asked: tuple[httpx.Client, OtherServer], status: int, header: str | None, least: int, most: int
) -> None:
    client, server = asked
    headers = {"Retry-After": header} if header is not None else {}
    server.answer = lambda _: error(status, headers, message="Slowly.", code="slowly", type="t", param=None)
    answer = complete(client)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, "slowly")
    assert least <= int(answer.headers["Retry-After"]) <= most


def test_retry_after_may_be_a_date(asked: tuple[httpx.Client, OtherServer]) -> None:
    client, server = asked
    when = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    server.answer = lambda _: PlainTextResponse("no healthy upstream", 503, {"Retry-After": when})
    answer = complete(client)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "remote_busy")
    assert 90 <= int(answer.headers["Retry-After"]) <= 100


FAILURES: dict[str, Any] = {
    "an error without a shape": lambda _: PlainTextResponse("<html>", 400),
    "an internal error": lambda _: error(500, message="secret path /x", type="t", param=None, code="c"),
    "another 5xx": lambda _: PlainTextResponse("bad gateway", 502),
    "a key that is refused": lambda _: error(
        401, message="wrong", type="t", param=None, code="invalid_api_key"
    ),
    "a right that is missing": lambda _: error(403, message="wrong", type="t", param=None, code="c"),
    "a model that is gone": lambda _: error(404, message="none", type="t", param="model", code=404),
    "a redirect": lambda asked: RedirectResponse("http://127.0.0.1:1/", 307),
    "no JSON": lambda _: Response(b"{", media_type="application/json"),
    "no object": lambda _: JSONResponse([1]),
    "another kind of answer": lambda _: PlainTextResponse("hello"),
    "an empty answer": lambda _: Response(status_code=204),
    "a compressed answer": lambda _: Response(
        b"x", headers={"content-encoding": "gzip"}, media_type="application/json"
    ),
    "too much": lambda _: JSONResponse(completion("far", "x" * 70_000)),
    "a stream": lambda _: streamed(chunk("a"), DONE),
}


def _short() -> Response:
    return Response(b'{"a": 1}', headers={"content-length": "100"}, media_type="application/json")


def test_an_answer_that_is_lost_midway_may_be_asked_for_again(
    asked: tuple[httpx.Client, OtherServer],
) -> None:
    client, server = asked
    server.answer = lambda _: _short()
    answer = complete(client)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "remote_lost")
    assert answer.headers["Retry-After"] == "1"
    assert len(server.asked) == 1, "it was sent once"


@pytest.mark.fault("I8")
@pytest.mark.parametrize("name", FAILURES)
def test_what_is_no_answer_is_a_502(asked: tuple[httpx.Client, OtherServer], name: str) -> None:
    client, server = asked
    server.answer = FAILURES[name]
    answer = complete(client)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "remote_failed")
    assert not any(word in answer.text for word in ("secret", "127.0.0.1", "html", server.url))
    assert len(server.asked) == 1, "it was sent once"


def test_an_operation_that_the_server_does_not_know_is_unsupported(
    asked: tuple[httpx.Client, OtherServer],
) -> None:
    client, server = asked
    server.answer = lambda _: JSONResponse({"detail": "Not Found"}, 404)
    answer = client.post("/tokenize", json={"model": "near", "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "operation_unsupported")


@pytest.mark.fault("I2")
def test_an_answer_that_does_not_begin_in_time_is_a_504(asked: tuple[httpx.Client, OtherServer]) -> None:
    client, server = asked

    async def slowly() -> Response:
        import asyncio

        await asyncio.sleep(60)
        return Response()

    server.answer = lambda _: slowly()
    answer = complete(client)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "remote_timeout")
    assert server.asked[0].left.wait(20), "its request was closed"


CUT: dict[str, tuple[Any, str]] = {
    "the connection breaks": (RuntimeError("cut"), "remote_lost"),
    "it ends without the last event": (b"", "remote_failed"),
    "it pauses for too long": (5.0, "remote_timeout"),
    "an event is no JSON": (b"data: {\n\n", "remote_failed"),
    "an event is no text": (b"data: \xff\xff\n\n", "remote_failed"),
    "an event never ends": (b"data: " + b"x" * 200_000, "remote_failed"),
    "vLLM's error": (
        b'data: {"error": {"message": "It died.", "type": "t", "param": null, "code": 500}}\n\n',
        "500",
    ),
    "a Baton's error": (
        b'event: error\ndata: {"error": {"message": "It died.", "type": "t", "param": null, '
        b'"code": "engine_restarting", "request_id": "theirs"}}\n\n',
        "engine_restarting",
    ),
    "an error of OpenAI's responses": (
        b'event: error\ndata: {"type": "error", "code": "boom", "message": "It died."}\n\n',
        "boom",
    ),
}


@pytest.mark.fault("I8")
@pytest.mark.parametrize("name", CUT)
def test_a_stream_that_fails_ends_with_one_error_event(
    asked: tuple[httpx.Client, OtherServer], name: str
) -> None:
    client, server = asked
    part, code = CUT[name]
    server.answer = lambda _: streamed(chunk("a"), chunk("b"), part)
    answer = complete(client, stream=True)
    assert answer.status_code == 200
    told = [each for each in answer.text.split("\n\n") if each]
    assert [json.loads(each[6:])["choices"][0]["text"] for each in told[:-1]] == ["a", "b"]
    assert told[-1].startswith("event: error\ndata: ")
    failure = json.loads(told[-1].partition("\ndata: ")[2])["error"]
    assert str(failure["code"]) == code
    assert failure["request_id"] == answer.headers["x-request-id"]
    assert "[DONE]" not in answer.text


@pytest.mark.fault("I8")
def test_a_failure_before_the_first_event_has_its_own_status(asked: tuple[httpx.Client, OtherServer]) -> None:
    client, server = asked
    for part, status in (
        (b"", 502),
        (RuntimeError("cut"), 503),
        (b'data: {"error": {"message": "No."}}\n\n', 502),
    ):
        server.answer = lambda _, part=part: streamed(part)
        assert complete(client, stream=True).status_code == status


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_events_may_come_in_any_pieces(asked: tuple[httpx.Client, OtherServer], cut: int, ends: str) -> None:
    client, server = asked
    whole = (
        b"\xef\xbb\xbf: a comment\n\n"
        + chunk("ä")
        + b": keep-alive\n\n"
        + b"id: 3\nretry: 1\n"
        + chunk("b")
        + USAGE
        + DONE
    )
    whole = whole.replace(b"\n", ends.encode())
    server.answer = lambda _: streamed(*(whole[at : at + cut] for at in range(0, len(whole), cut)))
    told = [line[6:] for line in complete(client, stream=True).text.splitlines() if line.startswith("data: ")]
    assert [json.loads(each)["choices"][0]["text"] for each in told[:-1]] == ["ä", "b"]
    assert told[-1] == "[DONE]"


def test_an_event_is_passed_on_before_the_next_one_comes(asked: tuple[httpx.Client, OtherServer]) -> None:
    client, server = asked
    server.answer = lambda _: streamed(chunk("a"), 0.8, chunk("b"), DONE)
    times = []
    body = {"model": "near", "prompt": "a", "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        times = [time.monotonic() for _ in answer.iter_raw()]
    assert times[1] - times[0] > 0.4


def test_outcomes_are_counted(running: tuple[FakeGateway, OtherServer]) -> None:
    gateway, server = running

    def counted(outcome: str) -> float:
        return metric(gateway, f'baton_remote_requests_total{{engine="near",outcome="{outcome}"}}')

    answers = {
        "answered": lambda _: JSONResponse(completion("far", "a")),
        "refused": lambda _: error(400, message="m"),
        "busy": lambda _: error(429, message="m"),
        "failed": lambda _: error(500, message="m"),
    }
    with gateway.client() as client:
        for outcome, answer in answers.items():
            before = counted(outcome)
            server.answer = answer
            complete(client)
            assert counted(outcome) == before + 1
    assert gateway.fleet.engines[0].active == 0


@pytest.mark.fault("I4")
def test_a_server_that_is_lost_and_comes_back(tmp_path: Any) -> None:
    """Once the breaker is open requests get 503 at once; health and metrics show it."""
    with (
        run_near(
            remote(f"http://127.0.0.1:{free_port()}", remote={"failures": 2, "probe_s": 0.2})
        ) as gateway,
        gateway.client() as client,
    ):
        state = 'baton_engine_state{engine="near",state="unreachable"}'
        wait_for(lambda: gateway.fleet.states["near"].value == "unreachable", "it cannot be reached")
        refused = complete(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert refused.headers["Retry-After"]
        assert client.get("/readyz").json() == {"status": "not ready", "engines": {"unreachable": 1}}
        assert metric(gateway, state) == 1
        assert metric(gateway, 'baton_engine_up{engine="near"}') == 0
