"""Write what no gateway would write into a shared store: into any value, field, member or type of its keys."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from baton.library.handoff import new_id
from support.shared_stores import ENGINE, Machine, StoreServer, machine

KEPT = b"baton:{i}:proof"
"""The proof of the pool's secret: whoever changes it keeps gateways out, which is what it is for."""
DEEP = b"[" * 5000 + b"]" * 5000


def spoil(client: Any, rng: random.Random) -> str:
    """Change one thing in the store at random; returns what."""
    key = rng.choice(sorted(each for each in client.scan_iter("baton:*") if each != KEPT))
    kind = client.type(key).decode()
    if rng.random() < 0.15:
        client.delete(key)
        return f"{key!r} is a {_other_type(client, key, rng)}"
    match kind:
        case "hash":
            field = rng.choice(client.hkeys(key)) if rng.random() < 0.8 else _bytes(rng)
            value = _value(client.hget(key, field) or b"", rng)
            client.hset(key, field, value)
            return f"{key!r} {field!r} = {value[:60]!r}"
        case "zset":
            member = rng.choice(client.zrange(key, 0, -1)) if rng.random() < 0.6 else _bytes(rng)
            score = rng.choice((float("inf"), float("-inf"), -1.0, 0.0, 1e300, rng.random() * 1e13))
            client.zadd(key, {member: score})
            return f"{key!r} {member!r} at {score}"
        case _:
            value = _value(client.get(key) or b"", rng) if kind == "string" else b"?"
            client.set(key, value)
            return f"{key!r} = {value[:60]!r}"


def _other_type(client: Any, key: bytes, rng: random.Random) -> str:
    kind = rng.choice(("string", "list", "hash", "zset", "nothing"))
    match kind:
        case "string":
            client.set(key, _bytes(rng))
        case "list":
            client.rpush(key, _bytes(rng))
        case "hash":
            client.hset(key, _bytes(rng), _bytes(rng))
        case "zset":
            client.zadd(key, {_bytes(rng): rng.random()})
    return kind


def _bytes(rng: random.Random) -> bytes:
    return rng.choice((b"\xff\xfe", b"", b"/", b"x", b"a b", b"A" * 32, rng.randbytes(rng.randrange(1, 40))))


def _value(value: bytes, rng: random.Random) -> bytes:
    """Return a value that another one becomes: as JSON with other fields, as a number, or as bytes."""
    choice = rng.random()
    if choice < 0.4 and value.startswith(b"{"):
        try:
            told = json.loads(value)
        except ValueError:
            return value[: len(value) // 2]
        field = rng.choice(sorted(told))
        told[field] = rng.choice(
            (None, float("nan"), float("inf"), -1, "\ud800", [], {}, "x" * 5000, "victim", 10**400)
        )
        return json.dumps(told).encode()
    numbers = (
        b"nan",
        b"inf",
        b"-1",
        b"1e999",
        b"9" * 40,
        b"0x10",
        b"-9223372036854775808",
        b"9007199254740993",
    )
    return rng.choice((*numbers, DEEP, value[1:], value + b"\xff", b"many", b"", b"x " * 5000, _bytes(rng)))


async def listed(one: Machine, tenant: str) -> set[str]:
    page, _ = await one.handoffs.page(tenant, limit=100, after=None)
    return {each.id for each in page}


def failures(one: Machine) -> float:
    """Exchanges that failed: after three the store is left alone, which holds up all tenants."""
    kinds = ("error", "timeout", "resting")
    found = [
        one.metrics.registry.get_sample_value("baton_shared_store_errors_total", {"kind": kind})
        for kind in kinds
    ]
    return sum(each or 0.0 for each in found)


async def survive(server: StoreServer, tmp_path: Path, changes: int, seed: int) -> None:
    """Change so many values; after each a gateway lists and sweeps, and every tenth time a new one starts."""
    rng = random.Random(seed)
    budget = {"shared_budget": 1024 * 1024, "budget": 4 * 1024 * 1024}
    one = machine(tmp_path / "one", server.url, **budget)
    for number in range(changes):
        if number % 50 == 0:
            one.storage.close()
            server.client.flushall()
            one = machine(tmp_path / f"m{number}", server.url, **budget)
            for tenant in ("victim", "thief"):
                await one.leave(tenant, pin=tenant == "victim", ttl_s=600)
                await one.leave(
                    tenant, blocks=60, automatic=new_id(automatic=True) if tenant == "thief" else None
                )
        what = spoil(server.client, rng)
        try:
            async with asyncio.timeout(20):
                await list_and_sweep(one)
                if number % 10 == 0:
                    await start_and_save(machine(tmp_path / f"n{number}", server.url, **budget))
        except BaseException as error:
            error.add_note(f"change {number} of seed {seed}: {what}")
            raise


async def list_and_sweep(one: Machine) -> None:
    await listed(one, "victim")
    await one.handoffs.upkeep.sweep()
    await one.quiet()
    assert failures(one) == 0


async def start_and_save(other: Machine) -> None:
    await list_and_sweep(other)
    left = await other.leave("victim")
    assert left.id in await listed(other, "victim")
    await other.handoffs.fetch_here(left, ENGINE)
    await other.handoffs.delete(left)
    assert left.id not in await listed(other, "victim")
    assert failures(other) == 0
    other.storage.close()
