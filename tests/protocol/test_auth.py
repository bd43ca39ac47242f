"""Row G1: nothing but the public health routes answers without a key."""

from __future__ import annotations

import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import structlog
from support.gateways import FakeGateway, raw_status, run_fake
from support.raw_requests import wait_for

from baton.admission import api_keys
from baton.admission.api_keys import create_key, keyring_for, read_keys, revoke_key
from baton.config.settings import load_settings
from baton.engines.fake.engine import FakeEngine
from baton.errors import SettingsError
from baton.http.routes.page import page_files
from baton.telemetry.logs import configure_logs

PUBLIC = {"/livez", "/readyz", "/health", "/version"} | set(page_files())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def keyed(folder: Path) -> Iterator[tuple[FakeGateway, str]]:
    """A gateway, and a key of it; another was revoked."""
    file = folder / "keys.json"
    (folder / "revoked").write_text(create_key(file, "acme"))
    revoke_key(file, read_keys(file)[0].id)
    key = create_key(file, "acme")
    with run_fake(FakeEngine("a"), auth={"keys_file": file}) as gateway:
        yield gateway, key


CREDENTIALS: dict[str, list[tuple[str, str]]] = {
    "none": [],
    "an empty header": [("Authorization", "")],
    "a scheme alone": [("Authorization", "Bearer")],
    "a wrong key": [("Authorization", "Bearer wrong")],
    "a revoked key": [("Authorization", "Bearer {revoked}")],
    "a forged key": [("Authorization", "Bearer bt_" + "A" * 43)],
    "another scheme": [("Authorization", "Basic {key}")],
    "a scheme's name twice": [("Authorization", "Bearer Bearer {key}")],
    "a key alone": [("Authorization", "{key}")],
    "a colon": [("Authorization", "Bearer: {key}")],
    "a tab": [("Authorization", "Bearer\t{key}")],
    "no space": [("Authorization", "Bearer{key}")],
    "two keys": [("Authorization", "Bearer {key},{key}")],
    "half a key": [("Authorization", "Bearer {half}")],
    "a key and more": [("Authorization", "Bearer {key}x")],
    "a key in capitals": [("Authorization", "Bearer {capitals}")],
    "a digest of a key": [("Authorization", "Bearer {digest}")],
    "a wrong key before a right one": [("Authorization", "Bearer wrong"), ("Authorization", "Bearer {key}")],
    "a wrong x-api-key": [("X-Api-Key", "wrong")],
    "a cookie": [("Cookie", "key={key}; Authorization=Bearer {key}")],
    "a proxy's header": [("Proxy-Authorization", "Bearer {key}"), ("X-Forwarded-User", "acme")],
    "a host": [("Host", "localhost"), ("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-Host", "127.0.0.1")],
    "another address": [
        ("X-Original-URL", "/livez"),
        ("X-Rewrite-URL", "/livez"),
        ("X-Forwarded-Uri", "/livez"),
    ],
    "another method": [("X-HTTP-Method-Override", "OPTIONS"), ("Access-Control-Request-Method", "GET")],
    "an upgrade": [("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Origin", "null")],
}
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND", "BREW")


def paths_of(gateway: FakeGateway) -> list[str]:
    """Every path there is, with something in place of its parameters."""
    found = {path for route in gateway.app.routes if (path := getattr(route, "path", None))}
    return sorted(re.sub(r"\{[^}]*\}", "a", path) for path in found)


@pytest.mark.parametrize("name", CREDENTIALS)
@pytest.mark.fault("G1")
def test_every_route_is_closed_without_a_valid_key(
    keyed: tuple[FakeGateway, str], folder: Path, name: str
) -> None:
    gateway, key = keyed
    words = {
        "key": key,
        "revoked": (folder / "revoked").read_text(),
        "half": key[:20],
        "capitals": key.upper(),
        "digest": read_keys(folder / "keys.json")[0].sha256,
    }
    sent = [(header, value.format(**words)) for header, value in CREDENTIALS[name]]
    paths = paths_of(gateway)
    assert len(paths) > 20
    with gateway.client() as client:
        for path in paths:
            for method in METHODS:
                query = {"api_key": key, "key": key}
                status = client.request(method, path, headers=sent, params=query).status_code
                reads = method in ("GET", "HEAD")
                allowed = {401} if path not in PUBLIC else {200, 405} if reads else {405}
                assert status in allowed, f"{method} {path}"
    assert gateway.engine("a").bodies == []  # this test comes before any that is let in
    print(f"G1: {name}: {len(paths)} routes x {len(METHODS)} methods, let in 0")


