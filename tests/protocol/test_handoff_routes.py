"""`/v1/handoffs` on the wire, with a fake engine: computed, listed, shown, changed, deleted, and whose they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, Held, run_fake
from support.handoff_requests import TEXT, first_handoff, leave, post
from support.raw_requests import connect, request, wait_for

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeEngine


@pytest.fixture
def relay() -> Iterator[FakeGateway]:
    engines = (
        FakeEngine("a", supports_handoffs=True),
        FakeEngine("same", supports_handoffs=True),
        FakeEngine("other", supports_handoffs=True, weights="others"),
        FakeEngine("plain"),
    )
    with run_fake(*engines) as gateway:
        yield gateway


def test_handoffs_are_listed_shown_and_deleted(relay: FakeGateway) -> None:
    first, second = leave(relay), leave(relay)
    with relay.client() as client:
        assert [row["id"] for row in client.get("/v1/handoffs").json()["data"]] == [second, first]
        shown = client.get(f"/v1/handoffs/{first}").json()
        assert (shown["tokens"], shown["model"], shown["bytes"]) == (6, "a", 0)
        assert client.delete(f"/v1/handoffs/{first}").status_code == 204
        for method in ("GET", "DELETE"):
            assert client.request(method, f"/v1/handoffs/{first}").status_code == 404
    assert post(relay, TEXT | {"handoff": {"from": first}}).status_code == 404


def test_a_handoff_deleted_while_it_is_pending_does_not_come_back(relay: FakeGateway) -> None:
    behaviour = relay.engine("a").behaviour
    behaviour.token_seconds = 0.05
    sent = TEXT | {"max_tokens": 400, "handoff": {"save": True}}  # pending until it may go faster
    slow = threading.Thread(target=lambda: post(relay, sent))
    slow.start()
    pending = first_handoff(relay)
    with relay.client() as client:
        assert client.delete(f"/v1/handoffs/{pending}").status_code == 204
        behaviour.token_seconds = 0
        slow.join()
        time.sleep(0.6)
        assert client.get("/v1/handoffs").json()["data"] == []
        assert client.get(f"/v1/handoffs/{pending}").status_code == 404


def test_an_expired_handoff_is_gone(relay: FakeGateway) -> None:
    left = leave(relay, handoff={"save": {"ttl_s": 1}})
    time.sleep(1.05)
    response = post(relay, TEXT | {"handoff": {"from": left}})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "handoff_not_found")


@pytest.mark.fault("D5")
def test_another_tenants_handoff_is_answered_as_unknown(tmp_path: Path) -> None:
    keys = {name: create_key(tmp_path / "keys.json", name) for name in ("acme", "globex")}
    with run_fake(
        FakeEngine("a", supports_handoffs=True), auth={"keys_file": tmp_path / "keys.json"}
    ) as gateway:

        def ask(name: str, method: str, path: str, **options: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {keys[name]}"}
            with gateway.client(headers=headers) as client:
                return client.request(method, path, **options)

        sent = TEXT | {"handoff": {"save": True}}
        left = ask("acme", "POST", "/v1/completions", json=sent).json()["handoff"]["id"]
        told = []
        for guess in (left, "A" * len(left)):
            stolen = ask("globex", "POST", "/v1/completions", json=TEXT | {"handoff": {"from": guess}})
            told.append((stolen.status_code, stolen.json()["error"] | {"request_id": ""}))
            assert ask("globex", "GET", f"/v1/handoffs/{guess}").status_code == 404
            assert ask("globex", "DELETE", f"/v1/handoffs/{guess}").status_code == 404
        assert told[0] == told[1]
        assert ask("globex", "GET", "/v1/handoffs").json()["data"] == []
        assert ask("acme", "GET", f"/v1/handoffs/{left}").status_code == 200


def test_the_list_comes_in_pages(relay: FakeGateway) -> None:
    left = [leave(relay) for _ in range(5)][::-1]
    with relay.client() as client:
        first = client.get("/v1/handoffs", params={"limit": 2}).json()
        assert ([row["id"] for row in first["data"]], first["has_more"]) == (left[:2], True)
        rest = client.get("/v1/handoffs", params={"limit": 3, "after": first["last_id"]}).json()
        assert ([row["id"] for row in rest["data"]], rest["has_more"]) == (left[2:], False)
        assert client.get("/v1/handoffs", params={"limit": 0}).status_code == 400
        assert client.get("/v1/handoffs", params={"after": "nobody"}).status_code == 404


def test_a_handoff_s_label_life_and_pin_can_be_changed(relay: FakeGateway) -> None:
    left = leave(relay)
    with relay.client() as client:
        told = client.patch(f"/v1/handoffs/{left}", json={"label": "new", "pin": True, "ttl_s": 60}).json()
        assert (told["label"], told["pin"]) == ("new", True)
        assert 40 <= told["expires_at"] - time.time() <= 61
        assert client.patch(f"/v1/handoffs/{left}", json={"label": None}).json()["label"] is None
        assert client.get(f"/v1/handoffs/{left}").json()["pin"] is True
        assert client.patch(f"/v1/handoffs/{left}", json={"ttl": 1}).status_code == 400
        assert client.patch("/v1/handoffs/unknown", json={"pin": True}).status_code == 404


def test_no_life_that_is_asked_for_is_longer_than_the_settings_allow() -> None:
    with run_fake(
        FakeEngine("a", supports_handoffs=True), handoffs={"ttl_s": 60, "max_life_s": 90}
    ) as gateway:
        left = leave(gateway, handoff={"save": {"ttl_s": 600}})
        with gateway.client() as client:
            told = client.get(f"/v1/handoffs/{left}").json()
            assert 60 <= told["expires_at"] - told["created_at"] <= 75
            for _ in range(3):
                told = client.patch(f"/v1/handoffs/{left}", json={"ttl_s": 600}).json()
                assert 40 <= told["expires_at"] - time.time() <= 61
                assert told["expires_at"] - told["created_at"] <= 90


def test_a_computed_context_that_takes_long_is_a_202_and_then_ready() -> None:
    with run_fake(FakeEngine("a", supports_handoffs=True), handoffs={"wait_s": 0.05}) as gateway:
        gateway.engine("a").behaviour.token_seconds = 0.3
        response = post(gateway, {"model": "a", "prompt": "1 2"}, "/v1/handoffs")
        told = response.json()
        assert (response.status_code, told["state"]) == (202, "pending")
        with gateway.client() as client:
            deadline = time.monotonic() + 20
            while client.get(response.headers["location"]).json()["state"] != "ready":
                assert time.monotonic() < deadline
                time.sleep(0.02)


@pytest.mark.parametrize(("wait_s", "status", "state"), [(20.0, 201, "ready"), (0.05, 202, "pending")])
def test_a_context_is_waited_for_until_it_is_saved(
    monkeypatch: pytest.MonkeyPatch, wait_s: float, status: int, state: str
) -> None:
    """Longer than an answer waits for its own: nobody reads anything meanwhile."""
    held = Held()
    monkeypatch.setattr("baton.library.saving.Saving._kv_known", lambda *_: held(1))
    with run_fake(FakeEngine("a", supports_handoffs=True), handoffs={"wait_s": wait_s}) as gateway:
        monkeypatch.setattr("baton.relay.run.SETTLE_WITHIN_S", 0.0)
        let_go = threading.Timer(0.5, held.release)
        let_go.start()
        made = post(gateway, {"model": "a", "prompt": "1 2"}, "/v1/handoffs")
        let_go.join()
    assert (made.status_code, made.json()["state"]) == (status, state)


@pytest.mark.fault("E2")
def test_a_client_that_leaves_a_context_being_computed_ends_the_engine_s_work(relay: FakeGateway) -> None:
    engine = relay.engine("a")
    engine.behaviour.token_seconds = 60
    with connect(relay) as connection:
        connection.sendall(request({"model": "a"}, "/v1/handoffs"))
        wait_for(lambda: engine.active == 1, "it is not under way")
    wait_for(lambda: engine.aborted == 1, "the engine goes on")
    assert engine.active == 0
    with relay.client() as client:
        assert [row["state"] for row in client.get("/v1/handoffs").json()["data"]] == ["failed"]
