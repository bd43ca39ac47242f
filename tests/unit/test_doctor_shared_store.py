"""`baton doctor` says of a real shared store what would go wrong with it, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.shared_stores import BINARIES, SECRET, machine, store_server
from support.store_clusters import store_cluster
from support.tcp_proxy import tcp_proxy

from baton.config.settings import Settings
from baton.doctor import shared_store
from baton.doctor.findings import Finding
from baton.doctor.shared_store import examine_shared_store

pytestmark = pytest.mark.skipif(BINARIES["valkey"] is None, reason="no valkey-server is installed")


def examine(folder: Path, url: str, secret: str = SECRET, **settings: Any) -> dict[str, Finding]:
    (folder / "secret").write_text(secret)
    given = {"shared": url, "shared_secret_file": folder / "secret", "shared_budget": "64MiB"} | settings
    chosen = Settings(handoffs=given)
    return {finding.subject: finding for finding in examine_shared_store(chosen)}


def test_a_store_that_is_well_set_up_is_measured(tmp_path: Path) -> None:
    with store_server("valkey", tmp_path, "--maxmemory", "100mb") as server:
        found = examine(tmp_path, server.url)
        assert not [each for each in found.values() if each.bad]
        assert "version 7" in found["shared store"].text
        assert found["shared store memory"].text == "maxmemory 100 MiB; handoffs take 64 MiB at most"
        assert "push" in found["shared store throughput"].text
        assert not list(server.client.scan_iter("baton:f:*"))  # what was measured is removed


def test_all_servers_of_a_cluster_are_asked(tmp_path: Path) -> None:
    with store_cluster("valkey", tmp_path) as nodes:
        for node in nodes:
            node.client.config_set("maxmemory", "25mb")
        found = examine(tmp_path, nodes[0].url)
        assert found["shared store memory"].text.startswith("maxmemory 75 MiB")
        nodes[2].client.config_set("maxmemory-policy", "allkeys-lru")
        assert examine(tmp_path, nodes[0].url)["shared store eviction"].bad


@pytest.mark.parametrize(
    ("options", "subject", "says"),
    [
        (("--maxmemory", "64mb"), "shared store memory", "raise `maxmemory`"),
        (("--maxmemory", "99mb", "--maxmemory-policy", "allkeys-lru"), "shared store eviction", "noeviction"),
        (("--requirepass", "a password"), "shared store", "password"),
    ],
)
def test_what_is_badly_set_up_is_named_with_its_mend(
    options: tuple[str, ...], subject: str, says: str, tmp_path: Path
) -> None:
    with store_server("valkey", tmp_path, *options) as server:
        finding = examine(tmp_path, server.url)[subject]
    assert finding.bad
    assert says in finding.mend


def test_another_secret_a_dead_store_and_a_missing_file_are_told_apart(tmp_path: Path) -> None:
    with store_server("valkey", tmp_path) as server:
        machine(tmp_path / "one", server.url)
        told = examine(tmp_path, server.url, "another secret of at least 32 characters")["shared store"]
        assert (told.bad, "have another secret" in told.text) == (True, True)
    assert "does not answer" in examine(tmp_path, server.url)["shared store"].text
    lost = examine(tmp_path, server.url, shared_secret_file=tmp_path / "none")["shared store"]
    assert "shared_secret_file" in lost.text


def test_a_store_that_is_far_away_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_store, "TEST_BYTES", shared_store.CHUNK_BYTES)
    with (
        store_server("valkey", tmp_path) as server,
        tcp_proxy(urlsplit(server.url).port or 0) as proxy,
    ):
        proxy.delay_s = 0.02
        found = examine(tmp_path, f"valkey://127.0.0.1:{proxy.port}/0", shared_timeout_s=5)
    assert found["shared store round trip"].bad
    assert "nearer" in found["shared store round trip"].mend
