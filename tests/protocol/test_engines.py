"""`/v1/engines` on the wire: what everybody may know of the engines, and what operators alone may do."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import structlog
from support.event_streams import Following
from support.gateways import FakeGateway, Held, run_fake
from support.handoff_requests import TEXT, post
from support.raw_requests import metric, wait_for
from support.sample_plugins import Current, plugin

from baton.admission.api_keys import create_key
from baton.engines.backend import ImageInput
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import StartError
from baton.telemetry.logs import configure_logs

ACTS = ("start", "stop", "restart")


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with run_fake(FakeEngine("a"), FakeEngine("org/b:1")) as running:
        yield running


def row(gateway: FakeGateway, name: str, **headers: str) -> dict[str, Any]:
    with gateway.client(headers=headers) as client:
        rows = client.get("/v1/engines").json()["data"]
    return next(each for each in rows if each["name"] == name)


def act(gateway: FakeGateway, name: str, what: str, **headers: str) -> httpx.Response:
    with gateway.client(headers=headers) as client:
        return client.post(f"/v1/engines/{name}/{what}")


def until_state(gateway: FakeGateway, name: str, state: str) -> None:
    wait_for(lambda: row(gateway, name)["state"] == state, f"'{name}' is not {state}")


def test_every_engine_says_what_it_is_good_for_and_does() -> None:
    class Maps(Current):
        can = ("map",)

    images = ImageInput(limit=2)
    chat = FakeEngine("chat", aliases=("gpt",), supports_handoffs=True, placeholder=7, images=images)
    chat.memory_bytes = 2**30
    engines = chat, FakeEngine("embed", pooling=True), FakeEngine("geo", pooling=True, plugin=plugin(Maps()))
    with run_fake(*engines) as gateway, gateway.client() as client:
        shown = client.get("/v1/engines").json()
    assert (shown["object"], shown["operator"]) == ("list", True)
    first, second, third = shown["data"]
    started = first.pop("started_at")
    assert started > 1_700_000_000
    assert first == {
        "object": "engine",
        "name": "chat",
        "models": ["chat", "gpt"],
        "kind": "generate",
        "here": True,
        "state": "ready",
        "why": None,
        "supports_handoffs": True,
        "can": ["generate", "handoffs", "vision", "latent"],
        "running": 0,
        "waiting": 0,
        "tokens_per_s": 0.0,
        "kv_used": None,
        "memory_bytes": 2**30,
        "restarts": 0,
        "start": "always",
        "ready_in_s": None,
        "unloads_in_s": None,
        "memory_needed_bytes": None,
        "memory_from": None,
    }
    assert [(each["kind"], each["can"]) for each in (second, third)] == [
        ("pooling", ["pooling"]),
        ("pooling", ["pooling", "map"]),
    ]
    assert all(set(each) == set(shown["data"][1]) for each in shown["data"][1:])


def test_running_and_waiting_requests_are_counted() -> None:
    held = Held()
    engine = FakeEngine("a", behaviour=FakeBehaviour(token_seconds=1, wait=held))
    with run_fake(engine, admission={"engine_requests": 1}) as gateway:
        asking = [threading.Thread(target=post, args=(gateway, TEXT)) for _ in range(3)]
        for each in asking:
            each.start()
        wait_for(lambda: row(gateway, "a")["waiting"] == 2, "two do not wait")
        assert row(gateway, "a")["running"] == 1
        held.release()
        for each in asking:
            each.join()
        shown = row(gateway, "a")
        assert (shown["running"], shown["waiting"]) == (0, 0)
        wait_for(lambda: row(gateway, "a")["tokens_per_s"] > 0, "its tokens are not counted")


def test_an_operator_stops_and_starts_an_engine(gateway: FakeGateway) -> None:
    """Names with a slash too. The other engine answers all the while."""
    name = "org/b:1"
    with Following(gateway.url) as following:
        answer = act(gateway, name, "stop")
        assert answer.status_code == 202
        assert answer.json()["name"] == name
        stopped = following.wait_for_state(name, "stopped").data
        assert stopped["why"] == row(gateway, name)["why"] == "An operator stopped it."
        refused = post(gateway, TEXT | {"model": name})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "stopped by an operator" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert post(gateway, TEXT).status_code == 200
        with gateway.client() as client:
            assert client.get("/readyz").json() == {
                "status": "degraded",
                "engines": {"ready": 1, "stopped": 1},
            }
        assert row(gateway, name)["started_at"] is None
        assert act(gateway, name, "start").status_code == 202
        following.wait_for_state(name, "ready")
        assert post(gateway, TEXT | {"model": name}).status_code == 200
        assert act(gateway, name, "restart").status_code == 202
        following.wait_for_state(name, "ready")
        wait_for(lambda: gateway.engine(name).starts == 3, "it was not restarted")
        assert row(gateway, name)["restarts"] == 0, "it was never lost"
    counted = [metric(gateway, f'baton_operator_acts_total{{act="{each}",engine="{name}"}}') for each in ACTS]
    assert counted == [1, 1, 1]


def test_a_stop_waits_for_streams_and_a_start_takes_it_back() -> None:
    held = Held()
    engine = FakeEngine("a", behaviour=FakeBehaviour(token_seconds=1, wait=held))
    # The head of a stream without an event yet goes out with its first comment.
    with run_fake(engine, edge={"keep_alive_s": 0.02}) as gateway, gateway.client() as client:
        with client.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as stream:
            wait_for(lambda: engine.active, "it does not run")
            assert act(gateway, "a", "stop").json()["state"] in ("ready", "stopping")
            until_state(gateway, "a", "stopping")
            assert post(gateway, TEXT).status_code == 503
            act(gateway, "a", "start")
            until_state(gateway, "a", "ready")
            act(gateway, "a", "stop")
            until_state(gateway, "a", "stopping")
            held.release()
            assert "[DONE]" in stream.read().decode()
        until_state(gateway, "a", "stopped")
        assert engine.starts == 1


@pytest.mark.fault("G11")
def test_a_key_that_is_no_operators_starts_and_stops_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    acme, operators = create_key(file, "acme"), create_key(file, "acme", operator=True)
    before, written = structlog.get_config(), io.StringIO()
    with run_fake(FakeEngine("a"), auth={"keys_file": file}) as gateway:
        configure_logs("info", "json", written)
        try:
            for what in ACTS:
                for name in ("a", "nowhere"):  # which is which is none of its business
                    refused = act(gateway, name, what, Authorization=f"Bearer {acme}")
                    assert (refused.status_code, refused.json()["error"]["code"]) == (
                        403,
                        "operator_key_needed",
                    )
                assert act(gateway, "a", what).status_code == 401
                assert act(gateway, "a", what, Authorization="Bearer wrong").status_code == 401
            assert gateway.engine("a").starts == 1
            with gateway.client() as client:
                told = [
                    client.get("/v1/engines", headers={"x-api-key": key}).json()["operator"]
                    for key in (acme, operators)
                ]
            assert told == [False, True]
            assert act(gateway, "a", "restart", Authorization=f"Bearer {operators}").status_code == 202
        finally:
            structlog.configure(**before)
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    audit = [line for line in lines if line["event"].startswith("operator_act")]
    assert [line["event"] for line in audit] == ["operator_act_refused"] * 6 + ["operator_act"]
    assert {"act": "restart", "engine": "a", "tenant": "acme"}.items() <= audit[-1].items()
    ids = [each["id"] for each in json.loads(file.read_text())]
    assert [line["key"] for line in audit] == [ids[0]] * 6 + [ids[1]]
    assert all(line["request_id"] for line in audit)
    assert acme not in written.getvalue()
    assert operators not in written.getvalue()


@pytest.mark.fault("G11")
def test_without_keys_only_loopback_has_operators() -> None:
    options: dict[str, Any] = {"host": "0.0.0.0", "auth": {"allow_unauthenticated": True}}
    with run_fake(FakeEngine("a"), **options) as gateway:
        url = gateway.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/engines").json()["operator"] is False
        refused = httpx.post(f"{url}/v1/engines/a/stop")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_needed")
    with run_fake(FakeEngine("a")) as gateway:
        foreign = act(gateway, "a", "stop", Origin="https://evil.example")
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert act(gateway, "a", "stop", Host="evil.example").status_code == 421
        assert row(gateway, "a")["state"] == "ready"


@pytest.mark.parametrize(
    "name", ["nowhere", "A", "a%20", "a/b", "..", "%2e%2e", "a%00", "%F0%9F%92%A9", "a%0d%0aX: 1", "x" * 3000]
)
def test_a_name_that_no_engine_has_is_not_found(gateway: FakeGateway, name: str) -> None:
    for what in ACTS:
        refused = act(gateway, name, what)
        assert refused.status_code == 404
        assert len(refused.content) < 2000
    assert [row(gateway, each)["state"] for each in ("a", "org/b:1")] == ["ready", "ready"]


def test_what_is_no_act_is_no_route(gateway: FakeGateway) -> None:
    for what in ("kill", "", "stop/", "stop%2F", "STOP"):
        assert act(gateway, "a", what).status_code == 404
    with gateway.client() as client:
        assert client.get("/v1/engines/a/stop").status_code == 405
        assert client.post("/v1/engines").status_code == 405


@pytest.mark.fault("A13")
def test_two_operators_at_once_leave_the_engine_as_the_last_of_them_wanted(gateway: FakeGateway) -> None:
    with gateway.client() as one, gateway.client() as other:

        def press(client: httpx.Client, what: str) -> None:
            for _ in range(40):
                assert client.post(f"/v1/engines/a/{what}").status_code == 202

        pressing = [threading.Thread(target=press, args=each) for each in ((one, "stop"), (other, "restart"))]
        for each in pressing:
            each.start()
        for each in pressing:
            each.join()
        one.post("/v1/engines/a/stop")
        until_state(gateway, "a", "stopped")
        other.post("/v1/engines/a/start")
        until_state(gateway, "a", "ready")
    assert post(gateway, TEXT).status_code == 200


@pytest.mark.fault("A14")
def test_a_start_that_fails_says_so_and_nothing_of_the_machine(gateway: FakeGateway) -> None:
    gateway.engine("a").behaviour.start_error = StartError("/secret/model is gone")
    with Following(gateway.url) as following:
        act(gateway, "a", "restart")
        told = following.wait_for_state("a", "failed").data
    assert "log says why" in told["why"]
    assert "secret" not in f"{told}{row(gateway, 'a')}"
    assert post(gateway, TEXT).json()["error"]["code"] == "engine_unavailable"
    gateway.engine("a").behaviour.start_error = None
    act(gateway, "a", "start")
    until_state(gateway, "a", "ready")


def test_a_stop_while_the_gateway_starts_leaves_the_others_to_start() -> None:
    held = Held()
    slow = FakeEngine("slow", behaviour=FakeBehaviour(start_seconds=1, wait=held))
    with run_fake(slow, FakeEngine("b"), wait=False) as gateway:
        wait_for(lambda: slow.starts, "it does not start")
        assert act(gateway, "slow", "stop").status_code == 202
        until_state(gateway, "b", "ready")
        until_state(gateway, "slow", "stopped")
        with gateway.client() as client:
            wait_for(lambda: client.get("/readyz").status_code == 200, "the gateway is not ready")
        held.release()
        act(gateway, "slow", "start")
        until_state(gateway, "slow", "ready")


def test_a_quoted_name_is_the_name(gateway: FakeGateway) -> None:
    assert act(gateway, quote("org/b:1", safe=""), "restart").status_code == 202
    wait_for(lambda: gateway.engine("org/b:1").starts == 2, "it was not restarted")
