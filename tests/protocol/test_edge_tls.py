"""A gateway that speaks HTTPS, listens on a Unix socket, or is shown under a path by a proxy."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.certificates import trusting, write_certificate
from support.gateways import FakeGateway, raw_status, run_fake
from support.raw_requests import TEXT, address, request, rest_of
from support.table_tests import each

from baton.admission.api_keys import create_key
from baton.config.groups import TlsSettings
from baton.config.settings import load_settings
from baton.doctor.machine import where_clients_come_in
from baton.engines.fake.engine import FakeEngine
from baton.errors import SettingsError, StartError
from baton.http.uvicorn_server import Certificate
from baton.serve import listen_for_clients, welcome


def common_name(gateway: FakeGateway, *trusted: Path) -> str:
    """The name on the certificate that a new connection is shown."""
    tls = trusting(*trusted)
    with (
        socket.create_connection(address(gateway.url), timeout=10) as plain,
        tls.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        found: Any = connection.getpeercert()
        return str(dict(pair for part in found["subject"] for pair in part)["commonName"])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_certificate(tmp_path, "first", under="tls")


@pytest.fixture
def secure(files: tuple[Path, Path]) -> Iterator[FakeGateway]:
    with run_fake(FakeEngine("a"), tls={"cert_file": files[0], "key_file": files[1]}) as gateway:
        yield gateway


def test_https_answers_and_streams_to_who_trusts_the_certificate(
    secure: FakeGateway, files: tuple[Path, Path]
) -> None:
    assert secure.url.startswith("https://")
    assert secure.server.url == secure.url
    with secure.client(verify=trusting(files[0])) as client:
        assert client.post("/v1/completions", json=TEXT).status_code == 200
        with client.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as answer:
            assert list(answer.iter_lines())[-2:] == ["data: [DONE]", ""]
    with secure.client() as stranger, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        stranger.get("/livez")


def test_plain_http_on_the_port_of_tls_gets_no_answer(secure: FakeGateway) -> None:
    with socket.create_connection(address(secure.url), timeout=10) as connection:
        connection.sendall(request())
        assert b"HTTP/" not in rest_of(connection)


def test_a_request_that_is_no_http_is_answered_over_tls_and_the_connection_ends(
    secure: FakeGateway, files: tuple[Path, Path]
) -> None:
    """TLS has no half-closed connection, by which plain HTTP ends after such an answer."""
    with (
        socket.create_connection(address(secure.url), timeout=10) as plain,
        trusting(files[0]).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(b"nonsense\r\n\r\n")
        answer = rest_of(connection)
        assert answer.startswith(b"HTTP/1.1 400 "), answer


@pytest.mark.fault("H8")
def test_a_renewed_certificate_is_shown_to_the_next_client(
    secure: FakeGateway, files: tuple[Path, Path], tmp_path: Path
) -> None:
    first = tmp_path / "first.crt"
    first.write_bytes(files[0].read_bytes())
    with secure.client(verify=trusting(first)) as client:
        assert client.get("/livez").status_code == 200
        write_certificate(tmp_path, "second", under="tls")
        assert common_name(secure, files[0]) == "second"
        assert client.get("/livez").status_code == 200, "the old connection lives on"


@pytest.mark.fault("H8")
def test_the_last_good_certificate_stays_while_the_files_are_wrong(
    secure: FakeGateway, files: tuple[Path, Path], tmp_path: Path
) -> None:
    first = tmp_path / "first.crt"
    first.write_bytes(files[0].read_bytes())
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[: len(whole) // 2])
    assert common_name(secure, first) == "first"
    files[0].unlink()
    assert common_name(secure, first) == "first"
    write_certificate(tmp_path, "third", under="tls")
    assert common_name(secure, files[0]) == "third"


def answered(gateway: FakeGateway, trusted: Path, shown: tuple[Path, Path] | None) -> bool:
    """Whether a client that shows this certificate gets an answer."""
    with gateway.client(verify=trusting(trusted, shown=shown)) as client:
        try:
            return client.get("/livez").status_code == 200
        except httpx.TransportError:
            return False


def test_clients_show_a_certificate_where_the_settings_ask_for_one(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    mine, other = write_certificate(tmp_path, "mine"), write_certificate(tmp_path, "other")
    trusted = tmp_path / "clients.crt"
    tls = {"cert_file": files[0], "key_file": files[1], "ca_file": trusted, "client_certs": "required"}
    trusted.write_bytes(mine[0].read_bytes())
    with run_fake(FakeEngine("a"), tls=tls) as gateway:
        assert answered(gateway, files[0], mine)
        assert not answered(gateway, files[0], None)
        assert not answered(gateway, files[0], other)
        trusted.write_bytes(other[0].read_bytes())
        assert answered(gateway, files[0], other), "read again too"
        assert not answered(gateway, files[0], mine)


def settings_of(folder: Path, **given: Any) -> TlsSettings:
    cert, key = write_certificate(folder, "right")
    return TlsSettings(**({"cert_file": cert, "key_file": key} | given))


WRONG = {
    "no such file": (
        {"cert_file": "{folder}/none.crt"},
        "tls.cert_file: {folder}/none.crt: No such file or directory",
    ),
    "no such key": (
        {"key_file": "{folder}/none.key"},
        "tls.key_file: {folder}/none.key: No such file or directory",
    ),
    "a key of another": (
        {"key_file": "{folder}/other.key"},
        "tls.cert_file: {folder}/right.crt: `tls.key_file` is the key of another certificate",
    ),
    "no PEM": ({"cert_file": "{folder}/text"}, "tls.cert_file: {folder}/text: no certificate and key as PEM"),
    "no authorities": (
        {"ca_file": "{folder}/text", "client_certs": "required"},
        "tls.ca_file: {folder}/text: no certificate",
    ),
    "no cipher": ({"ciphers": "none-such"}, "tls.ciphers: none-such: OpenSSL knows none of them"),
}


@each("name", WRONG)
@pytest.mark.fault("H8")
def test_a_wrong_file_is_one_line_at_the_start(name: str, tmp_path: Path) -> None:
    given, told = WRONG[name]
    write_certificate(tmp_path, "other")
    (tmp_path / "text").write_text("no certificate")
    changed = {key: value.format(folder=tmp_path) for key, value in given.items()}
    with pytest.raises(SettingsError) as caught:
        Certificate(settings_of(tmp_path, **changed))
    assert caught.value.message.startswith(told.format(folder=tmp_path)), caught.value.message
    assert "\n" not in caught.value.message


@each(
    "given", ({"key_file": "x"}, {"client_certs": "required"}, {"cert_file": "x", "client_certs": "optional"})
)
def test_what_needs_another_setting_says_so(given: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"tls: (cert|ca)_file: give the certificate"):
        load_settings(tls=given)


def test_the_doctor_looks_at_the_certificate_and_the_folder_of_the_socket(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    right: dict[str, Any] = {"cert_file": files[0], "key_file": files[1]}
    for given, told in (
        ({"tls": right}, ""),
        ({"tls": right | {"cert_file": tmp_path / "none"}}, "none: No such file"),
        ({"uds": tmp_path / "baton.sock"}, ""),
        ({"uds": tmp_path / "nowhere/baton.sock"}, "there is no folder"),
    ):
        bad = [finding for finding in where_clients_come_in(load_settings(port=0, **given)) if finding.bad]
        assert (told in bad[0].text and bad[0].mend) if told else bad == []


# A Unix socket


def test_a_unix_socket_answers_without_keys_and_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "baton.sock"
    with run_fake(FakeEngine("a"), uds=path, host="0.0.0.0") as gateway:
        assert gateway.url == "http://localhost"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url=gateway.url) as client:
            assert client.post("/v1/completions", json=TEXT).status_code == 200
            assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 421
        with (
            pytest.raises(StartError, match=r"another process listens there"),
            run_fake(FakeEngine("a"), uds=path),
        ):
            pass
        assert path.exists(), "it is the other gateway's"
    assert not path.exists()


def test_the_socket_of_a_killed_gateway_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    left, text = tmp_path / "left.sock", tmp_path / "text"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left))
    with listen_for_clients(load_settings(uds=left)) as listener:
        assert listener.getsockname() == str(left)
    text.write_text("mine")
    with (
        pytest.raises(StartError, match="there is a file that is no socket"),
        listen_for_clients(load_settings(uds=text)),
    ):
        pass
    assert text.read_text() == "mine"


def test_a_unix_socket_and_tls_together_are_refused() -> None:
    with pytest.raises(SettingsError, match="uds: leave `tls` out"):
        load_settings(uds="/tmp/x", tls={"cert_file": "x"})
    with pytest.raises(SettingsError, match="uds: the path of a Unix socket has at most 107 bytes"):
        load_settings(uds="/tmp/" + "x" * 103)


def test_the_start_says_how_to_ask_over_a_unix_socket() -> None:
    text = welcome("http://localhost", "http://localhost", (), keyed=False, uds=Path("/run/b.sock"))
    assert "the Unix socket /run/b.sock" in text
    assert "curl --unix-socket /run/b.sock http://localhost/v1/models" in text


# The path under which a proxy shows the gateway


@each("path", ("/llm/ai", ""))
def test_a_proxy_may_leave_the_path_in_place_or_take_it_away(path: str) -> None:
    with (
        run_fake(FakeEngine("a", supports_handoffs=True), root_path="/llm/ai") as gateway,
        gateway.client() as client,
    ):
        assert client.post(f"{path}/v1/completions", json=TEXT).status_code == 200
        assert client.get(f"{path}/livez").status_code == 200
        made = client.post(f"{path}/v1/handoffs", json={"model": "a", "prompt": "one two three"})
        assert made.headers["location"] == f"/llm/ai/v1/handoffs/{made.json()['id']}"
        assert client.get(f"{path}/openapi.json").json()["servers"] == [{"url": "/llm/ai"}]
        assert client.get("/llm/aim/v1/models").status_code == 404
        metrics = client.get(f"{path}/metrics").text
    assert 'route="/v1/completions"' in metrics, "counted as the route that it is"
    assert "/llm" not in metrics


@each("target", ("/llm/v1/completions", "/llm//v1/completions", "/llm/livez/../v1/completions"))
def test_who_must_show_a_key_must_under_the_path_too(target: str, tmp_path: Path) -> None:
    create_key(tmp_path / "keys.json", "acme")
    auth = {"keys_file": tmp_path / "keys.json"}
    with run_fake(FakeEngine("a"), root_path="/llm", auth=auth) as gateway:
        assert raw_status(gateway.url, "POST", target) == 401
        assert raw_status(gateway.url, "GET", "/llm/livez") == 200
