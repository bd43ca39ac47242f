"""Handoffs joined by moving KV: what is said about it, what is kept from others, what inherits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import RealGateway
from support.relays import ask, ids, once_saved, told

from baton.handoffs.joins.moving import LONE_HEAD_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
RULES = "You compare cities, and say in one short line what they have in common.\n"
CITIES = ("Rome", "Madrid", "Paris")


def left(gateway: RealGateway, city: str, words: int) -> dict[str, Any]:
    """What an agent leaves that read of a city, behind rules that all of them have."""
    text = RULES + " ".join(f"{city} has {number * 37 % 101} bridges." for number in range(words))
    return once_saved(gateway, told(ask(gateway, "reader", text, handoff={"save": True})))


@pytest.mark.parametrize("engine", ["reader", "writer"])
def test_kv_is_moved_and_all_of_it_is_told(relay_gateway: RealGateway, engine: str) -> None:
    parts = [left(relay_gateway, city, 9 + 4 * number) for number, city in enumerate(CITIES)]
    names = [part["id"] for part in parts]
    exact = ask(relay_gateway, engine, " So", handoff={"from": names})
    before = ask(relay_gateway, engine, ids(exact)[0])
    moved = ask(relay_gateway, engine, " So", handoff={"from": names, "join": "moved", "save": True})
    assert ids(moved)[0] == ids(exact)[0]
    source = told(moved)["source"]
    assert (source["outcome"], source["exact"]) == ("blended", False)
    first, *others = source["parts"]
    assert first["moved_tokens"] == 0
    assert all(part["moved_tokens"] == part["tokens"] - 17 for part in others), others
    assert all(part["recomputed_tokens"] == 17 for part in others), "the first 16, and the last one"
    assert source["moved_tokens"] == sum(part["moved_tokens"] for part in others)
    after = ask(relay_gateway, engine, ids(exact)[0])
    assert ids(after) == ids(before) == ids(exact), "others never meet moved KV"

    saved = once_saved(relay_gateway, told(moved))
    assert (saved["exact"], saved["parents"]) == (False, names)
    heir = told(ask(relay_gateway, engine, " And", handoff={"from": saved["id"], "save": True}))
    assert (heir["source"]["exact"], heir["exact"]) == (False, False)
    plain = told(ask(relay_gateway, engine, " And", handoff={"from": names[0], "save": True}))
    assert (plain["source"]["exact"], plain["exact"]) == (True, True)


def test_more_is_computed_of_parts_that_share_no_beginning(relay_gateway: RealGateway) -> None:
    names = []
    for city in CITIES:
        text = " ".join(f"{city} has {number * 37 % 101} bridges." for number in range(30))
        saved = once_saved(relay_gateway, told(ask(relay_gateway, "reader", text, handoff={"save": True})))
        names.append(saved["id"])
    moved = ask(relay_gateway, "reader", " So", handoff={"from": names, "join": "moved"})
    _, *others = told(moved)["source"]["parts"]
    assert all(part["recomputed_tokens"] == LONE_HEAD_TOKENS + 1 for part in others), others
    assert all(part["moved_tokens"] == part["tokens"] - LONE_HEAD_TOKENS - 1 > 0 for part in others), others


def test_a_lost_part_is_computed_and_so_is_what_follows(
    relay_gateway: RealGateway, relay_config: Path
) -> None:
    parts = [left(relay_gateway, city, 15) for city in CITIES]
    names = [part["id"] for part in parts]
    lost = next(relay_config.parent.glob(f"store/entries/*/{names[1]}.kv"))
    lost.unlink()
    moved = ask(relay_gateway, "reader", " So", handoff={"from": names, "join": "moved"})
    source = told(moved)["source"]
    assert ids(moved) == ids(ask(relay_gateway, "reader", ids(moved)[0]))
    assert (source["outcome"], source["exact"]) == ("loaded", True)
    assert [part["moved_tokens"] for part in source["parts"]] == [0, 0, 0]


def test_log_probabilities_of_the_prompt_are_not_had_with_moved_kv(relay_gateway: RealGateway) -> None:
    names = [left(relay_gateway, city, 5)["id"] for city in CITIES[:2]]
    with relay_gateway.client() as client:
        body = {"model": "reader", "prompt": "a", "prompt_logprobs": 1}
        answer = client.post("/v1/completions", json=body | {"handoff": {"from": names, "join": "moved"}})
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert answer.json()["error"]["param"] == "prompt_logprobs"
