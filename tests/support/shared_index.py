"""Hold the index of a shared store against what is in it."""

from __future__ import annotations

from collections import Counter
from typing import Any

BASE = "baton:{i}:"


def index_errors(client: Any) -> list[str]:
    """Return what does not add up: counts of files, bytes by tenant, pins, records, and what should expire."""

    def read(name: str) -> dict[str, str]:
        return {key.decode(): value.decode() for key, value in client.hgetall(BASE + name).items()}

    def members(name: str) -> set[str]:
        return {each.decode() for each in client.zrange(BASE + name, 0, -1)}

    entries = {key: value.split() for key, value in read("entry").items()}
    sizes = {key: int(value) for key, value in read("size").items()}
    needed = Counter(file for files in entries.values() for file in files)
    pinned = Counter(file for entry in read("pins") for file in entries.get(entry, ["?"]))
    records = {key: value.split() for key, value in read("rec").items()}
    held: Counter[str] = Counter()
    for file, size in sizes.items():
        held[file.partition("/")[0]] += size
    for scope, size in records.values():
        held[scope] += int(size)
    kept: Counter[str] = Counter()
    for file in pinned:
        kept[file.partition("/")[0]] += sizes.get(file, 0)
    pairs: dict[str, tuple[object, object]] = {
        "refs": (dict(needed), {key: int(value) for key, value in read("refs").items()}),
        "size": (set(needed), set(sizes)),
        "prefs": (dict(pinned), {key: int(value) for key, value in read("prefs").items()}),
        "held": (dict(held), {key: int(value) for key, value in read("held").items()}),
        "pinned": (dict(kept), {key: int(value) for key, value in read("pinned").items()}),
        "due": (set(entries), members("due")),
        "ends": (set(records), members("ends")),
        "log": (set(records), members("log")),
        "records": (
            sum(int(size) for _, size in records.values()),
            int(client.get(BASE + "records") or 0),
        ),
    }
    wrong = [f"{name}: {told} instead of {right}" for name, (right, told) in pairs.items() if right != told]
    forever = [
        key.decode()
        for pattern in ("baton:f:*", BASE + "r:*")
        for key in client.scan_iter(pattern)
        if client.ttl(key) == -1
    ]
    return wrong + [f"{key} never expires" for key in forever]
