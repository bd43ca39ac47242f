"""What is no proper HTTP, or too much of it: refused in the one shape, with memory flat and nobody let in."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gateways import FakeGateway, run_fake
from support.wire import (
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
    talk,
    wait_for,
)

from baton.admission.api_keys import create_key
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
    assert time.monotonic() - began < 4
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
    with good_traffic(gateway) as p99:
        for _ in range(20):
            assert statuses(answer_to(gateway, MALFORMED["a body in crumbs"])) == [400]
    print(f"F2: bodies of 200 000 chunks of a byte: 400, good traffic's p99 {p99():.0f} ms")
    assert p99() < 1000


@pytest.mark.fault("F2")
def test_a_body_in_chunks_of_a_sensible_size_passes(gateway: FakeGateway) -> None:
    content = json.dumps(TEXT | {"user": "u" * 100_000}).encode()
    pieces = [content[start : start + 32] for start in range(0, len(content), 32)]
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    head = b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    assert statuses(answer_to(gateway, POST + head + chunked)) == [200]


CASES = 1500
METHODS = (
    b"GET",
    b"POST",
    b"PUT",
    b"DELETE",
    b"HEAD",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"BREW",
    b"get",
    b"",
)
TARGETS = (
    b"/livez",
    b"/v1/completions",
    b"/v1/models",
    b"/metrics",
    b"/livez/../v1/models",
    b"//v1/models",
    b"/%76%31/models",
    b"http://gateway/v1/models",
    b"*",
    b"gateway:443",
    b"/livez?/v1/models",
    b"/v1/models#/livez",
    b"/livez%00",
    b"/\xff",
    b"/v1/handoffs/x",
)
HOSTS = (
    b"Host: localhost",
    b"",
    b"Host: a\r\nHost: b",
    b"Host: a b",
    b"Host:",
    b"Host: livez/",
    b"Host: \xff",
    b"host:g",
)
FRAMINGS = (
    b"",
    b"Content-Length: 2",
    b"Content-Length: 0",
    b"Content-Length: -1",
    b"Content-Length: 99999",
    b"Content-Length: 2\r\nContent-Length: 2",
    b"Content-Length: 2, 3",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 2",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding:\x0bchunked",
)
EXTRAS = (
    b"",
    b"Connection: close",
    b"Connection: upgrade\r\nUpgrade: websocket",
    b"Expect: 100-continue",
    b"Authorization: Bearer wrong",
    b"X-Original-URL: /livez",
    b"X: a\r\n b",
    b"X-Api-Key:",
    b"\x00: x",
)
BODIES = (
    b"",
    b"{}",
    b"2\r\n{}\r\n0\r\n\r\n",
    b"fffffffffffffffff\r\n",
    b"0\r\nX: y\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n\r\n",
)
ENDS = (b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r")


def made_up(chance: random.Random) -> bytes:
    """One to three requests, each put together from odd parts, the whole cut short or bent at random."""
    sent = b""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        end = chance.choice(ENDS)
        version = chance.choice((b" HTTP/1.1",) * 6 + (b" HTTP/1.0", b" HTTP/9.9", b"", b" HTTP/1.1 x"))
        method, target, *parts = (
            odd[0] if chance.random() < 0.5 else chance.choice(odd)
            for odd in (METHODS, TARGETS, HOSTS, FRAMINGS, EXTRAS)
        )
        lines = [method + b" " + target + version, *(part for part in parts if part)]
        sent += end.join([*lines, b"", b""]) + chance.choice(BODIES)
    kind = chance.random()
    if kind < 0.3:
        sent = sent[: chance.randrange(len(sent) + 1)]
    elif kind < 0.5:
        place = chance.randrange(len(sent))
        sent = sent[:place] + chance.randbytes(chance.randrange(1, 5)) + sent[place + chance.randrange(3) :]
    return sent


async def case(gateway: FakeGateway, sent: bytes, chance: random.Random) -> list[int]:
    """The statuses of what was answered; the connection has to end by itself."""
    reader, writer = await talk(gateway, b"")
    answer = b""
    try:
        if chance.random() < 0.5:
            writer.write(sent)
        else:
            middle = chance.randrange(len(sent) + 1)
            writer.write(sent[:middle])
            await asyncio.sleep(0.01)
            writer.write(sent[middle:])
        async with asyncio.timeout(20):
            while part := await reader.read(65536):
                answer += part
    except (ConnectionResetError, BrokenPipeError):
        pass
    finally:
        writer.close()
    return statuses(answer)


async def fuzz(gateway: FakeGateway, seed: int) -> list[tuple[bytes, list[int]]]:
    chance, at_once = random.Random(seed), asyncio.Semaphore(300)
    results: list[tuple[bytes, list[int]]] = []

    async def one() -> None:
        sent = made_up(chance)
        async with at_once:
            results.append((sent, await case(gateway, sent, chance)))

    await asyncio.gather(*(one() for _ in range(CASES)))
    return results


@pytest.mark.fault("F2")
def test_random_bytes_bypass_no_key_and_harm_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = create_key(tmp_path / "keys.json", "acme")
    auth = {"keys_file": tmp_path / "keys.json"}
    with run_fake(FakeEngine("a"), auth=auth, edge=EDGE) as gateway:
        began = time.monotonic()
        results = asyncio.run(fuzz(gateway, seed=20261122))
        seconds = time.monotonic() - began
        wait_for(lambda: open_connections(gateway) == 0, "connections stay")
        assert gateway.engine("a").bodies == []
        with gateway.client(headers={"Authorization": f"Bearer {key}"}) as client:
            assert client.post("/v1/completions", json=TEXT).status_code == 200
    seen = Counter(status for _, answers in results for status in answers)
    print(f"F2: {CASES} cases in {seconds:.1f} s, answers {dict(sorted(seen.items()))}")
    for sent, answers in results:
        assert all(status < 500 for status in answers), sent
        if 200 in answers:
            assert b"/livez" in sent, sent
    assert set(seen) <= {100, 200, 400, 401, 405, 408, 413, 414, 431}
    assert {200, 400, 401, 405, 408} <= set(seen), "the fuzz does not reach far"
    assert not [record for record in caplog.records if record.exc_info]
