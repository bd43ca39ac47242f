"""Ten thousand automatic loads, each of which is computed again: none led to another answer, but for a planted one."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.forged_entries import put_wrong_block
from support.gateways import RealGateway
from support.made_models import make_models

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.timeout(2 * 3600)]
LOADS = 10_000
AT_ONCE = 6
"""Conversations at once; all of their audits can wait."""
TURNS = 9
ENGINES = ("llama", "gemma3")
TINY_MODELS = Path(__file__).parent.parent / "connector" / "tiny_models.py"
BUCKETS = re.compile(r'^baton_handoff_audit_difference_bucket{le="([^"]+)"} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    folder = make_models(TINY_MODELS, tmp_path_factory.mktemp("audited"))
    text = (Path(__file__).parent / "audited.toml").read_text()
    (folder / "baton.toml").write_text(text.format(folder=folder))
    with RealGateway(["--config", str(folder / "baton.toml")], folder) as running:
        running.wait_until_ready()
        yield running


def sentence(number: int) -> str:
    """Some 30 tokens, which no other number has."""
    return f"Note {number}: " + " ".join(f"{number * 7919 % (97 + place)} of {place}" for place in range(5))


async def conversation(client: httpx.AsyncClient, number: int) -> None:
    """Every turn resends all that was said."""
    messages = [{"role": "system", "content": sentence(number)}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": sentence(number * 100 + turn)})
        body = {"model": ENGINES[number % 2], "messages": messages, "max_tokens": 2, "temperature": 0}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])
        await asyncio.sleep(0.05)  # its context is saved


class Page:
    """The gateway's metrics at one moment."""

    def __init__(self, text: str) -> None:
        self.text = text

    def audits(self, result: str) -> int:
        found = re.search(
            rf'^baton_handoff_audits_total{{result="{result}"}} (\S+)$', self.text, re.MULTILINE
        )
        assert found
        return int(float(found[1]))

    @property
    def loads(self) -> int:
        name = r'^baton_store_op_duration_seconds_count{engine="\w+",op="load"} (\S+)$'
        return sum(int(float(count)) for count in re.findall(name, self.text, re.MULTILINE))

    @property
    def audited(self) -> int:
        return self.audits("match") + self.audits("mismatch")


async def rounds(gateway: RealGateway) -> Page:
    """Conversations until there were enough loads; after each few all their audits are waited for."""
    number, began = 0, time.monotonic()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as client:

        async def page() -> Page:
            return Page((await client.get(f"{gateway.metrics_url}/metrics")).text)

        found = await page()
        while found.audited < LOADS:
            await asyncio.gather(*(conversation(client, number + each) for each in range(AT_ONCE)))
            number += AT_ONCE
            for _ in range(600):
                if (found := await page()).audited + found.audits("dropped") >= found.loads:
                    break
                await asyncio.sleep(0.2)
            assert found.audits("mismatch") == 0, gateway.log[-3000:]
            if number % 60 == 0:
                print(f"{found.audited} audited, {time.monotonic() - began:.0f} s", flush=True)
    return found


def test_ten_thousand_automatic_loads_match_what_is_computed(gateway: RealGateway) -> None:
    found = asyncio.run(rounds(gateway))
    below: list[tuple[Any, int]] = [
        (bound, int(float(count))) for bound, count in BUCKETS.findall(found.text)
    ]
    print(f"{found.audited} audits of {found.loads} loads: {found.audits('mismatch')} mismatches, ", end="")
    print(f"{found.audits('dropped')} dropped; differences up to: {below}")
    assert found.audited >= LOADS
    assert found.audits("mismatch") == 0
    assert found.loads - found.audited < LOADS / 1000, "each load is audited"


def test_a_wrong_block_among_them_is_found(gateway: RealGateway) -> None:
    """What shows that the audits above could have found something."""
    store = gateway.output.parent / "store"
    body = {"model": "llama", "max_tokens": 2, "temperature": 0, "prompt": sentence(8) * 6}
    with gateway.client() as client:
        saved = client.post("/v1/completions", json=body | {"handoff": {"save": True}}).json()["handoff"]
        (path,) = (store / "entries").rglob(f"{saved['id']}.kv")
        put_wrong_block(store, path, place=1, taken=3)
        client.post("/v1/completions", json=body | {"prompt": body["prompt"] + " and"})
        for _ in range(300):
            page = Page(client.get(f"{gateway.metrics_url}/metrics").text)
            if page.audits("mismatch"):
                break
            time.sleep(0.1)
    assert page.audits("mismatch") == 1
