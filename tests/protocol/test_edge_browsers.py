"""Web pages in a browser on the gateway's machine: they reach loopback, and are not to use a gateway without keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.gateways import FakeGateway, run_fake
from support.raw_requests import TEXT, address, answer_to, metric, request, statuses

from baton.admission.api_keys import create_key
from baton.config.settings import load_settings
from baton.engines.fake.engine import FakeEngine
from baton.errors import SettingsError

pytestmark = pytest.mark.fault("G9")

ROUTES = (
    "/v1/completions",
    "/v1/models",
    "/livez",
    "/readyz",
    "/version",
    "/metrics",
    "/openapi.json",
    "/docs",
)


@pytest.fixture(scope="module")
def keyless() -> Iterator[FakeGateway]:
    """A gateway without keys on loopback, as `make serve` starts it."""
    with run_fake(FakeEngine("a"), metrics={"port": 0}) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def named() -> Iterator[FakeGateway]:
    """The same behind a proxy, under names of its own."""
    edge = {"allowed_hosts": ["gw.example", "*.lab.example", "192.0.2.7"]}
    with run_fake(FakeEngine("a"), edge=edge) as gateway:
        yield gateway


def ask(gateway: FakeGateway, host: bytes, route: str = "/v1/completions", version: bytes = b"1.1") -> int:
    """The status of a request that names this host, `host` being the whole header line or nothing."""
    if route == "/v1/completions":
        sent = request(extra="Connection: close\r\n")
    else:
        sent = f"GET {route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    sent = sent.replace(b"Host: localhost\r\n", host, 1).replace(b"HTTP/1.1", b"HTTP/" + version, 1)
    (status,) = statuses(answer_to(gateway, sent))
    return status


OURS = (
    "localhost",
    "localhost:8000",
    "LocalHost:8000",
    "localhost.",
    "localhost.:8000",
    "localhost:",
    "127.0.0.1",
    "127.0.0.1:1",
    "127.8.9.10:8000",
    "[::1]",
    "[::1]:8000",
    "[0:0:0:0:0:0:0:1]:8000",
)
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "EVIL.EXAMPLE",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1.nip.io:8000",
    "evil-localhost",
    "localhost-evil.example",
    "evil.localhost",
    "localhost..",
    ".localhost",
    "*",
    "0.0.0.0:8000",
    "10.0.0.1",
    "[::]",
    "[::ffff:10.0.0.1]",
    "[::1",
    "::1",
    "[localhost]",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "localhost:80:80",
    "localhost:8000x",
    "localhost:-1",
    "localhost,evil.example",
    "localhost;evil.example",
    "gw.example",
    "",
)
REFUSED_AS_NO_HOST = (
    "localhost@evil.example",
    "evil.example@localhost",
    "localhost/evil",
    "localhost evil.example",
)


@pytest.mark.parametrize("host", OURS)
def test_a_keyless_gateway_answers_under_the_names_of_loopback(keyless: FakeGateway, host: str) -> None:
    assert ask(keyless, f"Host: {host}\r\n".encode()) == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_keyless_gateway_answers_under_no_other_name(keyless: FakeGateway, host: str) -> None:
    """A page makes its own name point to 127.0.0.1 and is then of the gateway's own origin (DNS rebinding)."""
    before = len(keyless.engine("a").bodies)
    line = f"Host: {host}\r\n".encode()
    let_in = [route for route in ROUTES if ask(keyless, line, route) != 421]
    assert let_in == []
    assert len(keyless.engine("a").bodies) == before
    print(f"G9: Host {host!r}: {len(ROUTES)} routes, let in 0")


@pytest.mark.parametrize("host", REFUSED_AS_NO_HOST)
def test_a_host_with_a_user_a_path_or_a_space_is_malformed(keyless: FakeGateway, host: str) -> None:
    assert ask(keyless, f"Host: {host}\r\n".encode()) == 400


@pytest.mark.parametrize(
    ("lines", "version", "status"),
    [
        (b"", b"1.1", 400),
        (b"", b"1.0", 421),
        (b"Host: localhost\r\n", b"1.0", 200),
        (b"Host: evil.example\r\n", b"1.0", 421),
        (b"Host: localhost\r\nHost: evil.example\r\n", b"1.1", 400),
        (b"Host: evil.example\r\nHost: localhost\r\n", b"1.0", 400),
        (b"Host: localhost\r\nHost: localhost\r\n", b"1.1", 400),
        (b"Host: evil.example\r\nX-Forwarded-Host: localhost\r\n", b"1.1", 421),
        (b"Host: evil.example\r\nForwarded: host=localhost\r\n", b"1.1", 421),
    ],
)
def test_one_host_is_named_and_no_other_header_stands_for_it(
    keyless: FakeGateway, lines: bytes, version: bytes, status: int
) -> None:
    assert ask(keyless, lines, version=version) == status


