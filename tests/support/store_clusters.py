"""A real cluster of three Valkey servers, a primary with a replica that Sentinel watches, and TLS before a server."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import valkey
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support.gateways import free_port
from support.shared_stores import BINARIES, StoreServer, store_server

SLOTS = 16384
NODES = 3
SERVICE = "kv"


@contextmanager
def store_cluster(name: str, folder: Path) -> Iterator[list[StoreServer]]:
    """Start a cluster of three primaries; a server's `url` names the cluster."""
    with ExitStack() as stack:
        servers = []
        for number in range(NODES):
            place = folder / f"node-{number}"
            place.mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
            servers.append(stack.enter_context(store_server(name, place, *options, port=_cluster_port())))
        for number, server in enumerate(servers):
            first, last = SLOTS * number // NODES, SLOTS * (number + 1) // NODES - 1
            server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            server.url = server.url.replace("valkey://", "valkey+cluster://").removesuffix("/0")
            if number:
                port = servers[0].client.connection_pool.connection_kwargs["port"]
                server.client.execute_command("CLUSTER", "MEET", "127.0.0.1", port)
        _wait(lambda: all(_is_whole(server) for server in servers))
        yield servers


@contextmanager
def store_with_sentinel(name: str, folder: Path) -> Iterator[tuple[str, list[StoreServer]]]:
    """Start a primary, its replica, and a sentinel; yields the address and both servers, the primary first."""
    with ExitStack() as stack:
        (folder / "a").mkdir()
        (folder / "b").mkdir()
        at_once = ("--repl-diskless-sync-delay", "0")  # else it waits five seconds for further replicas
        primary = stack.enter_context(store_server(name, folder / "a", *at_once))
        port = primary.client.connection_pool.connection_kwargs["port"]
        replica = stack.enter_context(
            store_server(name, folder / "b", "--replicaof", f"127.0.0.1 {port}", *at_once)
        )
        _wait(lambda: replica.client.info("replication")["master_link_status"] == "up")
        sentinel = stack.enter_context(_sentinel(name, folder, port))
        yield f"valkey+sentinel://127.0.0.1:{sentinel}/{SERVICE}", [primary, replica]


@contextmanager
def _sentinel(name: str, folder: Path, primary: int) -> Iterator[int]:
    port, binary = free_port(), BINARIES[name]
    assert binary is not None
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor {SERVICE} 127.0.0.1 {primary} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} 500\nsentinel failover-timeout {SERVICE} 2000\n"
    )
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen([binary, str(config), "--sentinel"], stdout=nowhere, stderr=nowhere)
    try:
        with valkey.Valkey(port=port, socket_timeout=2) as client:
            _wait(lambda: client.ping())
            for period in ("INFO-PERIOD", "PING-PERIOD", "ASK-PERIOD", "PUBLISH-PERIOD"):
                client.execute_command(
                    "SENTINEL", "DEBUG", period, 100
                )  # ms; it looks every ten seconds else
            _wait(lambda: client.sentinel_slaves(SERVICE) != [])
        yield port
    finally:
        process.kill()
        process.wait()


def tls_context(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Make a certificate for 127.0.0.1 that signs itself; returns a server's context, and the file to trust."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the store of the test")])
    now = datetime.datetime.now(datetime.UTC)
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(host, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    trusted, private = folder / "certificate.pem", folder / "key.pem"
    trusted.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trusted, private)
    return context, trusted


def _cluster_port() -> int:
    """Return a free port whose bus port, 10,000 above, can exist."""
    while (port := free_port()) > 55_000:
        pass
    return port


def _is_whole(server: StoreServer) -> bool:
    found = server.client.execute_command("CLUSTER", "INFO")
    told = found if isinstance(found, dict) else dict(line.split(":") for line in found.decode().split())
    return told["cluster_state"] == "ok" and int(told["cluster_known_nodes"]) == NODES


def _wait(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(valkey.exceptions.ValkeyError):
            if ready():
                return
        time.sleep(0.05)
    raise AssertionError("the servers did not come together")
