"""Two gateways behind the shipped Envoy: one is killed, one drains, and Envoy itself is stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from support.envoy_proxy import BALANCED, ROOT, Envoy
from support.gateways import FakeProcess
from support.watched_streams import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]
WORDS = 60
STREAMS = 12
REQUESTS = 200
CLIENTS = 8
DRAIN = {"drain_delay_s": 5, "drain_timeout_s": 30}


class Events(threading.Thread):
    """One stream of a session.

    Attributes:
        lines: what came of it.
        lost: the error that ended it without its end.
    """

    def __init__(self, url: str, session: str) -> None:
        super().__init__(daemon=True)
        self._url, self._headers = url, {"x-session-id": session}
        self.lines: list[str] = []
        self.lost: httpx.HTTPError | None = None

    def run(self) -> None:
        body = {"model": "alpha", "prompt": "word " * WORDS, "max_tokens": WORDS, "stream": True}
        asked = httpx.stream(
            "POST", f"{self._url}/v1/completions", json=body, headers=self._headers, timeout=60
        )
        try:
            with asked as answer:
                self.lines += (line for line in answer.iter_lines() if line)
        except httpx.HTTPError as error:
            self.lost = error

    @property
    def whole(self) -> bool:
        return self.lost is None and self.lines[-1:] == ["data: [DONE]"]


@contextmanager
def two_gateways(folder: Path) -> Iterator[list[FakeProcess]]:
    with ExitStack() as stack:
        started = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            metrics = {"metrics": {"port": 0}}
            gateway = FakeProcess(folder / name, {"token_seconds": 0.1}, **DRAIN, **metrics)
            started.append(stack.enter_context(gateway))
        yield started


def behind_envoy(folder: Path, gateways: list[FakeProcess]) -> Envoy:
    return Envoy(folder, [int(gateway.url.rpartition(":")[2]) for gateway in gateways])


@contextmanager
def streams(url: str, gateways: list[FakeProcess]) -> Iterator[tuple[list[Events], list[int]]]:
    """Streams of many sessions, all under way, and how many of them run on each gateway."""
    started = [Events(url, f"session-{number}") for number in range(STREAMS)]
    for stream in started:
        stream.start()
    wait_for(lambda: sum(running(gateway) for gateway in gateways) == STREAMS, 20)
    time.sleep(1)  # events have come of all
    yield started, [running(gateway) for gateway in gateways]
    for stream in started:
        stream.join(30)
        assert not stream.is_alive()


def figure(gateway: FakeProcess, series: str) -> int:
    with gateway.client() as client:
        page = client.get("/metrics").text
    found = re.findall(rf"^{series} (\S+)$", page, re.MULTILINE)
    return int(sum(map(float, found)))


def running(gateway: FakeProcess) -> int:
    return figure(gateway, r'baton_http_requests_in_flight\{route="/v1/completions"\}')


def answered(gateway: FakeProcess) -> int:
    return figure(gateway, r'baton_http_requests_total\{[^}]*route="/v1/completions"\}')


def ask(url: str, count: int) -> Counter[object]:
    """Requests of several clients, each second one with a session: what each came to."""
    seen: Counter[object] = Counter()

    def one(number: int) -> None:
        headers = {"x-session-id": f"session-{number % 20}"} if number % 2 else {}
        body = {"model": "alpha", "prompt": "one two", "max_tokens": 2}
        try:
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30)
            seen[answer.status_code if answer.status_code == 200 else answer.text] += 1
        except httpx.HTTPError as error:
            seen[type(error).__name__] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, range(count)))
    return seen


def test_of_a_killed_gateway_only_what_ran_on_it_is_lost(tmp_path: Path) -> None:
    """Its streams end without an end, with no event of an error; no request after that fails."""
    with two_gateways(tmp_path) as gateways, behind_envoy(tmp_path, gateways) as proxy:
        with streams(proxy.url, gateways) as (started, on_each):
            assert min(on_each) > 0, on_each
            gateways[0].signal(signal.SIGKILL)
            # It dies a moment later, and what it has taken until then is lost too; then Envoy knows.
            wait_for(lambda: sum(not stream.is_alive() for stream in started) >= on_each[0], 10)
            seen = ask(proxy.url, REQUESTS)
        lost = [stream for stream in started if not stream.whole]
        print(f"streams on each: {on_each}, lost: {len(lost)}, requests after the kill: {dict(seen)}")
    assert set(seen) == {200}
    assert len(lost) == on_each[0]
    for stream in lost:
        assert isinstance(stream.lost, httpx.RemoteProtocolError)
        assert stream.lines
        assert not [line for line in stream.lines if line in ("event: error", "data: [DONE]")]


def test_a_draining_gateway_gets_nothing_new_and_finishes_its_streams(tmp_path: Path) -> None:
    with two_gateways(tmp_path) as gateways, behind_envoy(tmp_path, gateways) as proxy:
        with streams(proxy.url, gateways) as (started, on_each):
            assert min(on_each) > 0, on_each
            gateways[0].signal(signal.SIGTERM)
            noticed = wait_for(
                lambda: {proxy.healthy(name) for name in BALANCED} == {1}, DRAIN["drain_delay_s"]
            )
            before = [answered(gateway) for gateway in gateways]
            seen = ask(proxy.url, 40)
            got = [answered(gateway) - first for gateway, first in zip(gateways, before, strict=True)]
        code = gateways[0].process.wait(40)
    print(
        f"noticed after {noticed:.1f} s; streams on each: {on_each}; 40 requests went {got}; exit code {code}"
    )
    assert (set(seen), got) == ({200}, [0, 40])
    assert all(stream.whole for stream in started)
    assert code == 0


@pytest.mark.parametrize("drained", [False, True], ids=["SIGTERM alone", "drain.sh first"])
def test_envoy_is_stopped_without_a_cut_stream_by_its_script_alone(tmp_path: Path, drained: bool) -> None:
    """What a plain SIGTERM does is why there is a script."""
    script = str(ROOT / "deploy/envoy/drain.sh")
    with two_gateways(tmp_path) as gateways, behind_envoy(tmp_path, gateways) as proxy:
        with streams(proxy.url, gateways) as (started, _):
            if drained:
                with subprocess.Popen(["bash", script, str(proxy.admin), "40", "2"]) as draining:
                    wait_for(lambda: httpx.get(f"{proxy.url}/envoy/ready").status_code == 503, 5)
                    assert set(ask(proxy.url, 8)) == {200}  # who has not looked yet is still answered
                    wait_for(lambda: refused(proxy.url), 10)
                    assert not all(stream.whole for stream in started)
                assert draining.returncode == 0
            proxy.process.terminate()
            proxy.process.wait(20)
        assert [stream.whole for stream in started] == [drained] * STREAMS


def refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/envoy/ready", timeout=2)
    except httpx.ConnectError:
        return True
    except httpx.ReadError:  # its connection was waiting as Envoy ceased to listen
        pass
    return False
