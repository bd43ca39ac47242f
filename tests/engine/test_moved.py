"""Handoffs joined by moving KV: what is said about it, what is kept from others, what inherits it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.gateways import RealGateway
from support.relay_requests import ask, cached, ids, once_saved, told

from baton.relay.move import LONE_HEAD_TOKENS

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
    kept = sum(part["tokens"] - part["recomputed_tokens"] for part in source["parts"])
    assert cached(moved) == kept, "tokens that were computed between moved ones are none that were found"
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


def test_no_prompt_finds_moved_kv_in_an_engine_s_prefix_cache(relay_gateway: RealGateway) -> None:
    """The joined prompt was computed by nobody: all that the engine holds of it was moved, but the first part."""
    parts = [left(relay_gateway, city, 20) for city in ("Oslo", "Lima", "Cairo")]
    handoff = {"from": [part["id"] for part in parts], "join": "moved"}
    for _ in range(5):
        moved = ask(relay_gateway, "writer", " So", handoff=handoff)
    assert told(moved)["source"]["outcome"] == "blended"
    prompt, _ = ids(moved)
    plain = ask(relay_gateway, "writer", prompt, logprobs=1)
    assert cached(plain) <= parts[0]["tokens"]
    other = ask(relay_gateway, "reader", prompt, logprobs=1)
    assert cached(other) == 0
    assert ids(plain) == ids(other)
    assert log_probs(plain) == pytest.approx(log_probs(other), abs=1e-4)
    blended = ask(relay_gateway, "writer", " So", handoff=handoff, logprobs=1)
    assert log_probs(plain) != pytest.approx(log_probs(blended), abs=1e-3), "moved KV would have been told"


def log_probs(answer: openai.types.Completion) -> list[float]:
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    return [float(each or 0.0) for each in found.token_logprobs]


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


@pytest.mark.parametrize("engine", ["reader", "writer"])
def test_streams_and_several_answers_start_from_moved_kv_too(relay_gateway: RealGateway, engine: str) -> None:
    """What is told of several answers is of one load, however many the engine did for them."""
    names = [left(relay_gateway, city, 14)["id"] for city in ("Bern", "Riga", "Sofia")]
    handoff = {"from": names, "join": "moved"}
    whole = ask(relay_gateway, engine, " So", handoff=handoff)
    source = told(whole)["source"]
    several = ask(
        relay_gateway, engine, " So", handoff=handoff, n=3, temperature=0.001
    )  # greedy has one answer
    assert [choice.text for choice in several.choices] == [whole.choices[0].text] * 3
    assert told(several)["source"]["parts"] == source["parts"]
    with relay_gateway.client() as client:
        body = {"model": engine, "prompt": " So", "max_tokens": 8, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body | {"handoff": handoff}) as stream:
            lines = [
                line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")
            ]
    chunks = [json.loads(line) for line in lines]
    said = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    (shown,) = [chunk["handoff"] for chunk in chunks if "handoff" in chunk]
    assert (said, shown["source"]["parts"]) == (whole.choices[0].text, source["parts"])


def test_log_probabilities_of_the_prompt_are_not_had_with_moved_kv(relay_gateway: RealGateway) -> None:
    names = [left(relay_gateway, city, 5)["id"] for city in CITIES[:2]]
    with relay_gateway.client() as client:
        body = {"model": "reader", "prompt": "a", "prompt_logprobs": 1}
        answer = client.post("/v1/completions", json=body | {"handoff": {"from": names, "join": "moved"}})
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert answer.json()["error"]["param"] == "prompt_logprobs"
