"""Works on a shared store at random until it is killed, and writes down what it did and saw.

`shared_history.py entries|records URL LOG SEED`; the log is that of `store_history`. A key that was used is never
used again, as ids are.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from baton.config.groups import HandoffSettings
from baton.errors import HandoffPinsFull, HandoffStoreUnavailable
from baton.library.handoff import Handoff
from baton.library.here.entries import Deadline, LocalFile
from baton.library.saving import ChangeRules
from baton.library.valkey.connection import ValkeyAddress, ValkeyConnection
from baton.library.valkey.files import Room, ValkeyFiles
from baton.library.valkey.records import ValkeyRecords
from baton.telemetry.metrics import SharedStoreMetrics
from baton_kv.stores.base import StoreError
from support.store_history import SCOPES, WRONG, Log, work

LIVES_S = 600
BUDGET = 3 * 1024 * 1024
KEYS = 12


def connect(url: str) -> tuple[ValkeyConnection, ValkeyFiles]:
    metrics = SharedStoreMetrics(CollectorRegistry())
    connection = ValkeyConnection(ValkeyAddress(url, "baton", b"s" * 32), metrics)
    return connection, ValkeyFiles(connection, metrics)


class SharedEntries:
    """Entries of one file each; a value is the SHA-256 of a file's body, which stands before it with the key."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self._connection, self._files = connect(url)
        self._rng = rng
        self._new = ""

    @property
    def keys(self) -> list[str]:
        key = self._connection.own_key("entry")
        found = [each.decode() for each in self._connection.ask("look", lambda client: client.hkeys(key))]
        self._new = f"{self._rng.choice(SCOPES)}/{os.urandom(16).hex()}"
        return found if len(found) > KEYS else [*found, self._new]

    def put(self, key: str, begun: Callable[[str], None]) -> str | None:
        body = self._rng.randbytes(self._rng.choice((100, 5_000, 300_000)))
        value = hashlib.sha256(body).hexdigest()
        if key != self._new:
            return None
        begun(value)
        data = key.encode() + value.encode() + body
        room = Room(BUDGET, LIVES_S * 1000, automatic=self._rng.random() < 0.2)
        self._files.push(key, [LocalFile.holding(key, data)], room)
        return value

    def get(self, key: str) -> str | None:
        """See it as a fetch does: bytes alone, as of a put that was killed and then deleted, are no entry."""
        if self._files.use(key, automatic=False)[-1:] != [key]:
            return None
        _, chunks = self._files.chunks(key, Deadline.within("the test's", 5), 1 << 30)
        data = b"".join(chunks)
        told, value, body = data[: len(key)], data[len(key) : len(key) + 64], data[len(key) + 64 :]
        whole = told.decode() == key and hashlib.sha256(body).hexdigest() == value.decode()
        return value.decode() if whole else WRONG

    def delete(self, key: str) -> None:
        self._files.drop([key])

    def other(self, key: str) -> None:
        self._files.pin(key, self._rng.random() < 0.5, BUDGET // 2)


class SharedHandoffRecords:
    """Records with pins; a value is a record's label."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self._connection, files = connect(url)
        self._records = ValkeyRecords(self._connection, files, BUDGET)
        self._rng = rng
        settings = HandoffSettings(budget=BUDGET)  # type: ignore[arg-type]  # a number is a size
        self._rules = ChangeRules(settings, lambda _record, pin: pin, lambda _record: {})
        self._new = ""

    @property
    def keys(self) -> list[str]:
        key = self._connection.own_key("rec")
        found = [each.decode() for each in self._connection.ask("look", lambda client: client.hkeys(key))]
        self._new = os.urandom(16).hex()
        return found if len(found) > KEYS else [*found, self._new]

    def put(self, key: str, begun: Callable[[str], None]) -> str | None:
        value = os.urandom(8).hex()
        begun(value)
        edit = self._rules.apply({"label": value}, time.time(), ())
        if key != self._new:
            return value if self._records.update(key, edit) else None
        ends = time.time() + LIVES_S
        told: dict[str, Any] = {
            "weights": "w",
            "created_at": time.time(),
            "ttl_s": LIVES_S,
            "expires_at": ends,
        }
        record = Handoff(id=key, tenant=self._rng.choice(SCOPES), model="m", **told)
        return value if self._records.create(record, edit) else None

    def get(self, key: str) -> str | None:
        found = self._records.read(key)
        return None if found is None else found.label

    def delete(self, key: str) -> None:
        if (found := self._records.read(key)) is not None:
            self._records.remove(found)
            assert self._records.read(key) is None

    def other(self, _key: str) -> None:
        self._records.refresh()


if __name__ == "__main__":
    kind, url, log, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    target = SharedEntries(url, rng) if kind == "entries" else SharedHandoffRecords(url, rng)
    while True:
        try:
            work(target, Log(Path(log)), rng)
        except (HandoffStoreUnavailable, HandoffPinsFull, StoreError):
            continue
