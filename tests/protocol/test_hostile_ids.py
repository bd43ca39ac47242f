"""Rows G4, G5, G6 and G8: what a client sends spoils no log line, shows no secret, makes no series, opens no port."""

from __future__ import annotations

import http.client
import io
import json
import logging
import random
import re
import socket
import string
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import structlog
from support.gateways import FakeGateway, run_fake

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeEngine
from baton.telemetry.logs import LONGER_VALUES, MAX_VALUE, configure_logs

CUT = 40
"""Room for what says that a value was cut."""
REQUESTS = 1000
"""Requests of each kind whose random words must make no series."""


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What is logged, down to level debug, as JSON."""
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    try:
        yield stream
    finally:
        structlog.configure(**before)
        root.handlers[:], root.level = handlers, level


def lines_of(log: io.StringIO) -> list[dict[str, object]]:
    """Every line, each of which must be one JSON object."""
    text = log.getvalue()
    assert text.isascii()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text), "a control character in the log"
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    assert all(isinstance(line, dict) and "event" in line and "level" in line for line in lines)
    return lines


def send(gateway: FakeGateway, request: bytes) -> bytes:
    """Bytes on a socket, and what comes back."""
    where = urlsplit(gateway.url)
    answer = b""
    with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
        try:
            connection.sendall(request)
            while part := connection.recv(65536):
                answer += part
        except (ConnectionResetError, BrokenPipeError):  # refused before all of it had come
            pass
    return answer


HOSTILE = (
    b'a\r\n{"event": "forged", "level": "info"}',
    b'a\n{"event": "forged", "level": "info"}',
    b"a\x1b[31mred\x1b[0m\x07\x08",
    b'"}\n{"event": "forged"',
    b'"}{"event":"forged","x":"',
    "\u2028\u202e\u0085".encode(),
    b"\xff\xfe\x00",
    b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01",
    b"x" * 60_000,
    b"x" * 1_000_000,
)
HEADERS = (
    b"X-Request-Id",
    b"traceparent",
    b"tracestate",
    b"X-Tenant",
    b"User-Agent",
    b"Host",
    b"Authorization",
)


def hostile_requests() -> Iterator[bytes]:
    end = b"Connection: close\r\nContent-Type: application/json\r\n"
    good = b'{"model": "a", "prompt": "x"}'
    for value in HOSTILE:
        for header in HEADERS:
            host = b"" if header == b"Host" else b"Host: localhost\r\n"
            length = b"Content-Length: %d\r\n\r\n" % len(good)
            yield (
                b"POST /v1/completions HTTP/1.1\r\n"
                + host
                + header
                + b": "
                + value
                + b"\r\n"
                + end
                + length
                + good
            )
        quoted = b"".join(b"%%%02x" % byte for byte in value[:20_000])
        for target in (
            b"/" + quoted,
            b"/v1/models/" + quoted,
            b"/v1/models?" + quoted,
            b"/" + value[:60_000],
        ):
            yield b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n" + end + b"\r\n"
        yield value[:100] + b" /v1/models HTTP/1.1\r\nHost: localhost\r\n" + end + b"\r\n"
        for field in ("model", "user", "request_id", "prompt", "session_id"):
            body = json.dumps({"model": "a", "prompt": "x", field: value.decode("latin-1")}).encode()
            length = b"Content-Length: %d\r\n\r\n" % len(body)
            yield b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + end + length + body


@pytest.mark.fault("G4")
def test_every_log_line_is_one_json_object_of_bounded_length(log: io.StringIO) -> None:
    engine = FakeEngine("a")
    sent = 0
    with run_fake(engine) as gateway:
        configure_logs("debug", "json", log)
        for failing in (
            False,
            True,
        ):  # then every path, model and text meets an exception nobody foresaw, too
            engine.behaviour.call_error = KeyError(b"".join(HOSTILE).decode("latin-1")) if failing else None
            for request in hostile_requests():
                answer = send(gateway, request)
                head = answer.partition(b"\r\n\r\n")[0]
                assert b"forged" not in head, "a header was split"
                sent += 1
    lines = lines_of(log)
    assert len(lines) > sent / 2
    assert not any(line["event"] == "forged" for line in lines)
    longest = max(
        len(str(value)) for line in lines for key, value in line.items() if key not in LONGER_VALUES
    )
    traceback = max(len(str(line.get("exception", ""))) for line in lines)
    print(
        f"G4: {sent} requests, {len(lines)} log lines, malformed 0, longest value {longest}, traceback {traceback}"
    )
    assert traceback > 0
    assert longest <= MAX_VALUE + CUT
    assert traceback <= LONGER_VALUES["exception"] + CUT


@pytest.mark.fault("G4")
def test_a_long_value_is_cut_and_control_characters_are_escaped(log: io.StringIO) -> None:
    configure_logs("info", "json", log)
    structlog.get_logger().info("long", text="x" * 10_000, items=["y" * 100] * 100, number=1)
    line = lines_of(log)[-1]
    assert line["text"] == "x" * MAX_VALUE + "... (10000 characters)"
    assert len(str(line["items"])) <= MAX_VALUE + CUT
    assert line["number"] == 1
    log.truncate(0)
    configure_logs("info", "console", log)
    structlog.get_logger().info("event", text="a\x1b[2Jb\x9b31mc")
    assert "a\\x1b[2Jb\\x9b31mc" in log.getvalue()


@pytest.fixture
def two_tenants(tmp_path: Path) -> Iterator[tuple[FakeGateway, dict[str, str]]]:
    file = tmp_path / "keys.json"
    keys = {tenant: create_key(file, tenant) for tenant in ("acme", "globex")}
    with run_fake(FakeEngine("a", supports_handoffs=True), auth={"keys_file": file}) as gateway:
        yield gateway, keys


PROMPT = "correct-horse-battery"


def use_it(gateway: FakeGateway, keys: dict[str, str]) -> tuple[list[str], list[str]]:
    """Good, refused and failing requests; gives the texts of all errors, and the handoffs' ids."""
    errors, ids = [], []
    engine = gateway.engine("a")
    for tenant, other in (("acme", "globex"), ("globex", "acme")):
        with gateway.client(headers={"Authorization": f"Bearer {keys[tenant]}"}) as client:
            asked = {"model": "a", "prompt": f"{PROMPT} {PROMPT}"}
            made = client.post("/v1/completions", json=asked | {"handoff": {"save": True}}).json()
            ids.append(made["handoff"]["id"])
            client.post("/v1/completions", json=asked | {"handoff": {"from": ids[-1]}, "stream": True})
            client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": PROMPT}]})
            for wrong in (
                {"n": 10**6},
                {"stop": [PROMPT] * 99},
                {"x": "\ud800"},
                {"max_tokens": -1},
                {"handoff": PROMPT},
            ):
                errors.append(
                    client.post(
                        "/v1/completions",
                        content=json.dumps(asked | wrong),
                        headers={"content-type": "application/json"},
                    ).text
                )
            errors.append(
                client.post("/v1/completions", json=asked, headers={"content-type": "text/plain"}).text
            )
            errors.append(client.get("/v1/models", headers={"Authorization": f"Bearer {keys[other]}x"}).text)
            errors.append(client.get("/v1/models", headers={"Authorization": f"Basic {keys[other]}"}).text)
            engine.behaviour.call_error = KeyError(f"{PROMPT} {keys[tenant]} {ids[-1]}")
            errors.append(client.post("/v1/completions", json=asked).text)
            engine.behaviour.call_error = None
            errors.append(client.get(f"/v1/handoffs/{ids[0]}{'x' * 9}").text)
            client.delete(f"/v1/handoffs/{ids[-1]}")
            client.get(f"/v1/models/{PROMPT}", params={"key": keys[tenant]})
    return errors, ids


