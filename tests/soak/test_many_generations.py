"""Row H1 on a real engine: ten thousand requests, good, streamed, bad and given up; what stays is counted."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest
from support.gateways import RealGateway
from support.resource_usage import blocks_in_use, descriptors, memory_mib
from support.watched_streams import wait_for

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.timeout(1800)]
REQUESTS = 10_000
WARM_UP = 8_000
AT_ONCE = 16
ALLOWED_MIB = 24
"""In all processes together, beyond what allocators keep; 2.5 KiB a request would be as much."""


async def send(client: httpx.AsyncClient, number: int) -> str:
    """One request of the mix, and what it came to: 1 % are bad, 1 % are given up, a fifth are streamed."""
    body = {"model": "tiny", "prompt": f"{number} words and some more", "max_tokens": 1 + number % 8}
    if number % 100 == 0:
        answer = await client.post("/v1/completions", json=body | {"max_tokens": -1})
        return f"bad {answer.status_code}"
    if number % 100 == 1:
        endless = body | {"max_tokens": 200, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=endless) as answer:
            await anext(answer.aiter_bytes())
        return "given up"
    if number % 5 == 2:
        text = (await client.post("/v1/completions", json=body | {"stream": True})).text
        return "streamed" if text.endswith("[DONE]\n\n") else text[-200:]
    return str((await client.post("/v1/completions", json=body)).status_code)


async def run(gateway: RealGateway, count: int) -> Counter[str]:
    numbers, seen = iter(range(count)), Counter[str]()

    async def one(client: httpx.AsyncClient) -> None:
        for number in numbers:
            seen[await send(client, number)] += 1

    headers = {"Authorization": f"Bearer {gateway.keys['acme']}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60) as client:
        await asyncio.gather(*(one(client) for _ in range(AT_ONCE)))
    return seen


@pytest.mark.fault("H1")
def test_ten_thousand_requests_to_a_real_engine_leak_nothing(tiny_gateway: RealGateway) -> None:
    asyncio.run(run(tiny_gateway, WARM_UP))
    before, files = memory_mib(tiny_gateway), descriptors(tiny_gateway)
    seen = asyncio.run(run(tiny_gateway, REQUESTS))
    wait_for(lambda: blocks_in_use(tiny_gateway) == 0, 10)
    grown = memory_mib(tiny_gateway) - before
    print(f"H1: {dict(seen)}: {grown:+.1f} MiB of {before:.0f}, descriptors {files} -> ", end="")
    print(f"{descriptors(tiny_gateway)}, blocks in use {blocks_in_use(tiny_gateway)}")
    assert set(seen) == {"200", "streamed", "bad 400", "given up"}
    assert descriptors(tiny_gateway) <= files + 2
    assert grown < ALLOWED_MIB