TRICKS = (
    "//v1/models",
    "/v1//models",
    "/v1/models/",
    "/./v1/models",
    "/v1/../v1/models",
    "/%76%31/models",
    "/v1%2fmodels",
    "/livez/../v1/models",
    "/livez/%2e%2e/v1/models",
    "/livez%2f..%2fv1%2fmodels",
    "/livez/%252e%252e/v1/models",
    "/livez;/v1/models",
    "/livez#/v1/models",
    "/livez\\..\\v1\\models",
    "/v1/models#/livez",
    "/v1/models?/livez",
    "/LIVEZ",
    "/livez/",
    "/livez%00",
    "/livez%20",
    "/livez%0d%0a",
    "//livez",
    "http://elsewhere/v1/models",
    "http://elsewhere//livez",
    "http://elsewhere/livez/../v1/models",
    "http://elsewhere@127.0.0.1/livez",
    "http:///livez",
    "*",
)


@pytest.mark.parametrize("target", TRICKS)
@pytest.mark.fault("G1")
def test_no_spelling_of_a_path_bypasses_the_keys(keyed: tuple[FakeGateway, str], target: str) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS", "CONNECT", "get", "BREW"):
        status = raw_status(keyed[0].url, method, target, {"X-Forwarded-Uri": "/livez", "Upgrade": "h2c"})
        assert status in (400, 401), f"{method} {target}"


@pytest.mark.parametrize(
    "host", ["", "localhost", "evil.example", "127.0.0.1:1", "[::1]", "a b", "/livez", "x" * 5000]
)
@pytest.mark.fault("G1")
def test_no_host_header_bypasses_the_keys(keyed: tuple[FakeGateway, str], host: str) -> None:
    where = urlsplit(keyed[0].url)
    with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
        request = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode())
        assert int(connection.recv(65536).split()[1]) in (400, 401)


@pytest.mark.parametrize("value", ["Bearer {key}", "bearer {key}", "BEARER   {key}"])
@pytest.mark.fault("G1")
def test_the_case_and_spaces_of_bearer_do_not_matter(keyed: tuple[FakeGateway, str], value: str) -> None:
    """RFC 9110, section 11.1: a scheme is case-insensitive, and one or more spaces follow it."""
    gateway, key = keyed
    with gateway.client(headers={"Authorization": value.format(key=key)}) as client:
        assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer {key}"}, {"x-api-key": "{key}"}])
@pytest.mark.fault("G1")
def test_a_valid_key_is_accepted(keyed: tuple[FakeGateway, str], headers: dict[str, str]) -> None:
    gateway, key = keyed
    sent = {name: value.format(key=key) for name, value in headers.items()}
    with gateway.client(headers=sent) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.fault("G1")
def test_the_refusal_says_how_a_key_is_sent_and_never_shows_one(keyed: tuple[FakeGateway, str]) -> None:
    gateway, _ = keyed
    response = httpx.get(f"{gateway.url}/v1/models", headers={"Authorization": "Bearer secret-word"})
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert "secret-word" not in response.text


@pytest.mark.fault("G1")
def test_public_routes_and_the_files_of_the_page_answer_without_a_key(keyed: tuple[FakeGateway, str]) -> None:
    gateway, _ = keyed
    for path in PUBLIC:
        assert httpx.get(f"{gateway.url}{path}").status_code == 200


@pytest.mark.fault("G1")
def test_a_network_address_without_keys_needs_the_setting_for_it() -> None:
    with pytest.raises(SettingsError, match=r"can be reached from other machines.*baton keys create"):
        keyring_for(load_settings(host="0.0.0.0"))
    assert keyring_for(load_settings(host="0.0.0.0", auth={"allow_unauthenticated": True})) is None


@pytest.mark.fault("G1")
def test_a_configured_keys_file_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not exist"):
        keyring_for(load_settings(auth={"keys_file": tmp_path / "nope.json"}))


@pytest.mark.fault("G1")
def test_off_loopback_metrics_move_to_a_port_of_their_own() -> None:
    options = {"host": "0.0.0.0", "auth": {"allow_unauthenticated": True}, "metrics": {"port": 0}}
    with run_fake(FakeEngine("a"), **options) as gateway:
        main = gateway.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{main}/metrics").status_code == 404
        assert gateway.metrics_url.startswith("http://127.0.0.1:")
        assert "baton_engine_up" in httpx.get(f"{gateway.metrics_url}/metrics").text
        assert httpx.get(f"{gateway.metrics_url}/v1/models").status_code == 404


def test_tenants_are_told_apart_and_see_only_themselves(tmp_path: Path) -> None:
    """The operator's port shows every tenant; on the port that tenants reach there is no page of metrics."""
    file = tmp_path / "keys.json"
    keys = {tenant: create_key(file, tenant) for tenant in ("acme", "globex")}
    sent = {"model": "a", "prompt": "The sea is", "max_tokens": 4}
    with run_fake(FakeEngine("a"), auth={"keys_file": file}) as gateway:
        for key in (*keys.values(), "bt_wrong"):
            httpx.post(f"{gateway.url}/v1/completions", json=sent, headers={"x-api-key": key})
        everything = httpx.get(f"{gateway.metrics_url}/metrics").text
        theirs = httpx.get(f"{gateway.url}/metrics", headers={"x-api-key": keys["acme"]})
        assert httpx.get(f"{gateway.url}/metrics").status_code == 401
        assert gateway.metrics_url.startswith("http://127.0.0.1:")
        assert gateway.metrics_url != gateway.url
    for tenant in keys:
        assert f'baton_tenant_requests_total{{code_class="2xx",tenant="{tenant}"}} 1.0' in everything
        assert f'baton_tenant_tokens_total{{kind="generated",tenant="{tenant}"}} 4.0' in everything
    assert 'baton_tenant_requests_total{code_class="4xx",tenant="none"} 1.0' in everything
    assert (theirs.status_code, theirs.json()["error"]["code"]) == (404, "not_found")
    assert 'baton_tenant_tokens_total{kind="prompt",tenant="acme"} 3.0' in everything
    assert 'tenant="local"' not in everything