@pytest.mark.fault("G5")
def test_no_secret_is_in_logs_metrics_or_answers(
    two_tenants: tuple[FakeGateway, dict[str, str]], log: io.StringIO
) -> None:
    """At the levels people run; debug shows what exceptions say."""
    gateway, keys = two_tenants
    configure_logs("info", "json", log)
    errors, ids = use_it(gateway, keys)
    page = httpx.get(f"{gateway.metrics_url}/metrics").text
    lines = lines_of(log)
    assert any("exception" in line for line in lines), "the failure nobody foresaw was not logged"
    assert any(line.get("tenant") == "globex" for line in lines)
    hidden = [PROMPT, *keys.values(), *(key[3:] for key in keys.values()), *ids]
    places = {"log": log.getvalue(), "metrics": page, "errors": "\n".join(errors)}
    hits = [(place, word) for place, text in places.items() for word in hidden if word in text]
    print(
        f"G5: {len(hidden)} secrets in {len(lines)} lines, {len(errors)} errors and /metrics: hits {len(hits)}"
    )
    assert hits == []


def word() -> str:
    return "".join(random.choices(string.ascii_letters, k=12))


def series(page: bytes) -> set[bytes]:
    lines = (line for line in page.splitlines() if line and not line.startswith(b"#"))
    return {line.rpartition(b" ")[0] for line in lines}


