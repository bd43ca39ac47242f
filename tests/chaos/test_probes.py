"""Two tenants, two gateways over one store, and a thousand requests of one against the other: none gets through."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake
from support.hostile import EVIL, ROUTES, TOO_MUCH, asking, hostile_json

from baton.admission.api_keys import create_key
from baton.config.groups import EngineSettings
from baton.engines.fake.engine import FakeBehaviour, FakeEngine

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
ROWS = ("B12", "D4", "E7", "E8", "E10", "E13", "F1", "F2", "G1", "G2", "G9")
pytestmark += [pytest.mark.fault(row) for row in ROWS]
BUDGET = 8 * 1024 * 1024
STARTS_WITHIN_S = 2.0
FLOOD = 300
RACES = 60
DOCUMENTED = frozenset(
    {200, 201, 202, 204, 400, 401, 403, 404, 405, 406, 408, 409, 413, 415, 421, 422, 429, 503}
)


@dataclass
class Probes:
    """Two gateways, clients of two tenants at each, and what was asked and found."""

    folder: Path
    gateways: list[FakeGateway]
    keys: dict[str, str]
    asked: int = 0
    violations: list[str] = field(default_factory=list)

    @contextmanager
    def client(self, tenant: str, gateway: int = 0) -> Iterator[httpx.Client]:
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        with httpx.Client(base_url=self.gateways[gateway].url, headers=headers, timeout=60) as client:
            yield client

    def expect(self, holds: bool, violation: str) -> None:
        self.asked += 1
        if not holds:
            self.violations.append(violation)

    def bytes_on_disk(self) -> int:
        return sum(file.stat().st_size for file in (self.folder / "store").rglob("*") if file.is_file())


@pytest.fixture
def probes(tmp_path: Path) -> Iterator[Probes]:
    keys = {tenant: create_key(tmp_path / "keys.json", tenant) for tenant in ("acme", "globex")}
    settings: dict[str, Any] = {
        "auth": {"keys_file": tmp_path / "keys.json"},
        "handoffs": {"store": f"file:{tmp_path / 'store'}", "budget": BUDGET},
        "admission": {"engine_requests": 8},
        "engines": (
            EngineSettings(name="text", model="fake", handoff=True),
            EngineSettings(name="embed", model="fake", runner="pooling"),
        ),
    }
    with ExitStack() as stack:
        gateways = [
            stack.enter_context(
                run_fake(
                    FakeEngine("text", supports_handoffs=True, behaviour=FakeBehaviour(token_seconds=0.002)),
                    FakeEngine("embed", pooling=True),
                    **settings,
                )
            )
            for _ in range(2)
        ]
        yield Probes(tmp_path, gateways, keys)


def saved(client: httpx.Client, prompt: str = "a secret of mine") -> str:
    answer = client.post("/v1/handoffs", json={"model": "text", "prompt": prompt})
    assert answer.status_code == 201, answer.text
    made: str = answer.json()["id"]
    return made


def shape(answer: httpx.Response) -> Any:
    """What a client can tell two refusals apart by."""
    error = dict(answer.json()["error"]) if answer.content else {}
    error.pop("request_id", None)
    return answer.status_code, error


def ask_of_others(probes: Probes) -> None:
    """Every way to use a handoff, asked by who does not own it, is answered as for one that never was."""
    with probes.client("acme") as owner:
        own = [saved(owner, f"secret {number}") for number in range(8)]
    for gateway, target in itertools.product((0, 1), own):
        with probes.client("globex", gateway) as other:
            ways = (
                lambda client, name: client.get(f"/v1/handoffs/{name}"),
                lambda client, name: client.patch(f"/v1/handoffs/{name}", json={"pin": True}),
                lambda client, name: client.delete(f"/v1/handoffs/{name}"),
                lambda client, name: client.post(
                    "/v1/completions",
                    json={"model": "text", "prompt": "go on", "handoff": {"from": name}},
                ),
                lambda client, name: client.post(
                    "/v1/handoffs", json={"model": "text", "prompt": "go on", "from": name}
                ),
            )
            for number, way in enumerate(ways):
                theirs, nobody = way(other, target), way(other, "A" * len(target))
                same = shape(theirs) == shape(nobody) and theirs.status_code == 404
                probes.expect(same, f"way {number} at gateway {gateway}: {theirs.text}")
            listed = other.get("/v1/handoffs", params={"limit": 100}).json()["data"]
            probes.expect(all(row["id"] not in own for row in listed), "another's handoff is listed")
    with probes.client("acme", 1) as owner:
        for name in own:
            probes.expect(owner.get(f"/v1/handoffs/{name}").status_code == 200, "the owner lost a handoff")


def ask_nonsense(probes: Probes) -> None:
    """Bodies made to break a server: a documented status, in our shape, and never a 5xx but 503."""
    with probes.client("globex") as client:
        for route in ROUTES:
            bodies = [body for _, body, _, _ in hostile_json(route)]
            bodies += [asking(route, more) for more in (*TOO_MUCH.values(), *EVIL.values())]
            for body in bodies:
                answer = client.post(route, content=body, headers={"Content-Type": "application/json"})
                told = answer.status_code in DOCUMENTED and (
                    answer.status_code < 400 or "code" in answer.json()["error"]
                )
                probes.expect(told, f"{route}: {answer.status_code} {answer.text[:200]}")
        for headers in ({}, {"Authorization": "Bearer nobody's"}):
            for route in (*ROUTES, "/v1/models", "/v1/plugins", "/docs", "/openapi.json", "/metrics"):
                answer = httpx.post(probes.gateways[0].url + route, json={}, headers=headers)
                probes.expect(answer.status_code == 401, f"{route} without a key: {answer.status_code}")


def flood(probes: Probes) -> None:
    """While one tenant holds every place and queues for more, another's request starts within two seconds."""
    over = threading.Event()
    body = {"model": "text", "prompt": "one two three", "max_tokens": 2000, "stream": True}

    def stream() -> None:
        with probes.client("acme") as client, client.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_lines():
                if over.is_set():
                    return

    with ThreadPoolExecutor(FLOOD) as pool:
        for _ in range(FLOOD):
            pool.submit(stream)
        time.sleep(1)
        with probes.client("globex") as client:
            for _ in range(5):
                began = time.monotonic()
                answer = client.post("/v1/completions", json=body | {"max_tokens": 1, "stream": False})
                took = time.monotonic() - began
                fair = answer.status_code == 200 and took < STARTS_WITHIN_S
                probes.expect(fair, f"beside a flood: {answer.status_code} after {took:.1f} s")
        over.set()


