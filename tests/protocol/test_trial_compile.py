"""Constraints are compiled on trial before an engine gets them: in time, or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client import CollectorRegistry
from support.gateways import FakeGateway, run_fake
from support.hostile import ROUTES, json_schema
from support.loop_lag import loop_lag
from support.paused_process import halt
from support.schemas import DEAR, ORDINARY, flat

from baton.config.groups import LimitSettings
from baton.engines.fake.engine import FakeEngine
from baton.http.body.schemas import Constraint
from baton.http.body.trial import WAITING, TrialCompiler
from baton.telemetry.metrics import QueueMetrics

CHAT = "/v1/chat/completions"
DEAREST = flat(160) | {"minProperties": 50, "maxProperties": 100}
"""Takes ten seconds at least."""
ENDLESS = {"limits": {"schema_s": 60, "schema_cost": 10**6}}


@pytest.fixture(scope="module")
def gateway() -> Iterator[FakeGateway]:
    with run_fake(FakeEngine("text")) as gateway:
        yield gateway


def post(gateway: FakeGateway, body: dict[str, Any], route: str = CHAT) -> httpx.Response:
    with gateway.client() as client:
        return client.post(route, json=ROUTES[route] | body, timeout=60)


def children(of: int) -> dict[int, str]:
    """The processes under one, and what they run."""
    found = {}
    for pid in Path("/proc").iterdir():
        try:
            parent = int((pid / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == of:
                found[int(pid.name)] = (pid / "cmdline").read_text()
        except (OSError, ValueError, IndexError):
            continue
    return found


def server(gateway: FakeGateway) -> int:
    """The gateway's compile server; -1 before it starts."""
    running = gateway.app.state.gateway.compiler._server
    return running.process.pid if running is not None else -1


def until(holds: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)
    return value


@pytest.mark.fault("E14")
@pytest.mark.parametrize("name", ORDINARY)
def test_what_people_write_reaches_the_engine(gateway: FakeGateway, name: str) -> None:
    body = {key: value for key, value in ORDINARY[name].items() if key != "text"}
    route = "/v1/responses" if "text" in ORDINARY[name] else CHAT
    answer = post(gateway, ORDINARY[name] if route != CHAT else body, route)
    assert answer.status_code == 200, answer.text


@pytest.mark.fault("E14")
def test_what_costs_much_is_refused_at_once_with_its_field(gateway: FakeGateway) -> None:
    before = len(gateway.engine("text").bodies)
    lags = {}
    for name, (body, param) in DEAR.items():
        with loop_lag(gateway) as lag:
            error = post(gateway, body).json()["error"]
        lags[name] = lag.worst_s
        assert (error["code"], error["param"]) == ("invalid_request", param), name
    assert len(gateway.engine("text").bodies) == before
    print(f"E14: {len(DEAR)} bodies refused, worst event loop lag {max(lags.values()) * 1000:.0f} ms")


@pytest.mark.fault("E14")
def test_what_is_not_compiled_in_time_is_refused_and_remembered() -> None:
    """The deadline is of processor time, and ends a compiler whatever it is doing."""
    body = json_schema(DEAREST)
    with run_fake(FakeEngine("text"), limits={"schema_s": 0.3, "schema_cost": 10**6}) as gateway:
        error = post(gateway, body).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_request", "response_format")
        assert "limits.schema_s" in error["message"]
        until(lambda: not children(server(gateway)))
        halt(server(gateway))  # nothing can be compiled any more, nor need be
        assert post(gateway, body).json()["error"]["message"] == error["message"]
        os.kill(server(gateway), signal.SIGCONT)
        assert post(gateway, json_schema(flat(80))).status_code == 200
        assert len(gateway.engine("text").bodies) == 1


@contextmanager
def asking(gateway: FakeGateway, body: dict[str, Any]) -> Iterator[None]:
    """A client that asks, and goes away at the end without having read its answer."""
    data = json.dumps(ROUTES[CHAT] | body).encode()
    where = urlsplit(gateway.url)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        yield