@pytest.mark.parametrize("host", ["localhost", "evil.example"])
def test_a_target_that_names_a_host_is_held_to_that_host(keyless: FakeGateway, host: str) -> None:
    for target, status in (("http://evil.example/v1/models", 421), ("http://localhost/v1/models", 200)):
        sent = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        assert statuses(answer_to(keyless, sent)) == [status]


def test_a_check_that_names_no_host_is_answered(keyless: FakeGateway) -> None:
    """Load balancers ask so; a browser always names the host, and HTTP/1.1 demands it."""
    for route, status in (("/livez", 200), ("/readyz", 200), ("/version", 200), ("/v1/models", 421)):
        assert statuses(answer_to(keyless, f"GET {route} HTTP/1.0\r\n\r\n".encode())) == [status]


def test_the_refusal_of_a_host_names_the_setting(keyless: FakeGateway) -> None:
    refused = httpx.post(f"{keyless.url}/v1/completions", json=TEXT, headers={"Host": "gw.example:8000"})
    assert refused.status_code == 421
    error = refused.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert "'gw.example:8000'" in error["message"]
    assert "edge.allowed_hosts" in error["message"]
    assert metric(keyless, 'baton_rejections_total{reason="host_not_allowed"}') > 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("gw.example", 200),
        ("GW.example.:443", 200),
        ("a.lab.example", 200),
        ("a.b.lab.example", 200),
        ("192.0.2.7:8000", 200),
        ("localhost", 200),
        ("lab.example", 421),
        ("evillab.example", 421),
        ("gw.example.evil.example", 421),
        ("other.example", 421),
    ],
)
def test_the_operator_names_further_hosts(named: FakeGateway, host: str, status: int) -> None:
    assert ask(named, f"Host: {host}\r\n".encode()) == status


def test_with_keys_any_host_is_answered_unless_hosts_are_named(tmp_path: Path) -> None:
    """A key is nothing a browser sends by itself; probes ask by an address that nobody knows beforehand."""
    key = create_key(tmp_path / "keys.json", "acme")
    keyed = {"auth": {"keys_file": tmp_path / "keys.json"}, "metrics": {"port": 0}}
    headers = {"Authorization": f"Bearer {key}", "Host": "gw.example"}
    with run_fake(FakeEngine("a"), **keyed) as gateway:
        assert httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code == 200
    with run_fake(FakeEngine("a"), **keyed, edge={"allowed_hosts": ["gw.example"]}) as gateway:
        assert httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code == 200
        other = headers | {"Host": "evil.example"}
        assert httpx.get(f"{gateway.url}/v1/models", headers=other).status_code == 421
        assert httpx.get(f"{gateway.url}/readyz", headers={"Host": "10.1.2.3:8000"}).status_code == 200


def test_a_network_address_is_answered_under_any_host_unless_hosts_are_named() -> None:
    open_to_all = {"host": "0.0.0.0", "auth": {"allow_unauthenticated": True}, "metrics": {"port": 0}}
    with run_fake(FakeEngine("a"), **open_to_all) as gateway:
        assert ask(gateway, b"Host: gw.example\r\n") == 200
        page = f"{gateway.metrics_url}/metrics"
        assert httpx.get(page, headers={"Host": "localhost"}).status_code == 200
        assert httpx.get(page, headers={"Host": "evil.example"}).status_code == 421
    scraped = {"metrics": {"host": "0.0.0.0", "port": 0}}
    with run_fake(
        FakeEngine("a"), **open_to_all | scraped, edge={"allowed_hosts": ["gw.example"]}
    ) as gateway:
        page = f"{gateway.metrics_url.replace('0.0.0.0', '127.0.0.1')}/metrics"
        assert httpx.get(page, headers={"Host": "10.1.2.3:8001"}).status_code == 200
        assert ask(gateway, b"Host: gw.example\r\n") == 200
        assert ask(gateway, b"Host: evil.example\r\n") == 421
        assert ask(gateway, b"Host: 10.1.2.3:8000\r\n", "/livez") == 200


