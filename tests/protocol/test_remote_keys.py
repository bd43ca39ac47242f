"""Whose key another server is sent, over which connection, and how tenants stay apart there."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.responses import JSONResponse
from support.gateways import run_fake
from support.raw_requests import wait_for
from support.remote_gateways import CARD, OtherServer, complete, other_server, remote, run_near, settings_of

from baton.admission.api_keys import create_key
from baton.engines.elsewhere.client import RemoteClient
from baton.engines.elsewhere.keys import RemoteKeys
from baton.engines.fake.engine import FakeEngine
from baton.errors import SettingsError, StartError


@pytest.fixture
def server() -> Iterator[OtherServer]:
    with other_server() as running:
        yield running


def keyed(folder: Path, *tenants: str) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Settings with keys, and each tenant's header."""
    folder.mkdir(exist_ok=True)
    file = folder / "keys.json"
    headers = {tenant: {"Authorization": f"Bearer {create_key(file, tenant)}"} for tenant in tenants}
    return {"auth": {"keys_file": file}}, headers


def test_the_key_of_the_file_is_sent_and_read_again(server: OtherServer, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(" first-key\n")
    theirs = {"Authorization": "Bearer of-the-client"}
    near = remote(server.url, remote={"key_file": file, "probe_s": 0.1})
    with run_near(near) as gateway, gateway.client(headers=theirs) as client:
        assert complete(client).status_code == 200
        assert server.asked[-1].headers["authorization"] == "Bearer first-key"
        assert server.looks[0].headers["authorization"] == "Bearer first-key"
        file.write_text("second-key")
        wait_for(lambda: server.looks[-1].headers["authorization"].endswith("second-key"), "it was read")
        file.unlink()
        seen = len(server.looks)
        wait_for(lambda: len(server.looks) > seen + 1, "it was looked at again")
        complete(client)
        assert server.asked[-1].headers["authorization"] == "Bearer second-key"


@pytest.mark.parametrize("content", [b"", b"two words", b"a\nb", b"\xff\xfe", "schlüssel".encode()])
def test_a_file_without_a_key_is_refused_at_the_start(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"engines 'near': remote\.key_file: "):
        RemoteKeys(settings_of("http://a", remote={"key_file": file}))
    with pytest.raises(SettingsError, match="No such file"):
        RemoteKeys(settings_of("http://a", remote={"keys_dir": tmp_path / "none"}))


def test_tenants_may_have_keys_of_their_own(server: OtherServer, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    (folder / "..data").mkdir(parents=True)
    (folder / "acme").write_text("of-acme")
    (folder / ".hidden").write_text("two words")
    (tmp_path / "common").write_text("of-all")
    settings, headers = keyed(tmp_path / "own", "acme", "beta")
    near = remote(server.url, tenants=True, remote={"keys_dir": folder, "key_file": tmp_path / "common"})
    with run_near(near, **settings) as gateway, gateway.client() as client:
        client.post("/v1/completions", json={"model": "near", "prompt": "a"}, headers=headers["acme"])
        acme = server.asked[-1]
        client.post("/v1/completions", json={"model": "near", "prompt": "a"}, headers=headers["beta"])
        beta = server.asked[-1]
    assert (acme.headers["authorization"], beta.headers["authorization"]) == (
        "Bearer of-acme",
        "Bearer of-all",
    )
    assert ("x-baton-handoff" in acme.headers, "cache_salt" in acme.body) == (False, False)
    assert beta.headers["x-baton-handoff"] == "off"


@pytest.mark.fault("I6")
def test_tenants_of_one_key_have_prefix_caches_of_their_own_in_vllm(
    server: OtherServer, tmp_path: Path
) -> None:
    settings, headers = keyed(tmp_path, "acme", "beta")
    with run_near(remote(server.url, tenants=True), **settings) as gateway, gateway.client() as client:
        for tenant in ("acme", "acme", "beta"):
            client.post("/v1/completions", json={"model": "near", "prompt": "a"}, headers=headers[tenant])
    first, again, other = (asked.body["cache_salt"] for asked in server.asked)
    assert first == again != other
    assert "acme" not in first


def test_other_servers_get_no_field_that_they_may_not_know(server: OtherServer, tmp_path: Path) -> None:
    server.models = lambda: JSONResponse({"object": "list", "data": [CARD | {"owned_by": "somebody"}]})
    settings, headers = keyed(tmp_path, "acme")
    with run_near(remote(server.url, tenants=True), **settings) as gateway, gateway.client() as client:
        client.post("/v1/completions", json={"model": "near", "prompt": "a"}, headers=headers["acme"])
    assert server.asked[-1].body == {"model": "far", "prompt": "a"}


@pytest.mark.fault("I6")
def test_the_tenant_whose_key_it_is_keeps_its_automatic_handoffs(tmp_path: Path) -> None:
    there, theirs = keyed(tmp_path / "there", "acme")
    here, ours = keyed(tmp_path / "here", "acme", "beta")
    (tmp_path / "key").write_text(theirs["acme"]["Authorization"].removeprefix("Bearer "))
    far = FakeEngine("far", supports_handoffs=True)
    modes = {"engines": ({"name": "far", "model": "fake", "handoff": True},)}
    store = {"handoffs": {"store": f"file:{tmp_path / 'store'}", "auto_min_tokens": 32}}
    with run_fake(far, **there, **modes, **store) as other:
        near = remote(other.url, tenants=True, remote={"key_file": tmp_path / "key"})
        with run_near(near, **here) as gateway, gateway.client() as client:
            body = {"model": "near", "prompt": [7] * 100, "max_tokens": 40, "prompt_cache_key": "k"}
            client.post("/v1/completions", json=body, headers=ours["beta"])
            assert not far.transfers, "another tenant's context is not kept under acme's name"
            client.post("/v1/completions", json=body, headers=ours["acme"])
            assert len(far.transfers) == 1


@pytest.mark.fault("I5")
def test_a_key_that_is_refused_ends_the_start(tmp_path: Path) -> None:
    there, _ = keyed(tmp_path, "acme")
    with run_fake(FakeEngine("far"), **there) as other, pytest.raises(StartError) as raised:
        start(remote(other.url))
    assert "refuses the key" in raised.value.message


def start(engine: Any) -> None:
    import asyncio

    async def begin() -> None:
        try:
            await engine.start(lambda _phase: None)
        finally:
            await engine.stop()

    asyncio.run(begin())


# TLS


def certificate(
    name: str, issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None = None
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    by, signer = (issuer[0].subject, issuer[1]) if issuer is not None else (subject, key)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if issuer is not None:
        names = (
            [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            if name == "right"
            else [x509.DNSName("other.example")]
        )
        built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
    else:
        usage = dict.fromkeys(
            (
                "digital_signature",
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
            ),
            False,
        )
        built = built.add_extension(
            x509.KeyUsage(
                **usage, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False
            ),
            critical=True,
        )
    return built.sign(signer, hashes.SHA256()), key


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `ca.pem`, another authority's, and certificates of a right and a wrong name."""
    folder = tmp_path_factory.mktemp("tls")
    ours, other = certificate("our authority"), certificate("another authority")
    for name, issuer in (("right", ours), ("wrong", ours)):
        made, key = certificate(name, issuer)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        (folder / f"{name}.key").write_bytes(private)
    (folder / "ca.pem").write_bytes(ours[0].public_bytes(serialization.Encoding.PEM))
    (folder / "another.pem").write_bytes(other[0].public_bytes(serialization.Encoding.PEM))
    return folder


def tls_gateway(folder: Path, name: str, **more: Any) -> Any:
    files = {"ssl_certfile": str(folder / f"{name}.pem"), "ssl_keyfile": str(folder / f"{name}.key")}
    return other_server(**files)


def test_a_server_with_a_certificate_of_a_private_authority_is_trusted_by_its_file(authorities: Path) -> None:
    with tls_gateway(authorities, "right") as server:
        near = remote(server.url, remote={"ca_file": authorities / "ca.pem"})
        with run_near(near) as gateway, gateway.client() as client:
            assert complete(client).json()["choices"][0]["text"] == "hello"
            assert server.url.startswith("https://")


@pytest.mark.fault("I5")
@pytest.mark.parametrize(
    ("served", "trusted"), [("right", "another.pem"), ("wrong", "ca.pem"), ("right", None)]
)
def test_a_server_that_is_not_who_it_should_be_gets_nothing(
    authorities: Path, served: str, trusted: str | None, tmp_path: Path
) -> None:
    """Another authority's certificate, another name's, and one that no public authority knows."""
    (tmp_path / "key").write_text("secret-key")
    with tls_gateway(authorities, served) as server:
        trust = {"ca_file": authorities / trusted} if trusted is not None else {}
        near = remote(server.url, remote={"key_file": tmp_path / "key", **trust})
        with run_near(near) as gateway, gateway.client() as client:
            assert gateway.fleet.states["near"].value == "unreachable"
            assert complete(client).status_code == 503
            assert not server.looks + server.asked


def test_a_file_without_certificates_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_text("nothing")
    for name in ("none.pem", "missing.pem"):
        with pytest.raises(SettingsError, match=r"remote\.ca_file: "):
            remote("https://127.0.0.1:1", remote={"ca_file": tmp_path / name})


def test_a_key_in_clear_is_warned_of(tmp_path: Path) -> None:
    from structlog.testing import capture_logs

    from baton.config.settings import load_settings
    from baton.engines.elsewhere.engine import build_remote_engines

    (tmp_path / "key").write_text("k")
    urls = ("http://127.0.0.1:1", "http://10.0.0.1:1", "https://10.0.0.1:1")
    engines = tuple(
        settings_of(url, f"e{index}", remote={"key_file": tmp_path / "key"}) for index, url in enumerate(urls)
    )
    with capture_logs() as logs:
        built = build_remote_engines(load_settings(engines=engines), tenants=False)
    assert len(built) == 3
    assert [(each["event"], each["engine"]) for each in logs] == [("remote_key_in_clear", "e1")]


@pytest.mark.fault("I13")
async def test_a_second_answer_over_tls_is_not_the_answer_to_the_next_request(authorities: Path) -> None:
    """It waits in records that nobody has decrypted, where no look at the socket finds it."""
    made = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                if head.split()[1] == b"/twice":
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret")

    secured = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    secured.load_cert_chain(authorities / "right.pem", authorities / "right.key")
    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=secured)
    url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = RemoteClient(settings_of(url, remote={"ca_file": authorities / "ca.pem"}))
    try:
        for path in ("/twice", "/whole", "/whole", "/twice", "/whole"):
            assert await (await client.ask("GET", path, {})).read(100) == b"ok"
        assert made == 3
    finally:
        await client.close()
        listening.close()
