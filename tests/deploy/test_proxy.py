"""The shipped nginx and Caddy files, in the real servers before a gateway; only ports, paths and names are other here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.certificates import trusting, write_certificate
from support.gateways import FakeGateway, Held, free_port, run_fake
from support.watched_streams import wait_for

from baton.admission.api_keys import create_key
from baton.config.settings import load_settings
from baton.engines.fake.engine import FakeBehaviour, FakeEngine

ROOT = Path(__file__).parents[2]
SHIPPED = {"nginx": ROOT / "deploy/proxy/nginx.conf", "caddy": ROOT / "deploy/proxy/Caddyfile"}
SETTINGS = load_settings(ROOT / "deploy/baton.toml")
NEED = os.environ.get("TESTS_NEED", "").split(",")
ASK = {"model": "alpha", "prompt": "one two three", "max_tokens": 3}


def binary_of(name: str) -> str:
    """The server of Debian's package; the test is skipped without it."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None and name not in NEED:
        pytest.skip(f"no {name}: Debian's package has it")
    assert found is not None
    return found


def nginx_command(folder: Path, port: int, upstream: str, files: tuple[Path, Path]) -> list[str]:
    text = SHIPPED["nginx"].read_text()
    for shipped, here in (
        ("server 127.0.0.1:8000;", f"server {upstream};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("server_name gw.example;", "server_name localhost 127.0.0.1;"),
        ("/etc/ssl/gw.example.crt", str(files[0])),
        ("/etc/ssl/gw.example.key", str(files[1])),
    ):
        assert shipped in text, shipped
        text = text.replace(shipped, here)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user}daemon off;\nworker_processes 1;\npid {folder}/pid;\nerror_log stderr;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}{text}\n}}\n"
    )
    return [binary_of("nginx"), "-p", str(folder), "-c", str(folder / "nginx.conf")]


