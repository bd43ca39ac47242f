"""What a fault comes to here and at vLLM's own server, in the same run: rows A1, A3, A6, A10, E1, E4, E6 and E7.

What Baton promises is asserted; what plain vLLM does is printed, for the table in docs/results/beside-plain-vllm.md.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from support.gateways import RealGateway
from support.raw_requests import address
from support.vllm_server import VllmServer
from support.watched_streams import Stream, cores, streaming, wait_for

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]
MIB = 2**20
STREAMS = 8
SETTINGS = {
    "BATON_SUPERVISION__HANG_S": "4",
    "BATON_SUPERVISION__BACKOFF_S": "0.5",
    "BATON_SUPERVISION__RESUME_S": "0",
}
KINDS = ("Baton", "plain vLLM")


def server_of(kind: str, folder: Path, **settings: str) -> RealGateway:
    if kind == "plain vLLM":
        return VllmServer(folder)
    store = {"BATON_HANDOFFS__STORE": f"file:{folder / 'handoffs'}"}
    return RealGateway(["--model", "smollm2"], folder, SETTINGS | store | settings)


@pytest.fixture(scope="module", params=KINDS)
def steady(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    """A server that nothing is done to which it should not stand."""
    with server_of(request.param, tmp_path_factory.mktemp("steady")) as server:
        server.wait_until_ready()
        yield server


def is_ours(server: RealGateway) -> bool:
    return not isinstance(server, VllmServer)


def name_of(server: RealGateway) -> str:
    return KINDS[0] if is_ours(server) else KINDS[1]


def outcomes(streams: list[Stream]) -> dict[str, int]:
    """How streams ended: with their answer, with an error event's code, cut off, or not at all."""
    found: dict[str, int] = {}
    for stream in streams:
        how = "hung" if stream.ended is None else stream.error or ended(stream)
        found[how] = found.get(how, 0) + 1
    return found


def ended(stream: Stream) -> str:
    if not stream.lines or stream.lines[-1].startswith("cut"):
        return "cut"
    if stream.lines[-1] != "data: [DONE]":
        return "stopped without a word"
    return "an error as data, then [DONE]" if '"error"' in stream.lines[-2] else "completed"


def answers(server: RealGateway) -> bool:
    """Whether it completes a prompt."""
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 1}
    try:
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def back_within(server: RealGateway, seconds: float) -> str:
    """What it came to: an answer again, an exit, or neither."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        if server.process.poll() is not None:
            return f"exited with code {server.process.returncode} after {time.monotonic() - began:.1f} s"
        if answers(server):
            return f"answers again after {time.monotonic() - began:.0f} s"
        time.sleep(0.2)
    return f"neither back nor ended after {seconds:.0f} s"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fault("A1")
def test_an_engine_that_is_killed_beside_plain_vllm(kind: str, tmp_path: Path) -> None:
    with server_of(kind, tmp_path) as server:
        server.wait_until_ready()
        with streaming(server.url, {"smollm2": STREAMS}) as streams:
            killed = time.monotonic()
            cores(server.process.pid)[0].kill()
            with contextlib.suppress(AssertionError):
                wait_for(lambda: all(stream.ended for stream in streams["smollm2"]), 20)
            told = outcomes(streams["smollm2"])
            last = max(stream.ended or killed for stream in streams["smollm2"]) - killed
        then = back_within(server, 90)
        print(f"A1: {kind}: streams ended {told} within {last * 1000:.0f} ms; {then}")
        if is_ours(server):
            assert told == {"engine_restarting": STREAMS}
            assert last < 1
            assert then.startswith("answers again")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fault("A3")
def test_an_engine_that_hangs_beside_plain_vllm(kind: str, tmp_path: Path) -> None:
    with server_of(kind, tmp_path) as server:
        server.wait_until_ready()
        front = psutil.Process(server.process.pid)
        with streaming(server.url, {"smollm2": STREAMS}) as streams:
            stopped = [process for process in front.children(recursive=True) if "VLLM" in process.name()]
            for process in stopped:
                process.suspend()
            began = time.monotonic()
            with contextlib.suppress(AssertionError):
                wait_for(lambda: all(stream.ended for stream in streams["smollm2"]), 60)
            found = time.monotonic() - began
            told = outcomes(streams["smollm2"])
            health = httpx.get(f"{server.url}/health", timeout=10).status_code
            then = back_within(server, 60)
        print(f"A3: {kind}: after {found:.1f} s {told}, /health {health}; {then}")
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        if is_ours(server):
            assert told == {"engine_restarting": STREAMS}
            assert then.startswith("answers again")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fault("A6")
def test_a_signal_under_load_beside_plain_vllm(kind: str, tmp_path: Path) -> None:
    """Streams that take longer than a drain may."""
    settings = {"BATON_DRAIN_DELAY_S": "1", "BATON_DRAIN_TIMEOUT_S": "5"}
    with server_of(kind, tmp_path, **settings) as server:
        server.wait_until_ready()
        with streaming(server.url, {"smollm2": STREAMS}) as streams:
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                wait_for(lambda: server.process.poll() is not None, 40)
            seconds = time.monotonic() - began
            time.sleep(1)
            told = outcomes(streams["smollm2"])
        code = server.process.poll()
        print(f"A6: {kind}: {told}, exit {code} after {seconds:.1f} s")
        if is_ours(server):
            assert code == 0
            assert set(told) <= {"completed", "shutting_down"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fault("A10")
def test_the_exit_code_of_a_lost_engine_beside_plain_vllm(kind: str, tmp_path: Path) -> None:
    with server_of(kind, tmp_path, BATON_SUPERVISION__RESTARTS="0") as server:
        server.wait_until_ready()
        cores(server.process.pid)[0].kill()
        code = server.process.wait(60)
        print(f"A10: {kind}: exit code {code}")
        if is_ours(server):
            assert code == 1


def running(server: RealGateway) -> float:
    """Requests in the engine, by vLLM's own count."""
    page = httpx.get(f"{server.url}/metrics", timeout=10).text
    return sum(float(value) for value in re.findall(r"^vllm:num_requests_running{[^}]*} (\S+)$", page, re.M))


