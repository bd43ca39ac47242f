"""Nothing but the public health routes answers without a key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateways import FakeGateway, raw_status, run_fake

from baton.api.keys import create_key, keyring_for, read_keys, revoke_key
from baton.engines.fake import FakeEngine
from baton.errors import SettingsError
from baton.settings import load_settings

PUBLIC = {"/livez", "/readyz", "/health", "/version"}


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[tuple[FakeGateway, str]]:
    file = tmp_path / "keys.json"
    key = create_key(file, "acme")
    with run_fake(FakeEngine("a"), auth={"keys_file": file}) as gateway:
        yield gateway, key


BAD_HEADERS: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Basic {key}"},
    {"Authorization": "{key}"},
    {"Authorization": "Bearer {key}x"},
    {"X-Api-Key": "wrong"},
    {"Cookie": "key={key}"},
]


@pytest.mark.parametrize("headers", BAD_HEADERS)
def test_every_route_is_closed_without_a_valid_key(
    keyed: tuple[FakeGateway, str], headers: dict[str, str]
) -> None:
    gateway, key = keyed
    sent = {name: value.format(key=key) for name, value in headers.items()}
    paths = sorted({path for route in gateway.server._app.routes if (path := getattr(route, "path", None))})
    assert len(paths) > 12
    with gateway.client() as client:
        for path in paths:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "TRACE"):
                response = client.request(method, path, headers=sent, params={"api_key": key})
                if path not in PUBLIC:
                    assert response.status_code == 401, f"{method} {path} {sent}"


TRICKS = (
    "//v1/models",
    "/v1/../v1/models",
    "/%76%31/models",
    "/livez/../v1/models",
    "/livez/%2e%2e/v1/models",
    "/livez;/v1/models",
    "/LIVEZ",
    "/livez/",
    "/livez%00",
    "http://elsewhere/v1/models",
    "*",
)


@pytest.mark.parametrize("target", TRICKS)
def test_no_way_of_writing_an_address_gets_past_the_keys(keyed: tuple[FakeGateway, str], target: str) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS"):
        status = raw_status(keyed[0].url, method, target, {"X-Forwarded-Uri": "/livez", "Upgrade": "h2c"})
        assert status in (400, 401), f"{method} {target}"


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer {key}"}, {"x-api-key": "{key}"}])
def test_a_valid_key_opens(keyed: tuple[FakeGateway, str], headers: dict[str, str]) -> None:
    gateway, key = keyed
    sent = {name: value.format(key=key) for name, value in headers.items()}
    with gateway.client(headers=sent) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_the_refusal_says_how_a_key_is_sent_and_never_shows_one(keyed: tuple[FakeGateway, str]) -> None:
    gateway, _ = keyed
    response = httpx.get(f"{gateway.url}/v1/models", headers={"Authorization": "Bearer secret-word"})
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert "secret-word" not in response.text


def test_public_routes_answer_without_a_key(keyed: tuple[FakeGateway, str]) -> None:
    gateway, _ = keyed
    for path in PUBLIC:
        assert httpx.get(f"{gateway.url}{path}").status_code == 200


def test_a_network_address_without_keys_is_refused_unless_told_so() -> None:
    with pytest.raises(SettingsError, match=r"can be reached from other machines.*baton keys create"):
        keyring_for(load_settings(host="0.0.0.0"))
    assert keyring_for(load_settings(host="0.0.0.0", auth={"allow_unauthenticated": True})) is None


def test_a_keys_file_that_was_named_but_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not exist"):
        keyring_for(load_settings(auth={"keys_file": tmp_path / "nope.json"}))


def test_off_loopback_metrics_move_to_a_port_of_their_own() -> None:
    options = {"host": "0.0.0.0", "auth": {"allow_unauthenticated": True}, "metrics": {"port": 0}}
    with run_fake(FakeEngine("a"), **options) as gateway:
        main = gateway.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{main}/metrics").status_code == 404
        assert gateway.metrics_url.startswith("http://127.0.0.1:")
        assert "baton_engine_up" in httpx.get(f"{gateway.metrics_url}/metrics").text
        assert httpx.get(f"{gateway.metrics_url}/v1/models").status_code == 404


def test_a_gateway_whose_last_key_was_revoked_stays_closed(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    create_key(file, "acme")
    revoke_key(file, read_keys(file)[0].id)
    with run_fake(FakeEngine("a"), auth={"keys_file": file}) as gateway:
        assert httpx.get(f"{gateway.url}/v1/models").status_code == 401
        assert httpx.get(f"{gateway.url}/livez").status_code == 200
