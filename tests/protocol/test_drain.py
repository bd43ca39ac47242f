"""How a gateway ends when it is told to: rows A6 and A7, and what its clients read meanwhile."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import FakeProcess, run_fake
from support.raw_requests import wait_for

from baton.config.groups import EngineSettings
from baton.config.settings import load_settings
from baton.engines.fake.engine import FakeEngine
from baton.engines.fleet import Fleet
from baton.engines.transfers import TransferRequest
from baton.http import uvicorn_server
from baton.library.handoff import Handoff, HandoffState
from baton.library.library import Library
from baton.server import create_app

STREAMS = 50
LONG = {"model": "alpha", "prompt": "one two three", "stream": True}
CUT_WITHIN_S = 20
"""Else it would take the delay and the time limit, or half a minute at least."""


def read(gateway: FakeProcess, body: dict[str, object], begun: threading.Semaphore) -> list[str]:
    """The events of one stream, until it ends, however that is."""
    events = []
    with gateway.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            if line and not events:
                begun.release()
            if line:
                events.append(line)
    return events


def ended_well(events: list[str]) -> bool:
    return events[-1] == "data: [DONE]"


def error_of(events: list[str]) -> str:
    assert events[-2] == "event: error", events[-3:]
    code: str = json.loads(events[-1].removeprefix("data: "))["error"]["code"]
    return code


def run_streams(
    gateway: FakeProcess, bodies: list[dict[str, object]], then: Callable[[], None]
) -> list[list[str]]:
    """Open a stream for each body, do `then` once all have begun, and read them to their ends."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(bodies)) as pool:
        running = [pool.submit(read, gateway, body, begun) for body in bodies]
        for _ in bodies:
            assert begun.acquire(timeout=20)
        then()
        return [future.result(60) for future in running]


def unready(gateway: FakeProcess) -> bool:
    return httpx.get(f"{gateway.url}/readyz", timeout=30).status_code == 503


def wait_in_flight(gateway: FakeProcess) -> None:
    """Wait until the gateway has begun with one completion."""
    series = 'baton_http_requests_in_flight{route="/v1/completions"} 1.0'
    wait_for(lambda: series in httpx.get(f"{gateway.url}/metrics", timeout=30).text, "it was not asked")


@pytest.mark.fault("A6")
def test_a_signal_under_load_loses_nothing_that_can_finish(tmp_path: Path) -> None:
    """Half the streams can finish in time, half cannot; requests within the delay are answered.

    That it is not ready is told within the delay as well, or nobody could be told.
    """
    took: dict[str, float] = {}
    accepted: list[int] = []

    def stop() -> None:
        began = time.monotonic()
        gateway.signal()
        wait_for(lambda: unready(gateway), "it seems ready")
        took["readyz"] = time.monotonic() - began
        while not accepted or time.monotonic() < began + 0.5:
            short = {"model": "beta", "prompt": "x", "max_tokens": 1}
            answer = httpx.post(f"{gateway.url}/v1/completions", json=short, timeout=30)
            accepted.append(answer.status_code)
            assert answer.headers["connection"] == "close"

    with FakeProcess(tmp_path, {"token_seconds": 0.2}, drain_delay_s=2, drain_timeout_s=8) as gateway:
        began = time.monotonic()
        bodies = [LONG | {"max_tokens": 15 if number % 2 else 1000} for number in range(STREAMS)]
        streams = run_streams(gateway, bodies, stop)
        code = gateway.process.wait(20)
        seconds = time.monotonic() - began
    completed = [events for events in streams if ended_well(events)]
    aborted = [events for events in streams if not ended_well(events)]
    print(
        f"A6: readyz 503 after {took['readyz'] * 1000:.0f} ms, {len(accepted)} accepted in the delay, "
        f"{len(completed)} completed, {len(aborted)} aborted, 0 hung, exit {code} after {seconds:.1f} s"
    )
    assert took["readyz"] < 2
    assert accepted
    assert set(accepted) == {200}
    assert len(completed) == STREAMS // 2
    assert {error_of(events) for events in aborted} == {"shutting_down"}
    assert code == 0
    assert "Traceback" not in gateway.log


@pytest.mark.fault("A6")
def test_without_a_delay_the_port_closes_at_once_and_an_idle_gateway_ends(tmp_path: Path) -> None:
    with FakeProcess(tmp_path) as gateway:
        began = time.monotonic()
        gateway.signal()
        assert gateway.process.wait(20) == 0
        print(f"A6: idle, exit after {time.monotonic() - began:.2f} s")