OTHER_SITES = (
    {"Origin": "https://evil.example"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "file://"},
    {"Origin": "chrome-extension://abcdef"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "http://localhost"},
    {"Origin": "http://127.0.0.2:{port}"},
    {"Origin": "http://{here}.evil.example"},
    {"Origin": "http://{here}@evil.example"},
    {"Origin": "http://evil.example/http://{here}"},
    {"Origin": "http://{here} http://evil.example"},
    {"Origin": "{here}"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Origin": "http://{here}", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "https://evil.example", "Sec-Fetch-Site": "same-origin"},
)
OWN_PAGES: tuple[dict[str, str], ...] = (
    {},
    {"Origin": "http://{here}"},
    {"Origin": "http://{here}", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
)
CHANGES = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/handoffs"),
    ("PATCH", "/v1/handoffs/a"),
    ("DELETE", "/v1/handoffs/a"),
    ("PUT", "/v1/models"),
    ("BREW", "/v1/models"),
)


def filled(gateway: FakeGateway, headers: dict[str, str]) -> dict[str, str]:
    host, port = address(gateway.url)
    return {name: value.format(here=f"{host}:{port}", port=port) for name, value in headers.items()}


@pytest.mark.parametrize("headers", OTHER_SITES, ids=str)
def test_another_sites_page_changes_nothing_on_a_keyless_gateway(
    keyless: FakeGateway, headers: dict[str, str]
) -> None:
    before = len(keyless.engine("a").bodies)
    with keyless.client(headers=filled(keyless, headers)) as client:
        for method, path in CHANGES:
            refused = client.request(method, path, json=TEXT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed"), path
        assert client.get("/v1/models").status_code == 200  # without CORS the page cannot read it
    assert len(keyless.engine("a").bodies) == before
    print(f"G9: {headers}: {len(CHANGES)} requests, let in 0")


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_form_of_another_site_changes_nothing(keyless: FakeGateway, media_type: str) -> None:
    """A browser sends these without asking first; the body may well be JSON."""
    before = len(keyless.engine("a").bodies)
    content = b'{"model": "a", "prompt": "one two", "max_tokens": 4}'
    for origin, status in (("https://evil.example", 403), ("null", 403), (None, 415)):
        headers = {"Content-Type": media_type} | ({"Origin": origin} if origin else {})
        sent = httpx.post(f"{keyless.url}/v1/completions", content=content, headers=headers)
        assert sent.status_code == status
    assert len(keyless.engine("a").bodies) == before


@pytest.mark.parametrize("headers", OWN_PAGES, ids=str)
def test_the_gateways_own_page_and_plain_clients_are_served(
    keyless: FakeGateway, headers: dict[str, str]
) -> None:
    sent = filled(keyless, headers)
    assert httpx.post(f"{keyless.url}/v1/completions", json=TEXT, headers=sent).status_code == 200


def test_a_page_of_a_host_that_the_operator_named_is_the_gateways_own(named: FakeGateway) -> None:
    """A proxy may name the gateway by its address, while the browser knows the proxy's name."""
    sent = {"Origin": "https://gw.example", "Sec-Fetch-Site": "same-origin"}
    assert httpx.post(f"{named.url}/v1/completions", json=TEXT, headers=sent).status_code == 200
    sent = {"Origin": "https://gw.example.evil.example"}
    assert httpx.post(f"{named.url}/v1/completions", json=TEXT, headers=sent).status_code == 403


def test_with_keys_the_key_decides_and_not_the_origin(tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.json", "acme")
    auth = {"keys_file": tmp_path / "keys.json"}
    with run_fake(FakeEngine("a"), auth=auth, metrics={"port": 0}) as gateway:
        headers = {"Origin": "https://app.example", "Authorization": f"Bearer {key}"}
        assert httpx.post(f"{gateway.url}/v1/completions", json=TEXT, headers=headers).status_code == 200


PAGE = "https://app.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}


@pytest.mark.parametrize("keyed", [False, True])
def test_a_page_that_the_operator_named_asks_and_reads(tmp_path: Path, keyed: bool) -> None:
    key = create_key(tmp_path / "keys.json", "acme") if keyed else ""
    auth = {"keys_file": tmp_path / "keys.json"} if keyed else {}
    edge = {"allowed_origins": [PAGE, "app://localhost"]}
    with run_fake(
        FakeEngine("a", supports_handoffs=True), auth=auth, edge=edge, metrics={"port": 0}
    ) as gateway:
        with gateway.client() as client:
            asked = client.options("/v1/completions", headers=PREFLIGHT)
            allowed = asked.headers
            assert (asked.status_code, allowed["access-control-allow-origin"]) == (200, PAGE)
            assert "authorization" in allowed["access-control-allow-headers"]
            assert "POST" in allowed["access-control-allow-methods"]
            assert "access-control-allow-credentials" not in allowed, "no cookies"
        sent = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"} | (
            {"Authorization": f"Bearer {key}"} if keyed else {}
        )
        with gateway.client(headers=sent) as client:
            for body in (
                TEXT,
                TEXT | {"stream": True},
                TEXT | {"handoff": {"save": True}},
                {"model": "nobody"},
            ):
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == (404 if body == {"model": "nobody"} else 200)
                assert answer.headers["access-control-allow-origin"] == PAGE
                assert "X-Handoff-Id" in answer.headers["access-control-expose-headers"]
            assert (
                client.post("/v1/completions", json=TEXT, headers={"Origin": "app://localhost"}).status_code
                == 200
            )
        if keyed:
            refused = httpx.post(f"{gateway.url}/v1/completions", json=TEXT, headers={"Origin": PAGE})
            assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_every_other_page_is_refused_as_before() -> None:
    with run_fake(FakeEngine("a"), edge={"allowed_origins": [PAGE]}, metrics={"port": 0}) as gateway:
        for origin in (
            "https://app.example.evil.example",
            "http://app.example",
            "https://app.example:8443",
            "null",
        ):
            with gateway.client(headers={"Origin": origin}) as client:
                assert client.post("/v1/completions", json=TEXT).status_code == 403, origin
                read = client.get("/v1/models")
                assert "access-control-allow-origin" not in read.headers, origin
                asked = client.options("/v1/completions", headers=PREFLIGHT | {"Origin": origin})
                assert "access-control-allow-origin" not in asked.headers, origin
        twice = [("Origin", PAGE), ("Origin", "https://evil.example")]
        assert httpx.post(f"{gateway.url}/v1/completions", json=TEXT, headers=twice).status_code == 403


def test_the_operator_says_what_such_a_page_may_send() -> None:
    edge = {
        "allowed_origins": [PAGE],
        "allowed_methods": ["GET"],
        "allowed_headers": ["X-Trace"],
        "allow_credentials": True,
    }
    with run_fake(FakeEngine("a"), edge=edge, metrics={"port": 0}) as gateway, gateway.client() as client:
        trace = PREFLIGHT | {
            "Access-Control-Request-Method": "GET",
            "Access-Control-Request-Headers": "X-Trace",
        }
        asked = client.options("/v1/models", headers=trace)
        assert (asked.status_code, asked.headers["access-control-allow-methods"]) == (200, "GET")
        assert asked.headers["access-control-allow-credentials"] == "true"
        assert client.options("/v1/completions", headers=PREFLIGHT).status_code == 400, "not by POST"
        other = trace | {"Access-Control-Request-Headers": "X-Other"}
        assert client.options("/v1/models", headers=other).status_code == 400


def test_cookies_are_for_named_origins() -> None:
    with pytest.raises(SettingsError, match="edge: allow_credentials: name the origins"):
        load_settings(edge={"allowed_origins": ["*"], "allow_credentials": True})


def test_any_page_at_all_needs_keys(tmp_path: Path) -> None:
    with (
        pytest.raises(SettingsError, match="needs API keys"),
        run_fake(FakeEngine("a"), edge={"allowed_origins": ["*"]}),
    ):
        pass
    create_key(tmp_path / "keys.json", "acme")
    auth, edge = {"keys_file": tmp_path / "keys.json"}, {"allowed_origins": ["*"]}
    with (
        run_fake(FakeEngine("a"), auth=auth, edge=edge, metrics={"port": 0}) as gateway,
        gateway.client() as client,
    ):
        asked = client.options("/v1/models", headers=PREFLIGHT)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize(
    "origin", ["https://App.example", "https://app.example:443", "http://app.example:80", "null"]
)
def test_an_origin_that_no_browser_sends_is_no_setting(origin: str) -> None:
    with pytest.raises(SettingsError, match="allowed_origins"):
        load_settings(edge={"allowed_origins": [origin]})


def test_a_preflight_whose_head_can_be_read_in_two_ways_is_refused() -> None:
    """It is answered before keys and hosts are looked at, and not before that: a proxy may read it the other way."""
    with run_fake(FakeEngine("a"), edge={"allowed_origins": [PAGE]}, metrics={"port": 0}) as gateway:
        asked = "".join(f"{name}: {value}\r\n" for name, value in PREFLIGHT.items())
        head = f"OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{asked}"
        odd = head + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        assert statuses(answer_to(gateway, odd.encode())) == [400]
        assert statuses(answer_to(gateway, f"{head}\r\n".encode())) == [200]
