"""Five thousand handoffs on a real engine, each saved, started from and forgotten: what stays behind is counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from support.gateways import RealGateway
from support.resource_usage import blocks_in_use, descriptors, memory_mib

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.timeout(1800)]
ROUNDS = 5_000
AT_ONCE = 8
ALLOWED_MIB = 24
"""In all processes together, beyond what allocators keep; 5 KiB a handoff would be as much."""


async def rounds(gateway: RealGateway, count: int) -> int:
    """Save, start from it, delete; how many did not find their KV again."""
    headers = {"Authorization": f"Bearer {gateway.keys['acme']}"}
    missed = 0

    async def one(client: httpx.AsyncClient, numbers: range) -> None:
        nonlocal missed
        for number in numbers:
            asked = {"model": "tiny", "max_tokens": 2, "ignore_eos": True}
            prompt = [1 + (number * 7919 + index) % 40_000 for index in range(100)]
            body = asked | {"prompt": prompt, "handoff": {"save": True}}
            left = (await client.post("/v1/completions", json=body)).json()["handoff"]
            body = asked | {"prompt": [7], "handoff": {"from": left["id"]}}
            source = (await client.post("/v1/completions", json=body)).json()["handoff"]["source"]
            missed += source["outcome"] == "recomputed"
            assert (await client.delete(f"/v1/handoffs/{left['id']}")).status_code == 204

    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60) as client:
        await asyncio.gather(*(one(client, range(start, count, AT_ONCE)) for start in range(AT_ONCE)))
    return missed


def kept_by(gateway: RealGateway) -> set[Path]:
    """The files of all its handoffs; other tests leave some that have not expired yet."""
    store = gateway.output.parent / "store"
    return {path for path in store.rglob("*") if path.suffix in (".kv", ".json", ".pin")}


def test_five_thousand_handoffs_leave_nothing_behind(tiny_gateway: RealGateway) -> None:
    others = kept_by(tiny_gateway)
    asyncio.run(rounds(tiny_gateway, ROUNDS))  # allocators find their size, the whole pool is touched once
    before, files = memory_mib(tiny_gateway), descriptors(tiny_gateway)
    missed = asyncio.run(rounds(tiny_gateway, ROUNDS))
    after = memory_mib(tiny_gateway)
    print(f"{ROUNDS} handoffs: {after - before:+.1f} MiB of {before:.0f}, descriptors {files} -> ", end="")
    print(f"{descriptors(tiny_gateway)}, blocks in use {blocks_in_use(tiny_gateway)}, missed {missed}")
    assert kept_by(tiny_gateway) - others == set()
    assert missed < ROUNDS / 100
    assert descriptors(tiny_gateway) <= files + 2
    assert blocks_in_use(tiny_gateway) == 0
    assert after - before < ALLOWED_MIB