@pytest.mark.fault("E14")
def test_an_abandoned_compile_ends_and_meanwhile_holds_nobody_up() -> None:
    """Who sends no constraint is answered while all places for compiles are taken."""
    with run_fake(FakeEngine("text"), **ENDLESS) as gateway:
        with asking(gateway, json_schema(DEAREST)), asking(gateway, json_schema(DEAREST)):
            compiling = set(until(lambda: children(server(gateway))))
            assert [post(gateway, {}).status_code for _ in range(5)] == [200] * 5
            assert compiling <= set(children(server(gateway))), "the compile was over by then"
        until(lambda: not children(server(gateway)))
        assert post(gateway, json_schema(flat(80))).status_code == 200, "their places are free"
        assert len(gateway.engine("text").bodies) == 6


@pytest.mark.fault("E14")
async def test_a_schema_that_many_send_at_once_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than may wait for a place, and none is turned away."""
    tried = 0

    async def slowly(*_: object) -> bool:
        nonlocal tried
        tried += 1
        await asyncio.sleep(0.05)
        return True

    monkeypatch.setattr(TrialCompiler, "_try", slowly)
    constraint = Constraint("response_format", "json", "{}", 1000)

    compiler = TrialCompiler(LimitSettings(), QueueMetrics(CollectorRegistry()))
    await asyncio.gather(*(compiler.require([constraint], "acme") for _ in range(2 * WAITING)))
    given_up = asyncio.create_task(compiler.require([replace(constraint, text="1")], "acme"))
    await asyncio.sleep(0.01)
    waits = asyncio.create_task(compiler.require([replace(constraint, text="1")], "globex"))
    await asyncio.sleep(0.01)
    given_up.cancel()
    await waits
    assert tried == 3, "one for all, one that was given up, and one for who waited for it"


PATCH = """start: "*** Begin" LF line+ "*** End"
line: ("+" | "-") /(.*)/ LF
%import common.LF
"""


@pytest.mark.fault("E14")
@pytest.mark.parametrize(
    ("syntax", "definition", "text", "fits"),
    [
        ("lark", PATCH, '*** Begin\n+é "\\\n-\n*** End', True),
        ("lark", PATCH, "*** Begin\n*** End", False),
        ("lark", PATCH, "*** Begin\n+a\n", False),
        ("lark", PATCH, "", False),
        ("lark", "start: :", "a", False),
        ("regex", "[a-c]{2}\\n?", "ab\n", True),
        ("regex", "[a-c]{2}\\n?", "abc", False),
        ("regex", "(a+)+b", "a" * 50_000, False),
        ("lark", "start: start start | start | /a/", "a" * 50_000, False),
    ],
)
async def test_whether_a_text_is_of_a_grammar_is_told_in_time(
    syntax: str, definition: str, text: str, *, fits: bool
) -> None:
    """The last of them takes longer than anybody waits, which counts as a no."""
    compiler = TrialCompiler(LimitSettings(), QueueMetrics(CollectorRegistry()))
    try:
        assert await compiler.fits(text, syntax, definition, tenant="acme") is fits
    finally:
        compiler.close()


@pytest.mark.chaos
def test_a_compile_server_that_died_is_replaced() -> None:
    with run_fake(FakeEngine("text")) as gateway:
        assert post(gateway, json_schema(flat(80))).status_code == 200
        os.kill(server(gateway), signal.SIGKILL)
        assert post(gateway, json_schema(flat(81))).status_code == 200
        last = server(gateway)
    assert last not in children(os.getpid()), "it outlived its gateway"


def test_without_a_deadline_nothing_is_compiled_on_trial() -> None:
    with run_fake(FakeEngine("text"), limits={"schema_s": 0}) as gateway:
        assert post(gateway, json_schema(flat(80))).status_code == 200
        assert server(gateway) == -1


@pytest.mark.fault("E11")
def test_a_tool_that_a_message_defines_is_measured_without_any_other(gateway: FakeGateway) -> None:
    """Anthropic's messages may define tools; no field of the body says so."""
    definition = {"name": "f", "input_schema": flat(160) | {"minProperties": 50, "maxProperties": 100}}
    block = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}}
    body = {"model": "text", "max_tokens": 1, "messages": [{"role": "system", "content": [block]}]}
    error = post(gateway, body, "/v1/messages").json()["error"]
    assert "costs too much to compile" in error["message"]
