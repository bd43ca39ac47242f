"""The stat logger behind the gateway: installed, it is there, for each engine under its name, counting each step once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from support.gateways import RealGateway
from support.rasters import geotiff
from support.stats_page import assert_counted_once, totals

pytestmark = pytest.mark.engine
LONG = "The quick brown fox jumps over the lazy dog. " * 60


def page(gateway: RealGateway) -> str:
    return httpx.get(f"{gateway.url}/metrics").text


def test_every_engine_s_steps_are_on_the_page_once(real_gateway: RealGateway) -> None:
    """As many token gaps as vLLM itself counted, whatever ran before."""
    before = totals(page(real_gateway))["smollm2"]
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 12, "ignore_eos": True}
    scene = geotiff(np.random.default_rng(0).integers(1, 3000, (6, 64, 64)).astype(np.int16))
    upload: dict[str, Any] = {
        "content": scene,
        "headers": {"content-type": "image/tiff", "accept": "image/tiff"},
    }
    assert httpx.post(f"{real_gateway.url}/v1/completions", json=body, timeout=60).status_code == 200
    masked = httpx.post(f"{real_gateway.url}/pooling?model=flood-tiny", **upload, timeout=60)
    assert masked.status_code == 200, masked.text
    told = page(real_gateway)
    for model in ("smollm2", "smollm2-fp32", "flood-tiny"):
        assert_counted_once(told, model)
    after = totals(told)["smollm2"]
    assert after["baton_stats_token_gaps_total"] - before["baton_stats_token_gaps_total"] == 11
    assert after["baton_stats_queue_seconds_count"] - before["baton_stats_queue_seconds_count"] == 1
    assert after["baton_stats_step_seconds_total"] > before["baton_stats_step_seconds_total"]


async def test_prompts_beside_answers_show(real_gateway: RealGateway) -> None:
    """While one answer is written, prompts come: steps are mixed, and their tokens come later than others."""

    async def ask(client: httpx.AsyncClient, prompt: str, count: int) -> None:
        body = {"model": "smollm2-fp32", "prompt": prompt, "max_tokens": count, "ignore_eos": True}
        (await client.post("/v1/completions", json=body)).raise_for_status()

    before = page(real_gateway)
    async with httpx.AsyncClient(base_url=real_gateway.url, timeout=120) as client:
        writing = asyncio.create_task(ask(client, "Once", 240))
        for number in range(4):
            await asyncio.sleep(0.1)
            await ask(client, f"{number} {LONG}", 1)
        assert not writing.done()
        await writing
    after = page(real_gateway)
    steps = {
        phase: value(after, "steps", phase) - value(before, "steps", phase)
        for phase in ("prefill", "decode", "mixed")
    }
    gaps = {
        phase: (value(after, "token_gap_seconds", phase) - value(before, "token_gap_seconds", phase))
        / (value(after, "token_gaps", phase) - value(before, "token_gaps", phase))
        for phase in ("decode", "mixed")
    }
    print(
        f"steps {steps}; mean gap {gaps['decode'] * 1000:.0f} ms, {gaps['mixed'] * 1000:.0f} ms beside prompts"
    )
    assert steps["mixed"] >= 3
    assert steps["decode"] > steps["mixed"]
    assert gaps["mixed"] > gaps["decode"]


def value(told: str, name: str, phase: str) -> float:
    line = f'baton_stats_{name}_total{{engine="0",model_name="smollm2-fp32",phase="{phase}"}} '
    (found,) = [row.removeprefix(line) for row in told.splitlines() if row.startswith(line)]
    return float(found)
