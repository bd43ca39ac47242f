"""What signals and a bad network do to the gateway that answers for an engine, which is a process of its own."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.gateways import FakeGateway, FakeProcess, free_port
from support.paused_process import halt
from support.raw_requests import metric, wait_for
from support.remote_gateways import complete, remote, run_near
from support.tcp_proxy import tcp_proxy

from baton.engines.backend import EngineState
from baton.engines.elsewhere import server as probe
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton_client import Baton

TOKEN_S = 0.05
STREAMS = 16
LIMITS = {"connect_s": 5, "answer_s": 30, "silence_s": 30, "probe_s": 0.2, "failures": 2}
IMPATIENT = LIMITS | {"connect_s": 0.5, "answer_s": 1.5, "silence_s": 1.0}


def far(folder: Path, **more: Any) -> FakeProcess:
    settings = {"responses": {"budget": 0}, "metrics": {"port": 0}} | more
    return FakeProcess(folder, {"token_seconds": TOKEN_S}, **settings)


@contextmanager
def near(url: str, limits: dict[str, float] = LIMITS) -> Iterator[FakeGateway]:
    """A gateway with an engine of its own, and one that `url` answers for."""
    own = FakeEngine("own", behaviour=FakeBehaviour(token_seconds=TOKEN_S))
    with run_near(remote(url, model="alpha", remote=limits), own) as gateway:
        yield gateway


class Streams:
    """Streams of 40 tokens at once, and what came of each."""

    def __init__(self, gateway: FakeGateway, model: str, count: int) -> None:
        self._gateway = gateway
        self._model = model
        self.texts: list[str] = []
        self.ends: list[float] = []
        self.begun = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._stream) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _stream(self) -> None:
        body = {"model": self._model, "prompt": "one two", "max_tokens": 40, "stream": True}
        with self._gateway.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            text = ""
            for part in answer.iter_text():
                if not text:
                    self.begun.release()
                text += part
        self.texts.append(text)
        self.ends.append(time.monotonic())

    def wait_begun(self) -> None:
        for _ in self._threads:
            assert self.begun.acquire(timeout=30)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)


def failure_of(text: str) -> dict[str, Any]:
    """The error of a stream that ends with one event of an error, and has no other."""
    events = [event for event in text.split("\n\n") if event]
    assert [event.startswith("event: error\n") for event in events] == [False] * (len(events) - 1) + [True]
    assert "[DONE]" not in text
    error: dict[str, Any] = json.loads(events[-1].partition("\ndata: ")[2])["error"]
    return error


@pytest.mark.fault("I1")
def test_a_gateway_that_is_killed_in_streams(tmp_path: Path) -> None:
    """Its streams end with one error each, those of the engine here go on; started again, it is used again."""
    port = free_port()
    with far(tmp_path, port=port) as there, near(there.url) as gateway:
        theirs, ours = Streams(gateway, "near", STREAMS), Streams(gateway, "own", 4)
        theirs.wait_begun()
        ours.wait_begun()
        there.signal(signal.SIGKILL)
        killed = time.monotonic()
        theirs.join()
        assert len(theirs.texts) == STREAMS
        assert {failure_of(text)["code"] for text in theirs.texts} == {"remote_lost"}
        assert max(theirs.ends) - killed < LIMITS["silence_s"] / 2
        ours.join()
        assert [text.count("data: ") for text in ours.texts] == [41] * 4
        wait_for(lambda: gateway.fleet.states["near"] is EngineState.UNREACHABLE, "it was missed")
        (engine,) = (each for each in gateway.fleet.engines if each.name == "near")
        assert engine.active == 0
        with far(tmp_path, port=port), gateway.client() as client:
            wait_for(lambda: gateway.fleet.whole, "it was found")
            assert complete(client).status_code == 200


@pytest.mark.fault("I2")
def test_a_gateway_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its streams end by `silence_s`, its requests by `answer_s`, later ones at once; woken, it is used again."""
    monkeypatch.setattr(probe, "ANSWER_S", 0.5)
    with far(tmp_path) as there, near(there.url, IMPATIENT) as gateway, gateway.client() as client:
        theirs = Streams(gateway, "near", STREAMS)
        theirs.wait_begun()
        halt(there.process.pid)
        hung = time.monotonic()
        try:
            answer = complete(client)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "remote_timeout")
            theirs.join()
            assert {failure_of(text)["code"] for text in theirs.texts} == {"remote_timeout"}
            assert max(theirs.ends) - hung < 20
            wait_for(lambda: gateway.fleet.states["near"] is EngineState.UNREACHABLE, "it was found out", 40)
            refused = complete(client)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
            assert refused.headers["Retry-After"]
            assert complete(client, model="own").status_code == 200
        finally:
            there.signal(signal.SIGCONT)
        wait_for(lambda: gateway.fleet.whole, "it was found")
        assert complete(client).status_code == 200