@pytest.mark.fault("G6")
def test_random_values_add_no_metric_series(two_tenants: tuple[FakeGateway, dict[str, str]]) -> None:
    gateway, keys = two_tenants
    where = urlsplit(gateway.url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=30)
    known = {"Authorization": f"Bearer {keys['acme']}", "Content-Type": "application/json"}

    def ask(method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None) -> bytes:
        connection.request(method, path, body, headers or known)
        return connection.getresponse().read()

    def one_of_each() -> None:
        ask("POST", "/v1/completions", json.dumps({"model": word(), "prompt": "x"}))
        ask("GET", f"/{word()}/{word()}?{word()}={word()}")
        ask("GET", f"/v1/models/{word()}", None, {"Authorization": f"Bearer {word()}", "X-Tenant": word()})
        ask("GET", f"/v1/handoffs/{word()}")
        more = {"user": word(), word(): 1, "max_tokens": 1, "vllm_xargs": {word(): 1}}
        ask(
            "POST",
            "/v1/completions",
            json.dumps({"model": "a", "prompt": word()} | more),
            known | {"X-Request-Id": word()},
        )
        ask(word().upper(), "/v1/models")

    one_of_each()

    def page_of_metrics() -> bytes:
        return httpx.get(f"{gateway.metrics_url}/metrics").content

    before = series(page_of_metrics())
    for _ in range(REQUESTS):
        one_of_each()
    page = page_of_metrics()
    connection.close()
    print(
        f"G6: {6 * REQUESTS} requests with random words, series {len(before)} before, {len(series(page))} after"
    )
    assert series(page) == before
    arrived = f'reason="model_not_found"}} {REQUESTS + 1}.0'
    assert arrived.encode() in page, "they did not all arrive"


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections(kind="inet")
    assert not any(one.type == socket.SOCK_DGRAM for one in found)
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


@pytest.mark.fault("G8")
def test_nothing_but_the_gateways_port_listens() -> None:
    before = listening()
    with run_fake(FakeEngine("a")) as gateway:
        opened = listening() - before
        assert opened == {("127.0.0.1", urlsplit(gateway.url).port)}
    options = {"host": "0.0.0.0", "auth": {"allow_unauthenticated": True}, "metrics": {"port": 0}}
    with run_fake(FakeEngine("a"), **options) as gateway:
        opened = listening() - before
        public = urlsplit(gateway.url).port
        assert opened == {("0.0.0.0", public), ("127.0.0.1", urlsplit(gateway.metrics_url).port)}
    assert listening() == before
    print("G8: open beside the gateway's port: on the network 0, on loopback the metrics port")
