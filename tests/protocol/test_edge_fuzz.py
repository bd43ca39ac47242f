"""Random bytes in place of requests: no key is bypassed, and nothing is harmed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from support.gateways import FakeGateway, run_fake
from support.raw_requests import (
    TEXT,
    open_connections,
    statuses,
    talk,
    wait_for,
)

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeEngine
from baton.http import protocol

EDGE = {"header_s": 0.6, "body_s": 0.6}
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
    chance, at_once = random.Random(seed), asyncio.Semaphore(750)
    results: list[tuple[bytes, list[int]]] = []

    async def one() -> None:
        sent = made_up(chance)
        async with at_once:
            results.append((sent, await case(gateway, sent, chance)))

    await asyncio.gather(*(one() for _ in range(CASES)))
    return results


@pytest.mark.fault("F2")
def test_random_bytes_bypass_no_key_and_harm_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.2)
    key = create_key(tmp_path / "keys.json", "acme")
    auth = {"keys_file": tmp_path / "keys.json"}
    with run_fake(FakeEngine("a"), auth=auth, edge=EDGE) as gateway:
        gateway.server.config.timeout_keep_alive = 0.6  # type: ignore[assignment]  # uvicorn's 5 s
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