def overfill(probes: Probes) -> None:
    """Whatever is saved at both gateways, pinned or not: the budget holds on disk, and one tenant's pins too."""
    messages = [{"role": "user", "content": "\x01\U0001f600" * 20_000}]
    pinned: dict[str, int] = dict.fromkeys(probes.keys, 0)
    for number in range(60):
        tenant = ("acme", "acme", "globex")[number % 3]
        with probes.client(tenant, number % 2) as client:
            answer = client.post(
                "/v1/handoffs", json={"model": "text", "messages": messages, "pin": True, "ttl_s": 600}
            )
            probes.expect(answer.status_code in DOCUMENTED, f"saving too much: {answer.text[:200]}")
            made = answer.json().get("id")
            if made and client.patch(f"/v1/handoffs/{made}", json={"pin": True}).is_success:
                pinned[tenant] += 1
        size = probes.bytes_on_disk()
        probes.expect(size <= BUDGET, f"{size} bytes on disk, {BUDGET} are allowed")


def race(probes: Probes) -> None:
    """A handoff deleted at one gateway while it is changed at the other is gone at both."""
    for number in range(RACES):
        with probes.client("acme", 0) as here, probes.client("acme", 1) as there:
            name = saved(here, f"race {number}")
            assert there.get(f"/v1/handoffs/{name}").status_code == 200
            with ThreadPoolExecutor(2) as pool:
                changing = pool.submit(there.patch, f"/v1/handoffs/{name}", json={"label": "again"})
                deleting = pool.submit(here.delete, f"/v1/handoffs/{name}")
            deleted, changed = deleting.result().status_code, changing.result().status_code
            left = [client.get(f"/v1/handoffs/{name}").status_code for client in (here, there)]
            gone = deleted == 204 and changed in (200, 404) and left == [404, 404]
            probes.expect(gone, f"deleted {deleted}, changed {changed}, then {left}")


def test_no_probe_of_one_tenant_against_another_gets_through(probes: Probes) -> None:
    for probe in (ask_of_others, ask_nonsense, flood, overfill, race):
        began, before = time.monotonic(), probes.asked
        probe(probes)
        print(f"{probe.__name__}: {probes.asked - before} probes, {time.monotonic() - began:.1f} s")
    print(f"{probes.asked} probes, {len(probes.violations)} violations")
    assert probes.violations == []
