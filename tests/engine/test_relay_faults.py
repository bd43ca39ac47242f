"""What goes wrong around a handoff, on real engines: the rows B3, B6 and D of the fault catalogue, and the planner."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.gateways import RealGateway
from support.relay_requests import ask, cached, ids, once_saved, told

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
WORDS = "The {number} bird sat on the {number} branch and sang of {number} rivers. "
AT_ONCE = 16
SLOW = 5e6
"""Bytes a second."""


@pytest.fixture
def gateway(relay_gateway: RealGateway) -> RealGateway:
    return relay_gateway


@pytest.fixture
def folder(relay_config: Path) -> Path:
    return relay_config.parent / "store"


@pytest.fixture
def speed(folder: Path) -> Iterator[Path]:
    """How fast the engine `slow` reads its store; without the file as fast as it can."""
    path = folder / "speed"
    yield path
    path.unlink(missing_ok=True)


def text(seed: int, sentences: int = 12) -> str:
    return "".join(WORDS.format(number=seed * 100 + number) for number in range(sentences))


def entry(folder: Path, handoff: dict[str, Any]) -> Path:
    (path,) = (folder / "entries").rglob(f"{handoff['id']}.kv")
    return path


def leave(gateway: RealGateway, seed: int, model: str = "reader", sentences: int = 12) -> dict[str, Any]:
    return once_saved(gateway, told(ask(gateway, model, text(seed, sentences), handoff={"save": True})))


def series(gateway: RealGateway, name: str, **labels: str) -> float:
    page = httpx.get(f"{gateway.url}/metrics").text
    ((label, value),) = labels.items()
    found = re.search(rf'^{name}{{[^}}]*{label}="{value}"[^}}]*}} (\S+)$', page, re.MULTILINE)
    assert found, name
    return float(found[1])


def loads_again(gateway: RealGateway, seed: int) -> None:
    """Ask until the planner has forgotten how slow the store was in an earlier test."""
    for number in range(12):
        fresh = leave(gateway, seed + number)
        answer = ask(gateway, "slow", " and", handoff={"from": fresh["id"]})
        if told(answer)["source"]["decision"] == "load":
            return
    raise AssertionError(f"the planner still computes: {told(answer)}")


def settle(gateway: RealGateway, model: str) -> float:
    """The share of the engine's blocks in use, once nothing is asked of it any more."""
    deadline = time.monotonic() + 30
    while True:
        ask(gateway, model, "x")
        used = series(gateway, "vllm:kv_cache_usage_perc", model_name=model)
        if used == 0 or time.monotonic() > deadline:
            return used
        time.sleep(0.1)


def loads_given_up(gateway: RealGateway) -> int:
    """How many loads the engine `slow` gave up because their request was aborted; its metric appears with the first."""
    found = re.search(
        r'^baton_handoff_loads_given_up_total{[^}]*engine="slow"[^}]*} (\S+)$',
        httpx.get(f"{gateway.url}/metrics").text,
        re.MULTILINE,
    )
    return int(float(found[1])) if found else 0


async def given_up(
    gateway: RealGateway, bodies: list[dict[str, Any]], at_most_s: float, seed: int = 7
) -> int:
    """Send requests, a few at a time, and go away at a random moment of each; how many had not ended yet."""
    chance = random.Random(seed)
    gate = asyncio.Semaphore(AT_ONCE)
    unfinished = 0

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        nonlocal unfinished
        async with gate:
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            _, pending = await asyncio.wait({request}, timeout=chance.uniform(0, at_most_s))
            unfinished += len(pending)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    limits = httpx.Limits(max_connections=2 * AT_ONCE)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, limits=limits) as client:
        await asyncio.gather(*(one(client, body) for body in bodies))
    return unfinished


async def duration(gateway: RealGateway, bodies: list[dict[str, Any]]) -> float:
    """How many seconds these requests take on this machine, sent together and waited for."""
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}
    return time.monotonic() - began