@pytest.mark.fault("I3")
def test_a_slow_network_loses_nothing(tmp_path: Path) -> None:
    """Events come as late as the network is, whole and in order, and the server stays in use."""
    with far(tmp_path) as there, tcp_proxy(urlsplit(there.url).port or 0) as proxy:
        proxy.delay_s = 0.2
        with near(f"http://127.0.0.1:{proxy.port}") as gateway:
            theirs = Streams(gateway, "near", 4)
            theirs.join()
            said = [
                "".join(
                    json.loads(line[6:])["choices"][0]["text"]
                    for line in text.splitlines()
                    if '"text"' in line
                )
                for text in theirs.texts
            ]
            assert said == [" ".join(["one two"] * 20)] * 4
            assert gateway.fleet.states["near"] is EngineState.READY


@pytest.mark.fault("I4")
def test_a_network_that_is_cut_and_back_opens_and_closes_the_breaker(tmp_path: Path) -> None:
    """While it is cut, requests fail, then at once; half of a stream ends with an error event."""
    with far(tmp_path) as there, tcp_proxy(urlsplit(there.url).port or 0) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        with near(url) as gateway, gateway.client() as client:
            theirs = Streams(gateway, "near", 4)
            theirs.wait_begun()
            proxy.cut = True  # connections end with their next piece
            theirs.join()
            assert {failure_of(text)["code"] for text in theirs.texts} == {"remote_lost"}
            refusals = [complete(client)]
            while gateway.fleet.states["near"] is EngineState.READY:
                refusals.append(complete(client))
            refusals.append(complete(client))
            codes = [each.json()["error"]["code"] for each in refusals]
            assert set(codes[:-1]) <= {"remote_lost", "remote_unreachable", "engine_unavailable"}
            assert codes[-1] == "engine_unavailable"
            assert all(each.headers["Retry-After"] for each in refusals if each.status_code == 503)
            proxy.cut = False
            wait_for(lambda: gateway.fleet.whole, "it was found")
            assert complete(client).status_code == 200


@pytest.mark.fault("I4")
def test_our_client_sends_again_what_a_cut_network_lost(tmp_path: Path) -> None:
    """The gateway itself sends nothing twice; its answer says that the client may."""
    with far(tmp_path) as there, tcp_proxy(urlsplit(there.url).port or 0) as proxy:
        limits = LIMITS | {"failures": 1000}
        with run_near(remote(f"http://127.0.0.1:{proxy.port}", model="alpha", remote=limits)) as gateway:
            proxy.cut = True
            outcome = 'baton_remote_requests_total{{engine="near",outcome="{}"}}'

            def mend() -> None:
                wait_for(lambda: metric(gateway, outcome.format("failed")) == 1, "nothing was lost")
                proxy.cut = False

            back = threading.Thread(target=mend)
            back.start()
            with Baton(gateway.url) as baton:
                assert baton.chat("near", "one two", max_tokens=2).text
            back.join()
            assert metric(gateway, outcome.format("failed")) == 1
            assert metric(gateway, outcome.format("answered")) == 1
