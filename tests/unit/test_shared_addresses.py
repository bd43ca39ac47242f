"""The shared store as a cluster, behind Sentinel, and behind TLS: the same as one server, and back after a failure."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.shared_stores import BINARIES, ENGINE, machine, servers, store_server
from support.store_clusters import store_cluster, store_with_sentinel, tls_context
from support.tcp_proxy import tcp_proxy

from baton.admission import breaker
from baton.errors import HandoffStoreUnavailable, SettingsError
from baton.library.handoff import Handoff
from baton.library.library import Library
from baton.library.valkey.connection import ValkeyAddress, open_client


async def reaches(handoffs: Library, record: Handoff, within_s: float) -> Handoff:
    """Look a handoff up until the store answers again."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await handoffs.get(record.id, record.tenant)
        except HandoffStoreUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("name", servers)
async def test_handoffs_go_through_a_cluster_and_leave_nothing_in_it(name: str, tmp_path: Path) -> None:
    with store_cluster(name, tmp_path) as nodes:
        one, two = machine(tmp_path / "one", nodes[0].url), machine(tmp_path / "two", nodes[2].url)
        first = await one.leave(blocks=600)
        second = await one.leave(blocks=700, after=first)
        found = await two.handoffs.get(second.id, "local")
        await two.handoffs.fetch_here(found, ENGINE)
        assert two.read(found.key) == one.read(second.key)
        assert two.read(found.key, 0) == one.read(first.key)
        others = [await one.leave() for _ in range(10)]  # by chance all of few are on one node
        held = [node.client.dbsize() for node in nodes]
        assert sum(count > 0 for count in held) > 1  # files are spread over the nodes
        await two.handoffs.delete(found)
        for each in (first, *others):
            await one.handoffs.delete(each)
        assert [list(node.client.scan_iter("baton:f:*")) for node in nodes] == [[], [], []]
        assert one.pool.files.total() == 0


@pytest.mark.fault("C13")
async def test_a_node_of_a_cluster_that_hangs_is_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "REST_S", 0.2)
    if BINARIES["valkey"] is None:
        pytest.skip("no valkey-server is installed")
    with store_cluster("valkey", tmp_path) as nodes:
        one = machine(tmp_path / "one", nodes[0].url)
        two = machine(tmp_path / "two", nodes[1].url, shared_timeout_s=0.5)
        record = await one.leave()
        name = one.pool.connection.own_key("r")
        owner = open_client(ValkeyAddress(nodes[0].url, "baton", b"")).get_node_from_key(name).port
        holder = next(node for node in nodes if urlsplit(node.url).port == owner)
        with holder.stopped():
            began = time.monotonic()
            with pytest.raises(HandoffStoreUnavailable):
                await two.handoffs.get(record.id, "local")
            assert (
                time.monotonic() - began < 20
            )  # its own deadline, and a look at each node: not until it goes on
        assert (await reaches(two.handoffs, record, 20)).id == record.id


@pytest.mark.fault("C13")
@pytest.mark.parametrize("name", servers)
async def test_the_replica_goes_on_when_sentinel_has_replaced_the_primary(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "REST_S", 0.2)
    with store_with_sentinel(name, tmp_path) as (url, (primary, replica)):
        one, two = machine(tmp_path / "one", url), machine(tmp_path / "two", url)
        record = await one.leave(blocks=600)
        offset = primary.client.info("replication")["master_repl_offset"]
        while replica.client.info("replication")["slave_repl_offset"] < offset:
            time.sleep(0.02)  # noqa: ASYNC251  # nothing else runs here
        primary.kill()
        found = await reaches(two.handoffs, record, 30)
        await two.handoffs.fetch_here(found, ENGINE)
        assert two.read(found.key) == one.read(record.key)
        assert (await one.leave()).on_disk  # and it takes new ones


async def test_tls_is_verified_with_the_given_certificate(tmp_path: Path) -> None:
    if BINARIES["valkey"] is None:
        pytest.skip("no valkey-server is installed")
    context, trusted = tls_context(tmp_path)
    password = tmp_path / "password"
    password.write_text("a password\n")
    with (
        store_server("valkey", tmp_path, "--requirepass", "a password") as server,
        tcp_proxy(urlsplit(server.url).port or 0, context) as proxy,
    ):
        url = f"valkeys://127.0.0.1:{proxy.port}/0"
        settings = {"shared_ca_file": trusted, "shared_password_file": password}
        one, two = (machine(tmp_path / each, url, **settings) for each in ("one", "two"))
        record = await one.leave(blocks=600)
        found = await two.handoffs.get(record.id, "local")
        await two.handoffs.fetch_here(found, ENGINE)
        assert two.read(found.key) == one.read(record.key)
        stranger = machine(
            tmp_path / "three", url, shared_password_file=password
        )  # the system's certificates
        with pytest.raises(HandoffStoreUnavailable):
            await stranger.handoffs.get(record.id, "local")


@pytest.mark.parametrize(
    "url", ["valkey+sentinel://127.0.0.1:1", "valkey+sentinel://:1/name", "valkey+sentinel://a:1/n?db=x"]
)
def test_an_address_of_sentinel_that_cannot_be_read_ends_the_start(url: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"handoffs\.shared: "):
        machine(tmp_path / "one", url)


@pytest.mark.parametrize("password", ["qx/ss", "77/34", "qx#ss", "qx?ss", "qx[ss"])
@pytest.mark.parametrize("kind", ["", "+cluster", "+sentinel"])
def test_a_password_that_breaks_the_address_is_not_in_the_error(kind: str, password: str) -> None:
    url = f"valkey{kind}://:{password}@127.0.0.1:1/0"
    with pytest.raises(SettingsError, match=r"shared_password_file|name the primary") as caught:
        open_client(ValkeyAddress(url, "baton", b"x" * 32))
    assert password[:2] not in str(caught.value)
    assert caught.value.__cause__ is None