@pytest.mark.parametrize("aborts", [20, pytest.param(1000, marks=pytest.mark.chaos)])
@pytest.mark.fault("D9")
@pytest.mark.timeout(900)
def test_aborts_during_loads_and_saves_lose_no_block(
    gateway: RealGateway, folder: Path, speed: Path, aborts: int
) -> None:
    many = 20 if aborts > 100 else 16  # more than the engine's own prefix cache holds
    left = [leave(gateway, seed) for seed in range(many)]
    speed.write_text(str(entry(folder, left[0]).stat().st_size / 0.15))  # a load takes 150 ms
    before = settle(gateway, "slow")
    asked = {"model": "slow", "max_tokens": 1, "temperature": 0}
    bodies = [  # every other one with a stop string, for which vLLM ends requests from outside too
        asked
        | {"prompt": f" {number}", "handoff": {"from": left[number % many]["id"], "save": True}}
        | ({"stop": ["\u2603"]} if number % 2 else {})
        for number in range(aborts)
    ]
    at_most_s = max(1.2, 1.2 * asyncio.run(duration(gateway, bodies[:AT_ONCE])))
    unfinished = asyncio.run(given_up(gateway, bodies, at_most_s))
    loads = loads_given_up(gateway)
    for seed in range(10):  # whether a moment falls into a load is chance: of a few requests perhaps none
        if loads > aborts / 100:
            break
        asyncio.run(given_up(gateway, bodies[:40], at_most_s, seed))
        loads = loads_given_up(gateway)
    after = settle(gateway, "slow")
    print(f"\nD9: {aborts} requests given up, {unfinished} unfinished, {loads} during their load", end="; ")
    print(f"blocks in use {before} -> {after}")
    assert aborts / 4 < unfinished < aborts
    assert loads > aborts / 100
    assert (before, after) == (0, 0)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        assert series(gateway, name, model_name="slow") == 0
    relayed = ask(gateway, "slow", " next", handoff={"from": left[0]["id"]})
    assert ids(relayed)[1] == ids(ask(gateway, "reader", ids(relayed)[0]))[1]


@pytest.mark.chaos
@pytest.mark.fault("B3")
def test_an_abort_after_a_failed_load_leaves_nothing_for_the_next_request(
    gateway: RealGateway, folder: Path, speed: Path
) -> None:
    """A load that turns out wrong, its request aborted around that moment, then the same prefix again."""
    wrong = given_up_ = 0
    for seed in range(100, 112):
        left = leave(gateway, seed)
        path = entry(folder, left)
        data = bytearray(path.read_bytes())
        data[-5] ^= 1  # the last chunk: all blocks but the last are in the pool by then
        path.write_bytes(data)
        speed.write_text(str(len(data) / 0.05))
        body = {"model": "slow", "prompt": " and", "max_tokens": 20, "handoff": {"from": left["id"]}}
        given_up_ += asyncio.run(given_up(gateway, [body], 0.03 + 0.02 * (seed - 100)))
        speed.unlink()
        again = ask(gateway, "slow", " and", handoff={"from": left["id"]})
        wrong += ids(again)[1] != ids(ask(gateway, "reader", ids(again)[0]))[1]
    print(f"\nB3: 12 failed loads, {given_up_} of their requests aborted, {wrong} wrong answers after them")
    assert given_up_ > 0
    assert wrong == 0


@pytest.mark.parametrize("gone", ["file", "folder"])
@pytest.mark.fault("B6")
def test_an_entry_that_vanishes_or_cannot_be_read_is_recomputed(
    gateway: RealGateway, folder: Path, gone: str
) -> None:
    left = leave(gateway, 200)
    path = entry(folder, left)
    path.unlink()
    if gone == "folder":
        path.mkdir()
    relayed = ask(gateway, "reader", " and", handoff={"from": left["id"]})
    if gone == "folder":
        path.rmdir()
    assert told(relayed)["source"]["outcome"] == "recomputed"
    assert cached(relayed) == 0
    assert ids(relayed)[1] == ids(ask(gateway, "reader", ids(relayed)[0]))[1]


@pytest.mark.fault("D1")
async def test_a_hundred_requests_start_from_one_handoff_at_once(gateway: RealGateway) -> None:
    left = leave(gateway, 300, sentences=4)
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as sdk:
        asked = [
            sdk.completions.create(
                model=("reader", "writer")[number % 2],
                prompt=f" {number % 10}",
                max_tokens=4,
                temperature=0,
                extra_body={"handoff": {"from": left["id"]}, "return_token_ids": True},
            )
            for number in range(100)
        ]
        answers = await asyncio.gather(*asked)
    truth = {
        number: ids(ask(gateway, "reader", ids(answers[number])[0], max_tokens=4))[1] for number in range(10)
    }
    wrong = sum(ids(answer)[1] != truth[number % 10] for number, answer in enumerate(answers))
    print(f"\nD1: 100 consumers of one handoff at once, {wrong} wrong")
    assert wrong == 0
    assert all(told(answer)["source"]["outcome"] in ("loaded", "resident") for answer in answers)
    assert settle(gateway, "reader") == 0