def test_whoever_has_no_key_is_logged_and_counted_as_no_tenant(
    keyed: tuple[FakeGateway, str], tmp_path: Path
) -> None:
    """Not as `local`, whose requests are those of a gateway without keys."""
    gateway, key = keyed
    before, written = structlog.get_config(), io.StringIO()
    configure_logs("debug", "json", written)
    try:
        for path in ("/v1/models", "/livez", "/version", "/nowhere"):
            httpx.get(f"{gateway.url}{path}", headers={"Authorization": "Bearer wrong"})
        raw_status(gateway.url, "GET", "/version", {"X": "y" * 70_000})
        httpx.get(f"{gateway.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    finally:
        structlog.configure(**before)
    lines = [line for line in map(json.loads, written.getvalue().splitlines()) if line["event"] == "request"]
    assert [line.get("tenant") for line in lines] == [None] * 5 + ["acme"]
    assert 'tenant="local"' not in httpx.get(f"{gateway.metrics_url}/metrics").text
    assert 'tenant="none"' in httpx.get(f"{gateway.metrics_url}/metrics").text


def test_without_keys_everyone_is_the_local_tenant() -> None:
    with run_fake(FakeEngine("a")) as gateway:
        httpx.get(f"{gateway.url}/v1/models")
        page = httpx.get(f"{gateway.metrics_url}/metrics").text
    assert 'baton_tenant_requests_total{code_class="2xx",tenant="local"} 1.0' in page


@pytest.mark.fault("G2")
def test_every_wrong_key_gets_the_same_answer(keyed: tuple[FakeGateway, str], folder: Path) -> None:
    gateway, key = keyed
    revoked = (folder / "revoked").read_text()
    answers = set()
    for wrong in ("wrong", revoked, key[:20], key + "x", key.upper(), "bt_" + "A" * 43, "x" * 5000):
        refused = httpx.get(f"{gateway.url}/v1/models", headers={"Authorization": f"Bearer {wrong}"})
        same = refused.text.replace(refused.headers.pop("x-request-id"), "ID")
        refused.headers.pop("date")
        answers.add((refused.status_code, same, str(refused.headers)))
    assert len(answers) == 1
    assert next(iter(answers))[0] == 401


@pytest.mark.fault("G1")
def test_a_gateway_whose_last_key_was_revoked_stays_closed(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    create_key(file, "acme")
    revoke_key(file, read_keys(file)[0].id)
    with run_fake(FakeEngine("a"), auth={"keys_file": file}) as gateway:
        assert httpx.get(f"{gateway.url}/v1/models").status_code == 401
        assert httpx.get(f"{gateway.url}/livez").status_code == 200


@pytest.mark.fault("G3")
def test_keys_change_under_load_without_a_server_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revoked key stops working at the next look into the file, the other works all the time."""
    assert api_keys.LOOK_EVERY_S < 2, "two seconds are promised"
    monkeypatch.setattr(api_keys, "LOOK_EVERY_S", 0.2)
    file = tmp_path / "keys.json"
    leaving, staying = create_key(file, "acme"), create_key(file, "globex")
    statuses: dict[str, list[int]] = {leaving: [], staying: []}
    over = threading.Event()

    def ask(url: str, key: str) -> None:
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}) as client:
            while not over.is_set():
                body = {"model": "a", "prompt": "one", "max_tokens": 1}
                statuses[key].append(client.post("/v1/completions", json=body).status_code)

    with run_fake(FakeEngine("a"), auth={"keys_file": file}) as gateway:
        asking = [threading.Thread(target=ask, args=(gateway.url, key)) for key in statuses for _ in range(4)]
        for thread in asking:
            thread.start()
        wait_for(lambda: min(map(len, statuses.values())) > 50, "hardly anyone was answered")
        revoke_key(file, read_keys(file)[0].id)
        effective = wait_for(lambda: statuses[leaving][-1] == 401, "the key still works")
        fresh = create_key(file, "initech")
        headers = {"Authorization": f"Bearer {fresh}"}
        wait_for(
            lambda: httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code == 200, "it is unknown"
        )
        over.set()
        for thread in asking:
            thread.join()
    print(
        f"G3: revoked within {effective:.2f} s, {sum(map(len, statuses.values()))} requests meanwhile, 0 5xx"
    )
    assert set(statuses[staying]) == {200}
    assert set(statuses[leaving]) == {200, 401}