@pytest.mark.fault("E1")
def test_clients_that_leave_midway_beside_plain_vllm(steady: RealGateway) -> None:
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    clients = 50
    before = len(steady.log.splitlines())
    with ThreadPoolExecutor(clients) as pool:

        def leave(_: int) -> None:
            with httpx.stream("POST", f"{steady.url}/v1/completions", json=body, timeout=60) as answer:
                lines = answer.iter_lines()
                for _number in range(6):
                    next(lines)

        list(pool.map(leave, range(clients)))
    free = wait_for(lambda: running(steady) == 0, 20)
    time.sleep(0.5)
    lines = len(steady.log.splitlines()) - before
    print(
        f"E1: {name_of(steady)}: {clients} clients left, engine empty {free * 1000:.0f} ms after the last, ",
        end="",
    )
    print(f"{lines} lines of log")
    if is_ours(steady):
        assert free < 1
        assert "Traceback" not in steady.log


@pytest.mark.fault("E4")
def test_half_sent_heads_beside_plain_vllm(steady: RealGateway) -> None:
    connections = [socket.create_connection(address(steady.url), timeout=10) for _ in range(200)]
    for connection in connections:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
    began = time.monotonic()
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not any(is_open(connection) for connection in connections), 15)
    left = sum(is_open(connection) for connection in connections)
    print(f"E4: {name_of(steady)}: {left} of {len(connections)} open after {time.monotonic() - began:.1f} s")
    for connection in connections:
        connection.close()
    if is_ours(steady):
        assert left == 0


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
FLOODS = {
    "E6": (GET + b"X-Bomb: ", b"b" * 65536, 200 * MIB),
    "E7": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n", 300 * MIB),
}


MOST = {"E6": 16, "E7": 96}
"""MiB: of a body, up to `limits.body_bytes` is held, and what the parser makes of it."""


@pytest.mark.parametrize("row", FLOODS)
def test_floods_of_headers_and_bodies_beside_plain_vllm(steady: RealGateway, row: str) -> None:
    """E6: one header without end; E7: a body without end."""
    start, piece, total = FLOODS[row]
    front = psutil.Process(steady.process.pid)
    before, peak, taken = front.memory_info().rss, 0, 0
    answer = b"nothing"
    with socket.create_connection(address(steady.url), timeout=20) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(start)
            while taken < total:
                connection.sendall(piece)
                taken += len(piece)
                peak = max(peak, front.memory_info().rss - before)
        connection.settimeout(2)
        with contextlib.suppress(OSError):
            answer = connection.recv(4096).split(b"\r\n")[0] or answer
    print(
        f"{row}: {name_of(steady)}: {taken / MIB:.0f} MiB taken, RSS {peak / MIB:+.0f} MiB, {answer.decode()}"
    )
    if is_ours(steady):
        assert peak < MOST[row] * MIB
        assert b" 431 " in answer or b" 413 " in answer
        assert answers(steady)