@pytest.mark.fault("D2")
def test_an_aborted_producer_leaves_a_whole_handoff_or_none(gateway: RealGateway) -> None:
    prompt = text(400, sentences=4)
    body = {"model": "reader", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    bodies = [body | {"handoff": {"save": {"label": "d2"}}} for _ in range(32)]
    alike = [
        body | {"handoff": {"save": True}}
    ] * AT_ONCE  # without `handoff` they would start from stored KV
    unfinished = asyncio.run(given_up(gateway, bodies, 2 * asyncio.run(duration(gateway, alike))))
    settle(gateway, "reader")
    with gateway.client() as client:
        rows = client.get("/v1/handoffs?limit=100").json()["data"]
    made = [row for row in rows if row["label"] == "d2"]  # and nothing that an earlier test left behind
    whole = len(ids(ask(gateway, "reader", prompt, max_tokens=1))[0]) + 12
    half = [row for row in made if row["state"] == "ready" and row["tokens"] != whole]
    states = {row["state"] for row in made}
    print(f"\nD2: 32 producers, {unfinished} given up, half-visible {len(half)}, states {sorted(states)}")
    assert 0 < unfinished < 32
    assert half == []
    assert states <= {"ready", "failed"}
    for row in made:
        if row["state"] == "failed":
            with pytest.raises(openai.NotFoundError):
                ask(gateway, "reader", " x", handoff={"from": row["id"]})


@pytest.mark.fault("D4")
def test_a_handoff_deleted_during_a_load_is_loaded_to_the_end_and_then_gone(
    gateway: RealGateway, folder: Path, speed: Path
) -> None:
    loads_again(gateway, 5000)
    left = leave(gateway, 500)
    speed.write_text(str(entry(folder, left).stat().st_size / 1.5))

    async def story() -> httpx.Response:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            body = {"model": "slow", "prompt": " and", "max_tokens": 4, "temperature": 0}
            body |= {"handoff": {"from": left["id"]}, "return_token_ids": True}
            loading = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(0.6)
            assert (await client.delete(f"/v1/handoffs/{left['id']}")).status_code == 204
            answer = await loading
            gone = await client.post("/v1/completions", json=body)
            assert gone.status_code == 404
            return answer

    told_ = asyncio.run(story()).json()
    assert told_["handoff"]["source"]["outcome"] == "loaded", told_["handoff"]
    choice = told_["choices"][0]
    assert choice["token_ids"] == ids(ask(gateway, "reader", choice["prompt_token_ids"], max_tokens=4))[1]


@pytest.mark.fault("D8")
def test_a_clients_transfer_fields_never_reach_an_engine(gateway: RealGateway) -> None:
    values: list[Any] = [7, "x", [], {}, {"baton_kv": {"load": "x" * 9000}}, {"prompt_token_ids": [1]}, None]
    plain = ids(ask(gateway, "reader", "a b c", max_tokens=2))
    for value in values:
        for field in ("kv_transfer_params", "cache_salt", "ec_transfer_params"):
            more = {field: value, "vllm_xargs": {field: value if isinstance(value, str | int) else "y"}}
            assert ids(ask(gateway, "reader", "a b c", max_tokens=2, **more)) == plain
    assert httpx.get(f"{gateway.url}/readyz").status_code == 200


@pytest.mark.chaos
def test_the_planner_turns_to_computing_when_the_store_is_slow_and_back(
    gateway: RealGateway, folder: Path, speed: Path
) -> None:
    """Entries of 20 MB, as they are read at 5 MB a second, against a prefill of half a second.

    A machine that does other things measures worse, and needs more requests to see what has changed.
    """
    loads_again(gateway, 6000)
    numbers = itertools.count()

    def decisions(until: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while len(found) < 5 or (found[-1]["decision"] != until and len(found) < 20):
            number = next(numbers)
            fresh = leave(gateway, 700 + number)  # nothing of it is resident in the engine
            answer = ask(gateway, "slow", " and", handoff={"from": fresh["id"]})
            assert ids(answer)[1] == ids(ask(gateway, "reader", ids(answer)[0]))[1]
            source = told(answer)["source"]
            assert source["loaded_tokens"] + source["resident_tokens"] == cached(answer)
            found.append(source)
        return found

    speed.write_text(str(SLOW))
    slow = decisions("recompute")
    assert slow[-1]["decision"] == "recompute"
    assert slow[-1]["estimated_load_ms"] > slow[-1]["estimated_prefill_ms"]
    speed.unlink()
    back = decisions("load")
    at_5, again = ([row["decision"] for row in rows] for rows in (slow, back))
    print(f"\nplanner: at 5 MB/s {at_5}, at full speed again {again}")
    assert back[-1]["decision"] == "load"
