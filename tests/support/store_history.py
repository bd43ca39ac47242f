"""Works on a store at random until it is killed, and writes down what it did and saw.

`store_history.py entries|records ROOT LOG SEED`. Each line of LOG is a JSON object: `op` is `begin` (of a put),
`put`, `get` or `delete`; `key`, `value` (None: there was nothing), and `from` and `until` in nanoseconds of the
clock that all processes share.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from baton.config.groups import HandoffSettings
from baton.library.handoff import Handoff
from baton.library.here.records import RecordFolder
from baton.library.saving import ChangeRules
from baton_kv.stores.base import EntryMissing, StoreError
from baton_kv.stores.file import FileStore

SCOPES = ("acme", "globex", "initech")
KEYS = 6
BUDGET = 1024 * 1024
WRONG = "wrong"
"""The value of what is not as anybody put it."""


class Log:
    """A file of what was done, whole lines however the process ends."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, op: str, key: str, value: str | None, begun: int) -> None:
        line = {"op": op, "key": key, "value": value, "from": begun, "until": time.monotonic_ns()}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Entries:
    """A store's entries; a value is the SHA-256 of an entry's body, which stands before it with the key."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self._store = FileStore(root, budget=BUDGET)
        self._rng = rng
        self.keys = [f"{scope}/{'k' * 31}{number}" for scope in SCOPES for number in range(KEYS)]

    def put(self, key: str, begun: Callable[[str], None]) -> str | None:
        body = self._rng.randbytes(self._rng.choice((100, 5_000, 80_000)))
        value = hashlib.sha256(body).hexdigest()
        begun(value)
        self._store.put(key, [key.encode(), value.encode(), body[:50], body[50:]])
        return value

    def get(self, key: str) -> str | None:
        try:
            with self._store.open(key) as reader:
                data = reader.read(0, len(reader))
        except EntryMissing:
            return None
        told, value, body = data[: len(key)], data[len(key) : len(key) + 64], data[len(key) + 64 :]
        whole = told.decode() == key and hashlib.sha256(body).hexdigest() == value.decode()
        return value.decode() if whole else WRONG

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def other(self, key: str) -> None:
        self._rng.choice(
            (
                partial(self._store.pin, key, True),
                partial(self._store.pin, key, False),
                partial(self._store.make_room, 1000),
            )
        )()


class Records:
    """The records of a gateway; a value is a record's label. An id that was deleted is never used again."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self._files = RecordFolder(root)
        self._rng = rng
        self._kv = FileStore(root.parent / "kv")
        settings = HandoffSettings(budget=BUDGET)  # type: ignore[arg-type]  # a number is a size
        self._rules = ChangeRules(settings, self._pin, lambda record: self._kv.pinned(also=record.key))
        self._root = root
        self._new = ""

    def _pin(self, record: Handoff, pin: bool) -> bool:
        self._kv.pin(record.key, pin)
        return pin

    @property
    def keys(self) -> list[str]:
        found = [path.stem for path in self._root.glob("*.json")]
        self._new = os.urandom(16).hex()
        return found if len(found) > KEYS else [*found, self._new]

    def put(self, key: str, begun: Callable[[str], None]) -> str | None:
        value = os.urandom(8).hex()
        begun(value)
        changes = {"label": value} | ({"pin": True} if self._rng.random() < 0.3 else {})
        edit = self._rules.apply(changes, time.time(), ())
        if key != self._new:
            return value if self._files.update(key, edit) else None
        told = {"weights": "w", "created_at": 1.0, "ttl_s": 9e9, "expires_at": 9e9, "bytes": 100_000}
        record = Handoff(id=key, tenant=key[0], model="m", **told)
        self._kv.put(record.key, [bytes(100_000)])
        return value if self._files.create(record, edit) else None

    def get(self, key: str) -> str | None:
        found = self._files.read(key)
        return None if found is None else found.label

    def delete(self, key: str) -> None:
        if (found := self._files.read(key)) is not None:
            self._files.remove(found)
            self._kv.delete(found.key)

    def other(self, _key: str) -> None:
        self._files.refresh()


class Target(Protocol):
    """What is worked on."""

    @property
    def keys(self) -> list[str]:
        """Keys to choose from."""
        ...

    def put(self, key: str, begun: Callable[[str], None]) -> str | None:
        """Put a value and return it; None: nothing was put."""
        ...

    def get(self, key: str) -> str | None: ...

    def delete(self, key: str) -> None: ...

    def other(self, key: str) -> None:
        """Do what changes no value."""
        ...


def work(target: Target, log: Log, rng: random.Random) -> None:
    """One operation after another, for ever."""
    while True:
        key, op = rng.choice(target.keys), rng.choices(("put", "get", "delete", "other"), (4, 8, 1, 1))[0]
        begun, value = time.monotonic_ns(), None
        try:
            if op == "put":
                value = target.put(key, lambda value: log.write("begin", key, value, begun))  # noqa: B023  # called at once
            else:
                value = {"get": target.get, "delete": target.delete, "other": target.other}[op](key)
        except (StoreError, EntryMissing):
            continue
        except Exception as error:
            if type(error).__name__ == "HandoffPinsFull":
                continue
            raise
        if op != "other" and (op != "put" or value is not None):
            log.write(op, key, value, begun)


if __name__ == "__main__":
    kind, root, log, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    target = Entries(Path(root), rng) if kind == "entries" else Records(Path(root), rng)
    work(target, Log(Path(log)), rng)
