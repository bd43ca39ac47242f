"""Two real gateways over one store: a machine is lost under load, and the store fails in every way, under relays."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from support.envoy_proxy import Envoy
from support.gateways import Leftovers, RealGateway
from support.relay_requests import DOCUMENT, ask, ids, once_saved, told
from support.shared_gateways import gateways_over
from support.shared_stores import BINARIES, store_server

from baton_client import Baton

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(BINARIES["valkey"] is None, reason="no valkey-server is installed"),
]
OWN = " In the end"
REQUESTS, BEFORE, CLIENTS = 580, 60, 4
FAULTS_FOR_S = 150.0


@pytest.mark.fault("C14")
def test_when_a_machine_is_lost_another_one_goes_on_from_its_handoffs(tmp_path: Path) -> None:
    """Kill A's gateway, engines and all, under load behind Envoy: no request that comes after it fails."""
    with (
        store_server("valkey", tmp_path) as server,
        gateways_over(server.url, tmp_path) as (one, two),
        Envoy(tmp_path, [urlsplit(each.url).port or 0 for each in (one, two)]) as front,
    ):
        saved = once_saved(one, told(ask(one, "smollm2", DOCUMENT, handoff={"save": True})))
        once_saved(two, saved | {"state": "pending"})
        seen, killed_at, first = Counter[object](), threading.Event(), list[float]()
        leftovers = Leftovers(one.process.pid)
        died = [0.0]

        def request(number: int) -> None:
            if number == BEFORE:
                one.process.send_signal(signal.SIGKILL)
                one.process.wait(10)
                died[0] = time.monotonic()
                killed_at.set()
            late = killed_at.is_set()
            body = {"model": "smollm2", "prompt": f"{number} birds", "max_tokens": 1}
            try:
                answer = httpx.post(f"{front.url}/v1/completions", json=body, timeout=60)
                outcome: object = answer.status_code if answer.is_success else answer.text
            except httpx.HTTPError as error:
                outcome = type(error).__name__
            seen[(late, outcome)] += 1
            if late and outcome == 200 and not first:
                first.append(time.monotonic())

        with ThreadPoolExecutor(CLIENTS) as pool:
            loading = [pool.submit(request, number) for number in range(REQUESTS)]
            assert killed_at.wait(120)
            with Baton(front.url) as baton:  # sends again what the lost gateway had
                again = baton.chat("smollm2", "Name a bird.", max_tokens=1)
            assert again.text is not None
            relayed = ask(front, "smollm2", OWN, handoff={"from": saved["id"]})  # type: ignore[arg-type]  # has a URL too
            for each in loading:
                each.result()
        leftovers.assert_none()
        source = told(relayed)["source"]
        right = ids(ask(two, "smollm2", ids(relayed)[0]))[1]
    late = Counter({outcome: count for (late, outcome), count in seen.items() if late})
    print(f"\nC14: after the loss {dict(late)}, first answer after {first[0] - died[0]:.2f} s; B: {source}")
    assert (set(late), sum(late.values()) >= 500) == ({200}, True)
    assert (source["outcome"], source["loaded_tokens"]) == ("loaded", saved["tokens"] - 1)
    assert ids(relayed)[1] == right


@pytest.mark.fault("I1")
def test_a_gateway_that_answers_for_an_engine_is_lost_and_comes_back(tmp_path: Path) -> None:
    """Its requests fail, the engine here goes on, and the same handoffs are there afterwards."""
    with (
        store_server("valkey", tmp_path) as server,
        gateways_over(server.url, tmp_path, elsewhere=True) as (far, near),
        near.client() as client,
    ):
        saved = once_saved(near, told(ask(near, "there", DOCUMENT, handoff={"save": True})))
        far.stop()
        body = {"model": "there", "prompt": "a", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code in (502, 503)
        assert client.post("/v1/completions", json=body | {"model": "smollm2"}).status_code == 200
        deadline = time.monotonic() + 60
        while client.get("/readyz").json()["engines"].get("unreachable") != 1:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        far._arguments += ["--port", far.url.rpartition(":")[2]]
        far.__enter__()
        far.wait_until_ready()
        deadline = time.monotonic() + 60
        while client.get("/readyz").json()["status"] != "ready":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        again = ask(near, "there", OWN, handoff={"from": saved["id"]})
    assert told(again)["source"]["outcome"] == "loaded"


@pytest.mark.fault("C15")
def test_whatever_the_store_does_no_relay_says_a_wrong_token(tmp_path: Path) -> None:
    """Stop it, flush it, kill and start it, while chains of handoffs go from one gateway to the other."""
    chance = random.Random(5)
    with store_server("valkey", tmp_path) as first:
        port, url = urlsplit(first.url).port or 0, first.url
        with gateways_over(url, tmp_path) as (one, two):
            over, outcomes, longest = threading.Event(), Counter[str](), [0.0]
            first.kill()

            def break_it() -> None:
                while not over.is_set():
                    with store_server("valkey", tmp_path, port=port) as server:
                        for _ in range(chance.randrange(1, 4)):
                            over.wait(chance.uniform(2, 8))  # most relays take less
                            if chance.random() < 0.5:
                                server.client.flushall()
                            else:
                                with server.stopped():
                                    over.wait(chance.uniform(0.2, 3))
                        server.kill()
                    over.wait(chance.uniform(0, 2))

            breaking = threading.Thread(target=break_it)
            breaking.start()
            try:
                ends = time.monotonic() + FAULTS_FOR_S
                while time.monotonic() < ends:
                    outcome, took = relay(one, two, chance.randrange(3))
                    outcomes[outcome] += 1
                    longest[0] = max(longest[0], took)
            finally:
                over.set()
                breaking.join()
        print(f"\nC15: {dict(outcomes)}, longest {longest[0]:.1f} s")
    assert outcomes["loaded"]
    assert outcomes["recomputed"] + outcomes["handoff_not_found"] + outcomes["handoff_store_unavailable"]


def relay(one: RealGateway, two: RealGateway, number: int) -> tuple[str, float]:
    """Hand a context from one gateway to the other; returns the outcome there and how long B took."""
    saved = told(ask(one, "smollm2", f"{number}. {DOCUMENT}", handoff={"save": True}))
    began = time.monotonic()
    with two.client() as client:
        body = {
            "model": "smollm2",
            "prompt": OWN,
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
            "handoff": {"from": saved["id"]},
        }
        answer = client.post("/v1/completions", json=body)
    took = time.monotonic() - began
    found = answer.json()
    if not answer.is_success:
        return str(found["error"]["code"]), took
    prompt = found["choices"][0]["prompt_token_ids"]
    plain = ids(ask(two, "smollm2", prompt))[1]
    assert found["choices"][0]["token_ids"] == plain
    return str(found["handoff"]["source"]["outcome"]), took
