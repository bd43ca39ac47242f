"""Calls are sent again where that is harmless or the gateway asks for it, and else not."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_client import (
    ApiError,
    BadAnswer,
    Baton,
    BatonError,
    ConnectionLost,
    Overloaded,
    ServerFailed,
    TimedOut,
)
from baton_client.call import Call, Reply
from baton_client.retries import Retries, retry_after
from baton_client.values import SceneAnswer
from baton_client.wire import OF_A_FILE

BUSY = b'{"error": {"message": "The engine\'s queue is full.", "code": "engine_overloaded", "param": null}}'
GATEWAY_LOST_BODY = (
    b'{"error": {"message": "gone", "type": "api_error", "param": null, "code": "gateway_lost"}}'
)
EMPTY = b'{"object": "list", "data": [], "has_more": false, "first_id": null, "last_id": null}'


@contextmanager
def scripted(*answers: bytes, **options: Any) -> Iterator[tuple[Baton, list[bytes]]]:
    """A client of a socket that gives these answers, one a connection; an empty one hangs up."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return  # the client asked less often
                with connection:
                    heard.append(request_from(connection))
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with Baton(f"http://127.0.0.1:{listener.getsockname()[1]}", **options) as baton:
            yield baton, heard
        listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that still waits for a request
        thread.join(20)


def request_from(connection: socket.socket) -> bytes:
    """A whole request, whose head and body may come apart."""
    request = connection.recv(65536)
    length = re.search(rb"content-length: (\d+)", request, re.IGNORECASE)
    while length and len(request.partition(b"\r\n\r\n")[2]) < int(length[1]):
        request += connection.recv(65536)
    return request


