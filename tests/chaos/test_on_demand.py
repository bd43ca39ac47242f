"""Three real models in room for two: mixed requests, kills in every transition, and one that lies about its memory."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.gateways import RealGateway
from support.raw_requests import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.timeout(900)]
CONFIG = Path(__file__).parent / "on_demand.toml"
MODELS = ("a", "b", "liar")
BUDGET = 3500 * 2**20
REQUESTS, CLIENTS = 200, 6


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    folder = tmp_path_factory.mktemp("on_demand")
    config = folder / "baton.toml"
    config.write_text(CONFIG.read_text().format(folder=folder))
    shutil.copytree(Path.home() / ".cache/baton/models/smollm2", folder / "broken")
    (folder / "broken/model.safetensors").write_bytes(b"no weights at all")
    with RealGateway(["--config", str(config)], folder) as running:
        running.wait_until_ready()
        yield running


def rows(gateway: RealGateway) -> dict[str, dict[str, Any]]:
    found = httpx.get(f"{gateway.url}/v1/engines", timeout=30).json()["data"]
    return {each["name"]: each for each in found}


def cores(gateway: RealGateway) -> list[psutil.Process]:
    """The engine cores that run; one that has ended may not have been reaped yet."""
    children = psutil.Process(gateway.process.pid).children(recursive=True)
    running = [each for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in running if "EngineCor" in each.name()]


def ask(gateway: RealGateway, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0} | more
    return httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=180)


def answered(gateway: RealGateway, model: str) -> None:
    wait_for(lambda: ask(gateway, model).status_code == 200, f"'{model}' does not answer", 120)


@pytest.mark.fault("A22")
@pytest.mark.fault("A25")
def test_two_hundred_mixed_requests_for_three_models_in_room_for_two(gateway: RealGateway) -> None:
    """All are answered, none waits for ever, and what runs takes no more than there is but for a moment."""
    chance = random.Random(44)
    kinds = [
        (chance.choice(MODELS), chance.choice(("whole", "stream", "chat", "handoff")))
        for _ in range(REQUESTS)
    ]
    waits: dict[str, list[float]] = {name: [] for name in MODELS}
    faults: list[object] = []
    over: list[bool] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            held = sum(row["memory_bytes"] or 0 for row in rows(gateway).values() if row["state"] == "ready")
            over.append(held > BUDGET)

    def one(model: str, kind: str) -> None:
        began = time.monotonic()
        if kind == "stream":
            body = {"model": model, "prompt": "Rome is", "max_tokens": 24, "stream": True, "ignore_eos": True}
            body["stream_options"] = {"include_usage": True}
            with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=180) as stream:
                lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
            used = json.loads(lines[-2])["usage"]["completion_tokens"] if len(lines) > 1 else 0
            faults.extend([] if (used, lines[-1]) == (24, "[DONE]") else [lines[-3:]])
        elif kind == "chat":
            messages = [{"role": "user", "content": "Name a river."}]
            body = {"model": model, "messages": messages, "max_tokens": 8}
            answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=180)
            faults.extend([] if answer.status_code == 200 else [answer.text])
        else:
            saves = {"handoff": {"save": True}} if kind == "handoff" and model == "a" else {}
            answer = ask(gateway, model, **saves)
            faults.extend([] if answer.status_code == 200 else [answer.text])
        waits[model].append(time.monotonic() - began)

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(CLIENTS) as pool:
        began = time.monotonic()
        list(pool.map(lambda each: one(*each), kinds))
        took = time.monotonic() - began
    done.set()
    watching.join()
    shown = rows(gateway)
    swaps = Counter(
        json.loads(line)["engine"] for line in gateway.log.splitlines() if '"engine_loading"' in line
    )
    worst = {name: round(max(each), 1) for name, each in waits.items()}
    print(
        f"A22: {REQUESTS} requests of {CLIENTS} clients in {took:.0f} s, loads {dict(swaps)}, worst wait {worst} s, "
        f"over the budget at {sum(over)} of {len(over)} looks"
    )
    assert faults == []
    # Two models before it, each with its stay, its requests and its start.
    assert max(worst.values()) < 90
    assert shown["liar"]["memory_from"] == "measured"
    assert shown["liar"]["memory_needed_bytes"] > 2**29
    assert '"engine_larger_than_said"' in gateway.log


@pytest.mark.fault("A27")
def test_a_core_killed_in_any_transition_costs_its_own_requests_alone(gateway: RealGateway) -> None:
    def unloaded(name: str) -> None:
        httpx.post(f"{gateway.url}/v1/engines/{name}/stop", timeout=30)
        wait_for(lambda: rows(gateway)[name]["state"] == "stopped", f"'{name}' is not stopped", 60)
        httpx.post(f"{gateway.url}/v1/engines/{name}/start", timeout=30)

    for each in ("a", "b", "liar"):
        httpx.post(f"{gateway.url}/v1/engines/{each}/stop", timeout=30)
    wait_for(lambda: not cores(gateway), "cores are left", 60)
    with ThreadPoolExecutor() as pool:
        # While it starts: its request is refused, and the next one loads it.
        httpx.post(f"{gateway.url}/v1/engines/a/start", timeout=30)
        wait_for(lambda: cores(gateway), "no core began", 60)
        waiting = pool.submit(ask, gateway, "a")
        for core in cores(gateway):
            core.kill()
        assert waiting.result().status_code in (200, 503)
        answered(gateway, "a")
        # While it is ready: it is restarted.
        for core in cores(gateway):
            core.kill()
        wait_for(lambda: rows(gateway)["a"]["restarts"] >= 1, "its loss is not seen", 60)
        answered(gateway, "a")
        # While its stream ends, before it makes room for others: these come all the same.
        held = cores(gateway)
        for name in ("b", "liar"):
            httpx.post(f"{gateway.url}/v1/engines/{name}/start", timeout=30)
        body = {"model": "a", "prompt": "x", "max_tokens": 900, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=180) as stream:
            lines = stream.iter_lines()
            next(lines)
            others = [pool.submit(ask, gateway, name) for name in ("b", "liar")]
            wait_for(
                lambda: rows(gateway)["a"]["state"] in ("unloading", "unloaded"), "it does not leave", 120
            )
            for core in held:
                with contextlib.suppress(psutil.NoSuchProcess):
                    core.kill()
            rest = "".join(lines)
        assert "[DONE]" in rest or '"engine_' in rest, rest[-300:]
        assert [each.result().status_code for each in others] == [200, 200]
        # While it is stopped.
        answered(gateway, "a")
        unloaded("b")
    for name in MODELS:
        answered(gateway, name)
    ready = [row for row in rows(gateway).values() if row["state"] == "ready"]
    wait_for(
        lambda: len(cores(gateway)) == sum(r["state"] == "ready" for r in rows(gateway).values()),
        "cores are left",
        60,
    )
    print(f"A27: after four kills {len(ready)} engines are ready")
    assert "Traceback" not in gateway.log


@pytest.mark.fault("A24")
def test_a_model_that_cannot_start_falls_back_and_holds_no_memory(gateway: RealGateway) -> None:
    answer = ask(gateway, "broken")
    assert (answer.status_code, answer.headers["x-baton-fallback"]) == (200, "a")
    shown = rows(gateway)["broken"]
    assert (shown["state"], shown["memory_bytes"]) == ("unloaded", None)
    assert "log says why" in shown["why"]
    for name in MODELS:
        answered(gateway, name)


@pytest.mark.fault("A28")
def test_kv_that_is_saved_as_its_model_makes_room_is_whole(gateway: RealGateway) -> None:
    """The others wait for the room while the answer is computed, and get it as it ends."""
    for name in ("b", "liar"):
        httpx.post(f"{gateway.url}/v1/engines/{name}/stop", timeout=30)
        wait_for(lambda name=name: rows(gateway)[name]["state"] == "stopped", f"'{name}' is not stopped", 60)
    answered(gateway, "a")
    body = {"model": "a", "prompt": "one two three " * 100, "max_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        saving = pool.submit(ask, gateway, handoff={"save": True}, **body)
        wait_for(lambda: rows(gateway)["a"]["running"], "it does not run", 60)
        for name in ("b", "liar"):
            httpx.post(f"{gateway.url}/v1/engines/{name}/start", timeout=30)
        wait_for(lambda: rows(gateway)["a"]["state"] in ("unloading", "unloaded"), "it does not leave", 120)
        left = saving.result().json()["handoff"]["id"]
    source = ask(gateway, "a", prompt=" and", handoff={"from": left}).json()["handoff"]["source"]
    print(f"A28: saved as it made room: {source}")
    assert source["outcome"] == "loaded"
    assert source["loaded_tokens"] >= 599