def caddy_command(folder: Path, port: int, upstream: str, files: tuple[Path, Path]) -> list[str]:
    text = SHIPPED["caddy"].read_text()
    for shipped, here in (
        ("gw.example {\n", f"https://127.0.0.1:{port} {{\n\ttls {files[0]} {files[1]}\n"),
        ("reverse_proxy 127.0.0.1:8000 {", f"reverse_proxy {upstream.replace('unix:', 'unix/')} {{"),
    ):
        assert shipped in text, shipped
        text = text.replace(shipped, here)
    (folder / "Caddyfile").write_text(f"{{\n\tadmin off\n\tauto_https off\n}}\n{text}")
    return [binary_of("caddy"), "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


COMMANDS = {"nginx": nginx_command, "caddy": caddy_command}


class Proxy:
    """A proxy before a gateway.

    Args:
        name: `nginx` or `caddy`.
        upstream: where the gateway listens, as nginx writes it.
    """

    def __init__(self, name: str, folder: Path, upstream: str) -> None:
        port, files = free_port(), write_certificate(folder, "proxy")
        self.url, self.tls = f"https://127.0.0.1:{port}", trusting(files[0])
        self._log = folder / "log"
        self._command = COMMANDS[name](folder, port, upstream, files)
        self._environment = os.environ | {"XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}

    def __enter__(self) -> Proxy:
        with self._log.open("w") as stream:
            self._process = subprocess.Popen(
                self._command, stdout=stream, stderr=subprocess.STDOUT, env=self._environment
            )
        wait_for(self._listens, 20)
        return self

    def _listens(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            with self.client() as client:
                client.get("/livez")
        except httpx.ConnectError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=self.tls, timeout=30)


@pytest.fixture(scope="module")
def held() -> Held:
    return Held()


@pytest.fixture(scope="module")
def gateway(held: Held) -> Iterator[FakeGateway]:
    slow = FakeEngine("slow", behaviour=FakeBehaviour(token_seconds=1, wait=held))
    with run_fake(FakeEngine("alpha"), slow, edge={"keep_alive_s": 0.05}) as running:
        yield running
        held.release()


@pytest.fixture(scope="module", params=SHIPPED)
def proxy(
    request: pytest.FixtureRequest, gateway: FakeGateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp(request.param)
    with Proxy(request.param, folder, gateway.url.removeprefix("http://")) as running:
        yield running


def test_it_answers_over_https_and_shows_no_figures(proxy: Proxy) -> None:
    with proxy.client() as client:
        answer = client.post("/v1/completions", json=ASK, headers={"X-Request-Id": "mine-1"})
        assert (answer.status_code, answer.headers["x-client-request-id"]) == (200, "mine-1")
        assert client.get("/metrics").status_code == 404
        assert client.get("/v1/models").json()["data"][0]["id"] == "alpha"


def test_the_first_event_comes_while_the_engine_works_and_who_leaves_ends_it(
    proxy: Proxy, gateway: FakeGateway
) -> None:
    """The engine's clock stands still, and the comments arrive that the gateway sends meanwhile."""
    engine = gateway.engine("slow")
    body = ASK | {"model": "slow", "stream": True}
    with proxy.client() as client:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines) == ": keep-alive"
            assert engine.active == 1
        wait_for(lambda: engine.active == 0, 20)


def test_a_body_above_the_gateway_s_limit_gets_its_413_and_a_large_one_arrives(proxy: Proxy) -> None:
    limit = int(SETTINGS.limits.body_bytes)
    with proxy.client() as client:
        answer = client.post("/v1/completions", content=b"[" * (limit + 1))
        assert answer.status_code in (413, 502), "the proxy may see the end of the connection first"
        if answer.status_code == 413:
            assert answer.json()["error"]["code"] == "body_too_large"
        assert client.post("/v1/completions", json=ASK | {"user": "x" * (limit // 2)}).status_code == 200


def test_an_upload_is_handed_on_while_it_comes(proxy: Proxy, gateway: FakeGateway) -> None:
    """A body that the proxy held back would be limited by nobody who knows its route."""
    arrived, sent = threading.Event(), threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b'{"model": "alpha", '
        wait_for(lambda: b"baton_bodies" in metrics() and held_bytes() > 0, 20)
        arrived.set()
        yield b'"prompt": "one two three", "max_tokens": 3}'
        sent.set()

    def metrics() -> bytes:
        return httpx.get(f"{gateway.url}/metrics").content

    def held_bytes() -> float:
        found = re.findall(rb'baton_bodies_bytes\{[^}]*"memory"[^}]*\} ([0-9.e+]+)', metrics())
        return sum(map(float, found))

    with proxy.client() as client:
        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/completions", content=pieces(), headers=headers).status_code == 200
    assert arrived.is_set()
    assert sent.is_set()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_gateway_on_a_unix_socket_with_keys_is_shown_too(name: str, tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.json", "acme")
    auth = {"keys_file": tmp_path / "keys.json"}
    uds = tmp_path / "baton.sock"
    with (
        run_fake(FakeEngine("alpha"), uds=uds, auth=auth),
        Proxy(name, tmp_path, f"unix:{uds}") as proxy,
        proxy.client() as client,
    ):
        assert client.post("/v1/completions", json=ASK).status_code == 401
        known = {"Authorization": f"Bearer {key}"}
        assert client.post("/v1/completions", json=ASK, headers=known).status_code == 200


def test_nothing_is_cut_that_the_gateway_lets_live() -> None:
    text = SHIPPED["nginx"].read_text()
    seconds = dict(re.findall(r"^\s*(\w+) +(\d+)s;", text, re.MULTILINE))
    silence = SETTINGS.pooling.wait_s + SETTINGS.pooling.time_limit_s
    assert int(seconds["proxy_read_timeout"]) > max(silence, 4 * SETTINGS.edge.keep_alive_s)
    assert int(seconds["client_body_timeout"]) > SETTINGS.edge.body_s
    assert int(seconds["keepalive_timeout"]) < 5, "uvicorn's"
    assert "keepalive 3s" in SHIPPED["caddy"].read_text()
