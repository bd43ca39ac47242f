"""Batches on real weights: what clients get, each context prefilled once, plugins too."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.batches import CHAT, answered, begin, line, sdk, until
from support.gateways import RealGateway

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
MODEL = "smollm2-fp32"
BLOCK = 128
"""Tokens of a block of the engine's cache on a CPU."""
CONTEXTS, QUESTIONS = 3, 4
SCENE = Path(__file__).parents[2] / "plugins/baton_geo/flood/scene.tif"


def prefix_cache(gateway: RealGateway) -> tuple[float, float]:
    """Prompt tokens that were looked up in the engine's cache so far, and those of them that were found."""
    page = httpx.get(f"{gateway.metrics_url}/metrics").text.splitlines()
    found = []
    for name in ("queries", "hits"):
        head = f"vllm:prefix_cache_{name}_total{{"
        rows = [row for row in page if row.startswith(head) and f'model_name="{MODEL}"' in row]
        found.append(sum(float(row.split()[-1]) for row in rows))
    return found[0], found[1]


def body(context: int, question: int) -> dict[str, Any]:
    facts = " ".join(
        f"House {number} of street {context} has {number * context + 3} windows." for number in range(40)
    )
    messages = [{"role": "system", "content": facts}, {"role": "user", "content": f"And house {question}?"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0}


def test_lines_get_what_clients_get_and_a_context_of_many_lines_is_computed_once(
    real_gateway: RealGateway,
) -> None:
    client = sdk(real_gateway.url)
    asked = {f"{q}-{c}": body(c, q) for q in range(QUESTIONS) for c in range(CONTEXTS)}
    before = prefix_cache(real_gateway)
    batch = until(
        client, begin(client, b"".join(line(name, each) for name, each in asked.items())), within_s=200
    )
    after = prefix_cache(real_gateway)
    found = answered(client, batch)
    assert {row["response"]["status_code"] for row in found.values()} == {200}
    asked_for, hits = after[0] - before[0], after[1] - before[1]
    longest = max(row["response"]["body"]["usage"]["prompt_tokens"] for row in found.values())
    assert batch.usage is not None
    assert asked_for == batch.usage.input_tokens
    assert longest > 4 * BLOCK
    computed = asked_for - hits
    assert computed <= CONTEXTS * longest + (len(asked) - CONTEXTS) * (BLOCK + 32), (asked_for, computed)
    print(f"{len(asked)} lines, {asked_for:.0f} prompt tokens, {computed:.0f} computed")
    with real_gateway.client() as direct:
        for name in ("0-0", "3-2"):
            expected = direct.post(CHAT, json=asked[name]).json()["choices"][0]["message"]["content"]
            assert found[name]["response"]["body"]["choices"][0]["message"]["content"] == expected


def test_a_plugin_answers_lines(real_gateway: RealGateway) -> None:
    client = sdk(real_gateway.url)
    data = {
        "data_format": "b64_json",
        "data": base64.b64encode(SCENE.read_bytes()).decode(),
        "out_data_format": "b64_json",
    }
    asked = {"model": "flood-tiny", "data": data}
    (row,) = answered(client, until(client, begin(client, line("x", asked, "/pooling"), "/pooling"))).values()
    with real_gateway.client() as direct:
        expected = direct.post("/pooling", json=asked).json()["data"]
    assert row["response"]["status_code"] == 200, row
    assert row["response"]["body"]["data"]["data"] == expected["data"]