def answer(status: int, body: bytes, *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the client paused; it does not really."""
    found: list[float] = []
    monkeypatch.setattr("time.sleep", found.append)
    return found


@pytest.mark.parametrize("status", [429, 503])
def test_an_overloaded_gateway_is_asked_again_when_it_says(status: int, pauses: list[float]) -> None:
    busy = answer(status, BUSY, "Retry-After: 7")
    with scripted(busy, answer(200, EMPTY)) as (baton, heard):
        assert list(baton.handoffs.list()) == []
    assert (len(heard), pauses) == (2, [7.0])


def test_a_chat_is_sent_again_too_when_the_gateway_refused_it(pauses: list[float]) -> None:
    busy = answer(503, BUSY, "Retry-After: 1")
    with scripted(busy, busy, busy) as (baton, heard), pytest.raises(Overloaded) as caught:
        baton.chat("a", "11")
    assert len(heard) == 3
    assert heard[0] == heard[2]
    assert (caught.value.retry_after_s, caught.value.code) == (1.0, "engine_overloaded")


def test_it_waits_no_longer_than_is_bearable() -> None:
    retries = Retries()
    assert retries.after_reply(Reply(503, {"retry-after": "86400"}, b""), 0) == retries.longest_s
    assert retry_after({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}) is None
    for attempt in range(40):
        pause = Retries(limit=99).after_reply(Reply(503, {}, b""), attempt)
        step = min(0.5 * 2**attempt, 30)
        assert pause is not None
        assert step / 2 <= pause <= step


def test_a_budget_that_is_spent_is_not_asked_for_again() -> None:
    spent = Reply(429, {"retry-after": "43200"}, b'{"error": {"code": "budget_spent"}}')
    busy = Reply(429, {"retry-after": "43200"}, b'{"error": {"code": "rate_limited"}}')
    assert [Retries().after_reply(reply, 0) for reply in (spent, busy)] == [None, 30.0]


def test_a_conflict_is_tried_again_only_where_it_passes() -> None:
    assert Retries().after_reply(Reply(409, {"retry-after": "1"}, b""), 0) == 1
    assert Retries().after_reply(Reply(409, {}, b""), 0) is None
    assert Retries().after_reply(Reply(500, {"retry-after": "1"}, b""), 0) is None


def test_what_only_reads_is_sent_again_when_the_connection_is_lost(pauses: list[float]) -> None:
    with scripted(b"", answer(200, EMPTY)) as (baton, heard):
        assert list(baton.handoffs.list()) == []
    assert len(heard) == 2


@pytest.mark.parametrize("lost", [b"", answer(200, EMPTY)[:-10], answer(502, GATEWAY_LOST_BODY)])
def test_a_call_whose_gateway_was_lost_is_sent_again(lost: bytes, pauses: list[float]) -> None:
    with scripted(lost, answer(200, EMPTY)) as (baton, heard):
        assert list(baton.handoffs.list()) == []
    assert (len(heard), len(pauses)) == (2, 1)


def test_a_chat_is_sent_again_as_often_as_was_set_and_then_told_as_lost(pauses: list[float]) -> None:
    with scripted(b"", b"", b"") as (baton, heard), pytest.raises(ConnectionLost, match="No answer came"):
        baton.chat("a", "11")
    assert (len(heard), len(pauses)) == (3, 2)


def test_another_502_is_not_a_lost_gateway(pauses: list[float]) -> None:
    other = answer(502, b'{"error": {"code": "engine_failed"}}')
    with scripted(other) as (baton, _), pytest.raises(ServerFailed):
        list(baton.handoffs.list())
    assert pauses == []


def test_a_chat_that_never_left_is_sent_again(pauses: list[float]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with Baton(url) as baton, pytest.raises(ConnectionLost, match="Check base_url") as caught:
        baton.chat("a", "11")
    assert (len(pauses), caught.value.sent) == (2, False)


def test_an_answer_that_breaks_off_each_time_is_told(pauses: list[float]) -> None:
    half = answer(200, EMPTY)[:-10]
    with scripted(half, half, half) as (baton, heard), pytest.raises(ConnectionLost, match="broke off"):
        list(baton.handoffs.list())
    assert (len(heard), len(pauses)) == (3, 2)


def test_a_gateway_that_is_too_slow_is_not_asked_again(pauses: list[float]) -> None:
    def slow(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("slow", request=request)

    with (
        Baton(transport=httpx.MockTransport(slow)) as baton,
        pytest.raises(TimedOut, match="Raise timeout_s"),
    ):
        list(baton.handoffs.list())
    assert pauses == []


@pytest.mark.parametrize(
    ("answered", "resend", "target"),
    list(itertools.product((True, False), (True, False), (None, Path("answer.tif")))),
)
def test_the_rule_for_lost_connections(answered: bool, resend: bool, target: Path | None) -> None:
    lost = ConnectionLost("", answered=answered, resend=resend)
    call = Call("POST", "/", lambda reply: reply, target=target)
    again = Retries().after_loss(call, lost, 0) is not None
    assert again == (resend and not (answered and target))


def test_what_is_no_gateway_is_told_from_one(pauses: list[float]) -> None:
    with scripted(answer(200, b"<html>")) as (baton, _), pytest.raises(BadAnswer, match="base_url"):
        list(baton.handoffs.list())
    with scripted(answer(502, b"<html>")) as (baton, _), pytest.raises(ServerFailed, match="HTTP 502"):
        list(baton.handoffs.list())
    with scripted(answer(302, b"")) as (baton, _), pytest.raises(Exception, match="HTTP 302"):
        list(baton.handoffs.list())


@pytest.mark.fault("F10")
@pytest.mark.parametrize("status", [200, 503, 400])
@pytest.mark.parametrize("deep", [b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"error":' * 100_000])
def test_an_answer_that_is_nested_too_deep_is_an_error_of_the_client(
    status: int, deep: bytes, pauses: list[float]
) -> None:
    with scripted(*[answer(status, deep)] * 3) as (baton, _), pytest.raises(BatonError) as caught:
        list(baton.handoffs.list())
    assert isinstance(caught.value, BadAnswer if status == 200 else ApiError)
    with pytest.raises(ValueError, match="nested"):
        SceneAnswer("application/json", deep.partition(b"]")[0], None).json()


@pytest.mark.fault("F10")
def test_an_answer_has_a_bound(tmp_path: Path, pauses: list[float]) -> None:
    """In memory and in a file, of which nothing is left."""
    large = answer(200, b"x" * 5000)
    with (
        scripted(large, large, max_answer_bytes=4999) as (baton, _),
        pytest.raises(BadAnswer, match="max_answer_bytes"),
    ):
        list(baton.handoffs.list())
    with scripted(large, max_answer_bytes=5000 // OF_A_FILE) as (baton, _), pytest.raises(BadAnswer):
        baton.scene("flood", b"x", target=tmp_path / "mask.tif")
    assert list(tmp_path.iterdir()) == []
    with scripted(large, max_answer_bytes=5000) as (baton, _):
        assert baton.scene("flood", b"x").content == b"x" * 5000


@pytest.mark.fault("F10")
def test_a_compressed_answer_is_not_unpacked(pauses: list[float]) -> None:
    bomb = answer(200, gzip.compress(b" " * 10**7), "Content-Encoding: gzip")
    with scripted(bomb) as (baton, heard), pytest.raises(BadAnswer, match="compressed"):
        list(baton.handoffs.list())
    assert b"accept-encoding: identity" in heard[0].lower()


@pytest.mark.fault("F10")
def test_an_error_rules_no_terminal(pauses: list[float]) -> None:
    told = {
        name: f"\x1b]0;{name}\x07\x9b2J\u202e\nnext" for name in ("message", "code", "param", "request_id")
    }
    with (
        scripted(answer(400, json.dumps({"error": told}).encode())) as (baton, _),
        pytest.raises(ApiError) as caught,
    ):
        baton.chat("a", "11")
    error = caught.value
    for text in (str(error), error.message, error.code, error.param, error.request_id):
        assert text is not None
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
        assert "\\x1b]0;" in text
    assert "\n" in error.message
    with pytest.raises(BadAnswer) as bad, scripted(answer(200, b'{"data": [{}], "\x1b": 1}')) as (baton, _):
        list(baton.handoffs.list())
    assert "\x1b" not in str(bad.value)
