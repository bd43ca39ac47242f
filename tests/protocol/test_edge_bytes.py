"""What is no proper HTTP, or too much of it: refused in the one shape, with memory flat and nobody let in."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from collections.abc import Iterator

import pytest
from support.gateways import FakeGateway, run_fake
from support.raw_requests import (
    TEXT,
    answer_to,
    connect,
    error_of,
    good_traffic,
    open_connections,
    peak_rss,
    request,
    rest_of,
    statuses,
    traffic_beside,
    wait_for,
)

from baton.engines.fake.engine import FakeEngine

MIB = 2**20
GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
EDGE = {"header_s": 1, "body_s": 1}


@pytest.fixture(scope="module")
def gateway() -> Iterator[FakeGateway]:
    with run_fake(FakeEngine("a"), edge=EDGE) as running:
        yield running


def flood(gateway: FakeGateway, start: bytes, piece: bytes, total: int) -> tuple[bytes, int]:
    """Send `start`, then `piece` over and over: the answer, and how many bytes were taken."""
    taken = 0
    with connect(gateway, timeout=20) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(start)
            while taken < total:
                connection.sendall(piece)
                taken += len(piece)
        return rest_of(connection), taken


HEADER = b"X-Bomb: " + b"b" * 1000 + b"\r\n"
BOMBS = {
    "200 MB of headers": (GET, HEADER * 60, 200 * MIB, 431, "headers_too_large"),
    "one header without end": (GET + b"X-Bomb: ", b"b" * 65536, 200 * MIB, 431, "headers_too_large"),
    "1000 headers": (
        GET + b"".join(b"X-%d: 1\r\n" % n for n in range(1000)),
        b"\r\n",
        2,
        431,
        "headers_too_large",
    ),
    "1 MB of address": (b"GET /", b"a" * 65536, MIB, 414, "uri_too_long"),
    "a long address": (
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n",
        b"\r\n",
        2,
        414,
        "uri_too_long",
    ),
    "a long query": (
        b"GET /livez?" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n",
        b"\r\n",
        2,
        414,
        "uri_too_long",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.fault("E6")
def test_huge_headers_and_urls_are_refused_with_memory_flat(gateway: FakeGateway, name: str) -> None:
    start, piece, total, status, code = BOMBS[name]
    with peak_rss() as risen:
        answer, taken = flood(gateway, start, piece, total)
    assert statuses(answer) == [status]
    assert error_of(answer)["code"] == code
    print(f"E6: {name}: {status}, RSS {risen():+.1f} MiB, {taken / MIB:.1f} MiB taken")
    assert risen() < 8


@pytest.mark.fault("E6")
def test_a_request_head_of_usual_size_passes(gateway: FakeGateway) -> None:
    extra = "".join(f"X-{number}: {'v' * 300}\r\n" for number in range(100)) + "Connection: close\r\n"
    assert statuses(answer_to(gateway, request(extra=extra))) == [200]


OVERSIZE = {
    "a length that lies": (b"Content-Length: 300000000\r\n\r\n{", b"x" * 65536, 300 * MIB),
    "an absurd length": (b"Content-Length: 99999999999999999999\r\n\r\n{", b"x", 1),
    "endless chunks": (
        b"Transfer-Encoding: chunked\r\n\r\n",
        b"10000\r\n" + b"x" * 65536 + b"\r\n",
        300 * MIB,
    ),
}


@pytest.mark.parametrize("name", OVERSIZE)
@pytest.mark.fault("E7")
def test_oversize_bodies_are_refused_before_they_are_held(name: str) -> None:
    head, piece, total = OVERSIZE[name]
    with run_fake(FakeEngine("a"), limits={"body_bytes": 2 * MIB}) as gateway, peak_rss() as risen:
        began = time.monotonic()
        answer, taken = flood(gateway, POST + head, piece, total)
        assert statuses(answer) == [413]
        assert error_of(answer)["code"] == "body_too_large"
        assert gateway.engine("a").bodies == []
        wait_for(lambda: open_connections(gateway) == 0, "the connection stays")
        print(f"E7: {name}: 413 after {time.monotonic() - began:.2f} s, RSS {risen():+.1f} MiB, ", end="")
        print(f"{taken / MIB:.1f} MiB taken")
        assert risen() < 16


@pytest.mark.fault("E7")
def test_a_body_shorter_than_its_length_is_a_408() -> None:
    with run_fake(FakeEngine("a"), edge={"body_s": 0.4}) as gateway:
        sent = request().replace(b"Content-Length: ", b"Content-Length: 9")
        assert statuses(answer_to(gateway, sent)) == [408]
        assert gateway.engine("a").bodies == []


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP, gzip"])
@pytest.mark.fault("E7")
def test_compressed_bodies_are_refused_as_unsupported(gateway: FakeGateway, encoding: str) -> None:
    bomb = gzip.compress(json.dumps(TEXT | {"user": "0" * 50 * MIB}).encode())
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    with gateway.client() as client, peak_rss() as risen:
        answer = client.post("/v1/completions", content=bomb, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "Content-Encoding" in answer.json()["error"]["message"]
    print(f"E7: {len(bomb)} bytes called {encoding} that hold 50 MiB: 415, RSS {risen():+.1f} MiB")
    assert risen() < 8


@pytest.mark.fault("E7")
def test_identity_is_no_compression(gateway: FakeGateway) -> None:
    extra = "Content-Encoding: identity\r\nConnection: close\r\n"
    assert statuses(answer_to(gateway, request(extra=extra))) == [200]


MALFORMED = {
    "both framings": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "a length that is none": POST + b"Content-Length: +5\r\n\r\n",
    "an encoding nobody knows": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "a chunk that is none": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a chunk without an end": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}xx",
    "a chunk with a bomb behind it": POST + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * 200_000,
    "a body in crumbs": POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 200_000,
    "no host": b"GET /livez HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a host that is none": b"GET /livez HTTP/1.1\r\nHost: a/b@c d\r\n\r\n",
    "no version": b"GET /livez\r\nHost: a\r\n\r\n",
    "another version": b"GET /livez HTTP/2.0\r\nHost: a\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"r" * 300,
    "a space before a colon": b"GET /livez HTTP/1.1\r\nHost : a\r\n\r\n",
    "control characters": b"GET /livez HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
    "only line ends": b"\r\n\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.fault("F2")
def test_malformed_http_is_a_400_in_our_form_and_ends_its_connection(gateway: FakeGateway, name: str) -> None:
    gateway.engine("a").bodies.clear()
    began = time.monotonic()
    answer = answer_to(gateway, MALFORMED[name] + request())
    assert statuses(answer) == [400]
    assert error_of(answer)["code"] == "malformed_request"
    assert time.monotonic() - began < 20
    assert gateway.engine("a").bodies == []


@pytest.mark.fault("F2")
def test_bytes_after_a_last_request_are_ignored(gateway: FakeGateway) -> None:
    """Some old clients send a line end after a body; it must not spoil the answer."""
    sent = request(extra="Connection: close\r\n")
    engine = gateway.engine("a")
    engine.behaviour.token_seconds = 0.05
    with connect(gateway) as connection:
        connection.sendall(sent)
        time.sleep(0.05)
        connection.sendall(b"\r\n")
        answer = connection.recv(65536)
    engine.behaviour.token_seconds = 0.0
    assert statuses(answer) == [200]


@pytest.mark.fault("F2")
def test_pipelined_requests_are_answered_in_order(gateway: FakeGateway) -> None:
    words = ["one", "two", "three", "four"]
    sent = b"".join(request({"prompt": word}) for word in words[:-1])
    answer = answer_to(gateway, sent + request({"prompt": words[-1]}, extra="Connection: close\r\n"))
    assert statuses(answer) == [200] * 4
    places = [answer.index(f'"text": "{word} '.encode()) for word in words]
    assert places == sorted(places)


@pytest.mark.fault("F2")
def test_a_body_of_tiny_chunks_does_not_delay_others(gateway: FakeGateway) -> None:
    """Each chunk costs as much as a small request, and thousands of them arrive at once."""
    with traffic_beside() as idle, good_traffic(gateway) as good:
        for _ in range(20):
            assert statuses(answer_to(gateway, MALFORMED["a body in crumbs"])) == [400]
    print("F2: bodies of 200 000 chunks of a byte: 400, ", end="")
    print(f"good traffic's p99 {good.p99:.0f} ms ({idle.p99:.0f} idle)")
    good.assert_like(idle)


@pytest.mark.fault("F2")
def test_a_body_in_chunks_of_a_sensible_size_passes(gateway: FakeGateway) -> None:
    content = json.dumps(TEXT | {"user": "u" * 100_000}).encode()
    pieces = [content[start : start + 32] for start in range(0, len(content), 32)]
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    head = b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    assert statuses(answer_to(gateway, POST + head + chunked)) == [200]


ENDS = b"Connection: close\r\n\r\n"
BEFORE = {
    "an empty line": ([b"\r\n" + GET + ENDS], [200]),
    "an empty line in pieces": ([b"\r", b"\n", GET + ENDS], [200]),
    "an empty line and no request": ([b"\r\n", b""], []),
    "an empty line after a body": ([request() + b"\r\n" + GET + ENDS], [200, 200]),
    "an empty line before each": ([b"\r\n" + GET + b"\r\n", b"\r\n" + GET + ENDS], [200, 200]),
    "two empty lines": ([b"\r\n\r\n" + GET + ENDS], [400]),
    "a bare return": ([b"\r" + GET + ENDS], [400]),
    "a space": ([b" " + GET + ENDS], [400]),
}


@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.fault("E16")
def test_an_empty_line_before_a_request_is_skipped(gateway: FakeGateway, name: str) -> None:
    """RFC 9112, section 2.2: clients send one after a body."""
    pieces, expected = BEFORE[name]
    answer = b""
    with connect(gateway) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.02)
        answer = rest_of(connection)
    assert statuses(answer) == expected


TARGETS = {
    "http://localhost/livez": 200,
    "HTTP://localhost:8000/livez": 200,
    "https://127.0.0.1/livez?a=b": 200,
    "http://localhost": 200,
    "http://localhost?a": 200,
    "http://localhost/v1/models": 200,
    "http://localhost/v1/completions": 405,
    "http://evil.example/livez": 421,
    "http:///livez": 400,
    "http://a@localhost/livez": 400,
    "http://local host/livez": 400,
    "ftp://localhost/livez": 404,
    "http:/localhost/livez": 404,
    "//localhost/livez": 404,
}


@pytest.mark.parametrize("host", ["localhost", "evil.example"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.fault("E16")
def test_an_absolute_target_is_answered_under_its_own_host(
    gateway: FakeGateway, target: str, host: str
) -> None:
    """RFC 9112, section 3.2.2: whatever the `Host` header names."""
    sent = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    status = TARGETS[target]
    if host != "localhost" and not target.lower().startswith(("http://", "https://")):
        status = 421
    assert statuses(answer_to(gateway, sent)) == [status]


@pytest.mark.fault("E16")
def test_an_absolute_target_of_http_1_0_needs_no_host_header(gateway: FakeGateway) -> None:
    assert statuses(answer_to(gateway, b"GET http://localhost/v1/models HTTP/1.0\r\n\r\n")) == [200]
    assert statuses(answer_to(gateway, b"GET http://evil.example/v1/models HTTP/1.0\r\n\r\n")) == [421]
