"""Every load is computed again on real weights: right KV matches, a wrong block with valid digests is found."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.forged_entries import put_wrong_block
from support.gateways import RealGateway
from support.relay_requests import ask, cached, ids, once_saved, told

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
STORY = " ".join(f"Bird {number} sings of {number * 37 % 101} hills." for number in range(30))
MORE = " ".join(f"Fish {number} swims in {number * 37 % 101} seas." for number in range(12))


def audits(gateway: RealGateway, *results: str) -> float:
    """The number of audits with these results, by default of all that were not dropped."""
    page = httpx.get(f"{gateway.metrics_url}/metrics").text
    counted = re.findall(r'^baton_handoff_audits_total{result="(\w+)"} (\S+)$', page, re.MULTILINE)
    return sum(float(number) for result, number in counted if result in (results or ("match", "mismatch")))


def audited(gateway: RealGateway, work: Callable[[], Any], handoff_id: str) -> tuple[Any, dict[str, Any]]:
    """What the work returns, which loads a handoff, and the handoff's audit once that was computed again."""
    before, deadline = handoff(gateway, handoff_id)["audit"], time.monotonic() + 60
    done = work()
    while (found := handoff(gateway, handoff_id)["audit"]) == before:  # others' audits may come first
        assert time.monotonic() < deadline, gateway.log[-2000:]
        time.sleep(0.1)
    return done, found


def handoff(gateway: RealGateway, handoff_id: str) -> dict[str, Any]:
    with gateway.client() as client:
        found: dict[str, Any] = client.get(f"/v1/handoffs/{handoff_id}").json()
    return found


def test_what_was_loaded_is_computed_again_and_matches(relay_gateway: RealGateway) -> None:
    left = once_saved(relay_gateway, told(ask(relay_gateway, "reader", STORY, handoff={"save": True})))
    assert left["audit"] is None
    answer, audit = audited(
        relay_gateway, lambda: ask(relay_gateway, "reader", " So", handoff={"from": left["id"]}), left["id"]
    )
    assert told(answer)["source"]["outcome"] == "loaded"
    assert answer.choices[0].logprobs is None, "they are noted for the audit, not shown"
    print(f"\naudit of {left['tokens']} tokens: {audit}")
    assert (audit["result"], audit["same_token"]) == ("match", True)
    assert audit["difference"] < 1e-3


@pytest.mark.fault("B15")
def test_a_wrong_block_with_valid_digests_is_found_and_used_no_more(
    relay_gateway: RealGateway, relay_config: Path
) -> None:
    def start(model: str, source: dict[str, Any], prompt: str = " So", **more: Any) -> Any:
        handoff = {"from": source["id"]} | more
        return audited(
            relay_gateway, lambda: ask(relay_gateway, model, prompt, handoff=handoff), source["id"]
        )

    left = once_saved(relay_gateway, told(ask(relay_gateway, "reader", STORY, handoff={"save": True})))
    child = once_saved(relay_gateway, told(start("reader", left, MORE, save=True)[0]))
    right, audit = start("reader", child)
    assert audit["result"] == "match"
    store = relay_config.parent / "store"
    (path,) = (store / "entries").rglob(f"{left['id']}.kv")
    put_wrong_block(store, path, place=2, taken=7)
    mismatches = audits(relay_gateway, "mismatch")

    wrong, audit = start("writer", left)
    print(f"\nB15: one wrong block of {left['tokens'] // 32}: {audit}")
    assert told(wrong)["source"]["outcome"] == "loaded", "the digests are valid"
    assert audit["result"] == "mismatch"
    assert audits(relay_gateway, "mismatch") == mismatches + 1

    assert not path.exists()
    again = ask(relay_gateway, "writer", " So", handoff={"from": left["id"]})
    assert told(again)["source"]["outcome"] == "recomputed", "neither the store nor the prefix cache has it"
    assert cached(again) == 0
    assert ids(ask(relay_gateway, "reader", " So", handoff={"from": child["id"]})) == ids(right)