@pytest.mark.fault("A6")
def test_a_request_without_an_answer_yet_is_cut_with_a_503(tmp_path: Path) -> None:
    with (
        FakeProcess(tmp_path, {"token_seconds": 0.2}, drain_timeout_s=1) as gateway,
        ThreadPoolExecutor(1) as pool,
        gateway.client() as client,
    ):
        body = LONG | {"stream": False, "max_tokens": 1000}
        waiting = pool.submit(client.post, "/v1/completions", json=body)
        wait_in_flight(gateway)
        gateway.signal()
        answer = waiting.result(30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert int(answer.headers["retry-after"]) >= 1
        assert gateway.process.wait(20) == 0


@pytest.mark.fault("A7")
def test_a_second_signal_ends_at_once_with_error_events(tmp_path: Path) -> None:
    """Also within the delay, and with Ctrl-C as well as with SIGTERM."""
    for first, second in ((signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)):
        began = 0.0

        def stop(first: int = first, second: int = second) -> None:
            nonlocal began
            gateway.signal(first)
            wait_for(lambda: unready(gateway), "it seems ready")  # two signals at once may be one
            began = time.monotonic()
            gateway.signal(second)

        settings = {"drain_delay_s": 30, "drain_timeout_s": 60}
        with FakeProcess(tmp_path, {"token_seconds": 0.05}, **settings) as gateway:
            streams = run_streams(gateway, [LONG | {"max_tokens": 1000}] * 8, stop)
            code = gateway.process.wait(30)
            seconds = time.monotonic() - began
        print(f"A7: exit {code} after {seconds:.2f} s")
        assert {error_of(events) for events in streams} == {"shutting_down"}
        assert (code, seconds < CUT_WITHIN_S) == (0, True)


@pytest.mark.fault("A7")
def test_a_client_that_does_not_read_delays_no_stop(tmp_path: Path) -> None:
    with FakeProcess(tmp_path, drain_timeout_s=0) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        body = json.dumps(LONG | {"max_tokens": 3500, "prompt": "x" * 20_000 + " y"}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            deaf.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_in_flight(gateway)
            time.sleep(0.5)  # until its buffers are full
            began = time.monotonic()
            gateway.signal()
            assert gateway.process.wait(20) == 0
        print(f"A7: a deaf client, exit after {time.monotonic() - began:.1f} s")


@pytest.mark.fault("A6")
async def test_an_engine_ends_after_the_saves_it_was_told_to_make(tmp_path: Path) -> None:
    """It ends at once then, whatever it does: a handoff must be whole before."""
    states: list[HandoffState] = []

    class Engine(FakeEngine):
        async def stop(self) -> None:
            states.append(record.state)
            await super().stop()

    async def saving(handoffs: Library) -> Handoff:
        relay = TransferRequest()
        record = handoffs.begin(engine, "local")
        handoffs.end(record, relay, [1, 2, 3])
        asyncio.get_running_loop().call_later(0.3, relay.report.save_over.set)
        return record

    engine = Engine("alpha", supports_handoffs=True)
    served = (EngineSettings(name="alpha", model="fake", handoff=True),)
    settings = load_settings(port=0, engines=served, handoffs={"store": f"file:{tmp_path / 'store'}"})

    record: Any = None
    app = create_app(settings, Fleet([engine]))
    async with app.router.lifespan_context(app):
        await app.state.started
        record = await saving(app.state.gateway.library)
        assert record.state is HandoffState.PENDING
    assert states == [HandoffState.READY]


def test_a_stop_wakes_the_servers_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the gateway's and that of the metrics' port, however seldom they look."""
    monkeypatch.setattr(uvicorn_server, "DATE_EVERY_S", 3600)
    keyless = {
        "host": "0.0.0.0",
        "auth": {"allow_unauthenticated": True},
    }  # so that metrics have a port of their own
    with run_fake(FakeEngine("a"), **keyless) as gateway, gateway.client() as client:
        assert client.get("/livez").headers["date"]
        assert gateway.metrics_url != gateway.url
    assert [server.is_serving() for server in gateway.server.servers] == [False]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway.metrics_url}/metrics")


def test_a_start_that_is_told_to_stop_stops_with_0_and_leaves_nothing() -> None:
    """Before the server takes signals itself; what was begun is ended by its contexts."""
    script = (
        "import contextlib, os, signal\n"
        "from baton.serve import stop_at_once\n"
        "signal.signal(signal.SIGTERM, stop_at_once)\n"
        "with contextlib.ExitStack() as started:\n"
        "    started.callback(print, 'ended')\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
