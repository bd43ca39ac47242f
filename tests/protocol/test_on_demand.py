"""Models that come and go, on the wire: who waits is kept alive, who runs ends first, and everybody is told why."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from protocol.test_engines import act, row, until_state
from protocol.test_follow_up import Describing
from support.event_streams import Following
from support.gateways import FakeGateway, Held, run_fake
from support.handoff_requests import TEXT, post
from support.raw_requests import metric, wait_for
from support.sample_plugins import plugin

from baton.engines.backend import EngineState
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import StartError

MIB = 2**20
ROOM = {"budget": 250 * MIB, "min_loaded_s": 0}
"""For two of the models below."""
STREAM = TEXT | {"stream": True}
AT_ONCE = {"keep_alive_s": 0.02}
"""Streams begin, with a comment, though no token has come."""


def on_demand(*names: str, **more: Any) -> dict[str, dict[str, Any]]:
    return {name: {"start": "on_demand", "memory": 100 * MIB} | more for name in names}


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """Three models in room for two."""
    engines = [FakeEngine(name, supports_handoffs=True) for name in "abc"]
    with run_fake(*engines, told=on_demand(*"abc"), on_demand=ROOM) as running:
        yield running


def states(gateway: FakeGateway) -> dict[str, str]:
    with gateway.client() as client:
        return {each["name"]: each["state"] for each in client.get("/v1/engines").json()["data"]}


def slow_start(held: Held) -> FakeBehaviour:
    return FakeBehaviour(start_seconds=1, wait=held)


@pytest.mark.fault("A21")
def test_a_request_loads_its_model_and_the_least_used_one_makes_room(gateway: FakeGateway) -> None:
    with gateway.client() as client:
        assert client.get("/readyz").json() == {"status": "ready", "engines": {"unloaded": 3}}
        listed = client.get("/v1/models").json()["data"]
    assert [(each["id"], each["start"], each["loaded"]) for each in listed] == [
        (name, "on_demand", False) for name in "abc"
    ]
    with Following(gateway.url) as following:
        for name in "abac":
            assert post(gateway, TEXT | {"model": name}).status_code == 200
        following.wait_for_state("c", "ready")
        told = [
            (each.data["engine"], each.data["state"])
            for each in following.told
            if each.kind == "engine.state"
        ]
    assert told == [
        ("a", "starting"),
        ("a", "ready"),
        ("b", "starting"),
        ("b", "ready"),
        ("b", "unloading"),
        ("b", "unloaded"),
        ("c", "starting"),
        ("c", "ready"),
    ]
    assert states(gateway) == {"a": "ready", "b": "unloaded", "c": "ready"}
    left = row(gateway, "b")
    assert left["why"] == "It made room for 'c'; a request loads it again."
    assert (left["start"], left["memory_needed_bytes"], left["memory_from"]) == (
        "on_demand",
        100 * MIB,
        "set",
    )
    for name, loads, unloads in (("a", 1, 0), ("b", 1, 1), ("c", 1, 0)):
        ready = metric(gateway, f'baton_engine_loads_total{{engine="{name}",outcome="ready"}}')
        assert ready == loads
        assert (
            metric(gateway, f'baton_engine_unloads_total{{engine="{name}",reason="room"}}') or 0
        ) == unloads
    assert metric(gateway, 'baton_memory_budget_held_bytes{engine="a"}') == 100 * MIB
    assert metric(gateway, 'baton_memory_budget_held_bytes{engine="b"}') == 0


def test_a_stream_is_kept_alive_while_its_model_is_loaded() -> None:
    held = Held()
    engine = FakeEngine("a", behaviour=slow_start(held))
    with (
        run_fake(engine, told=on_demand("a"), edge={"keep_alive_s": 0.02}) as gateway,
        gateway.client() as client,
        client.stream("POST", "/v1/completions", json=STREAM) as stream,
    ):
        lines = stream.iter_lines()
        assert [next(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        assert row(gateway, "a")["state"] == "starting"
        assert row(gateway, "a")["ready_in_s"] > 0
        held.release()
        rest = "".join(line for line in lines if line.startswith("data"))
        assert rest.endswith("data: [DONE]")
        assert rest.count("data: {") >= 3


@pytest.mark.fault("A24")
def test_a_load_that_fails_is_told_with_its_status_or_in_the_stream_that_has_begun() -> None:
    held = Held()
    engine = FakeEngine("a", behaviour=slow_start(held))
    engine.behaviour.start_error = StartError("/secret/model is gone")
    options: dict[str, Any] = {"edge": {"keep_alive_s": 0.02}}
    with run_fake(engine, told=on_demand("a"), **options) as gateway, gateway.client() as client:
        with client.stream("POST", "/v1/completions", json=STREAM) as stream:
            lines = stream.iter_lines()
            assert next(lines) == ": keep-alive"
            held.release()
            told = [line for line in lines if line and not line.startswith(":")]
        assert told[0] == "event: error"
        error = json.loads(told[1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_unavailable"
        refused = post(gateway, STREAM)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "could not be loaded" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert "secret" not in f"{told}{refused.text}{row(gateway, 'a')}"
        assert row(gateway, "a")["why"].startswith("Its last start failed")
        assert metric(gateway, 'baton_engine_loads_total{engine="a",outcome="failed"}') == 1
        engine.behaviour.start_error = None
        wait_for(lambda: post(gateway, TEXT).status_code == 200, "it is not tried again")


@pytest.mark.fault("A24")
def test_a_start_that_hangs_is_given_up_and_another_model_gets_the_room() -> None:
    hanging = FakeEngine("a", behaviour=slow_start(Held()))
    room = ROOM | {"start_s": 0.05}
    told = on_demand("a", "b", memory=200 * MIB)
    with run_fake(hanging, FakeEngine("b"), told=told, on_demand=room) as gateway:
        refused = post(gateway, TEXT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert hanging.state is EngineState.STOPPED
        assert post(gateway, TEXT | {"model": "b"}).status_code == 200


def test_a_stream_that_is_left_while_its_model_is_loaded_or_after_that_is_aborted() -> None:
    loading, held = Held(), Held()

    async def wait(seconds: float) -> None:
        await (loading if seconds == 2 else held)(seconds)

    engine = FakeEngine("a", behaviour=FakeBehaviour(start_seconds=2, token_seconds=1, wait=wait))
    with run_fake(engine, told=on_demand("a", idle_s=0), edge=AT_ONCE) as gateway, gateway.client() as client:
        with client.stream("POST", "/v1/completions", json=STREAM) as stream:
            assert next(stream.iter_lines()) == ": keep-alive"
        waiting = 'baton_engine_load_waiting{engine="a"}'
        wait_for(lambda: metric(gateway, waiting) == 0, "it is still waited for")
        with client.stream("POST", "/v1/completions", json=STREAM) as stream:
            lines = stream.iter_lines()  # kept: without it the stream is left at once
            assert next(lines) == ": keep-alive"
            loading.release()
            wait_for(lambda: engine.active, "it does not run")
        wait_for(lambda: engine.aborted == 1 and not engine.active, "it was not aborted")
        until_state(gateway, "a", "unloaded")


def test_a_client_that_leaves_while_its_model_waits_is_forgotten() -> None:
    held = Held()
    first = FakeEngine("a", behaviour=FakeBehaviour(token_seconds=1, wait=held))
    with run_fake(
        first, FakeEngine("b"), told=on_demand("a", "b", memory=200 * MIB), on_demand=ROOM
    ) as gateway:
        with ThreadPoolExecutor() as pool:
            running = pool.submit(post, gateway, TEXT)
            wait_for(lambda: first.active, "it does not run")
            for body in (TEXT, STREAM):
                with gateway.client() as client, pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=body | {"model": "b"}, timeout=0.2)
            waiting = 'baton_engine_load_waiting{engine="b"}'
            wait_for(lambda: metric(gateway, waiting) == 0, "they are still waited for")
            held.release()
            assert running.result().status_code == 200
        until_state(gateway, "a", "unloaded")
        assert gateway.engine("b").starts == 0


@contextmanager
def streaming(held: Held) -> Iterator[tuple[FakeGateway, httpx.Response]]:
    """Two models in room for one, of which `a` answers a stream until it is released."""
    first = FakeEngine("a", behaviour=FakeBehaviour(token_seconds=1, wait=held))
    told = on_demand("a", "b", memory=200 * MIB)
    with (
        run_fake(first, FakeEngine("b"), told=told, on_demand=ROOM, edge=AT_ONCE) as gateway,
        gateway.client() as client,
        client.stream("POST", "/v1/completions", json=STREAM) as stream,
    ):
        wait_for(lambda: first.active, "it does not run")
        yield gateway, stream


@pytest.mark.fault("A22")
def test_running_streams_end_before_their_engine_makes_room_and_new_ones_wait_for_their_turn() -> None:
    held = Held()
    with streaming(held) as (gateway, stream), ThreadPoolExecutor() as pool:
        first, second = gateway.engine("a"), gateway.engine("b")
        other = pool.submit(post, gateway, TEXT | {"model": "b"})
        until_state(gateway, "a", "unloading")
        assert row(gateway, "a")["why"] == "It makes room for 'b'; a request loads it again."
        assert row(gateway, "b")["why"] == "It waits for room, which others have."
        late = pool.submit(post, gateway, TEXT)
        held.release()
        assert "data: [DONE]" in stream.read().decode()
        assert other.result().status_code == 200
        assert late.result().status_code == 200
        assert (first.starts, second.starts, first.aborted) == (2, 1, 0)


def test_a_drain_that_nobody_waits_for_any_more_is_taken_back() -> None:
    held = Held()
    with streaming(held) as (gateway, stream), ThreadPoolExecutor() as pool:
        first, second = gateway.engine("a"), gateway.engine("b")
        with gateway.client() as other, pytest.raises(httpx.ReadTimeout):
            other.post("/v1/completions", json=TEXT | {"model": "b"}, timeout=0.3)
        late = pool.submit(post, gateway, TEXT)
        until_state(gateway, "a", "ready")
        wait_for(lambda: first.active == 2, "the second request does not run beside the first")
        held.release()
        assert "data: [DONE]" in stream.read().decode()
        assert late.result().status_code == 200
        assert (first.starts, second.starts) == (1, 0)


def test_requests_that_do_not_end_in_time_are_ended_for_the_models_that_wait() -> None:
    first, second = FakeEngine("a"), FakeEngine("b")
    first.behaviour = FakeBehaviour(token_seconds=1, wait=Held())
    options: dict[str, Any] = {"on_demand": ROOM | {"drain_s": 0.05}, "edge": AT_ONCE}
    with (
        run_fake(first, second, told=on_demand("a", "b", memory=200 * MIB), **options) as gateway,
        gateway.client() as client,
        client.stream("POST", "/v1/completions", json=STREAM),
    ):
        wait_for(lambda: first.active, "it does not run")
        assert post(gateway, TEXT | {"model": "b"}).status_code == 200


@pytest.mark.fault("A27")
@pytest.mark.parametrize("moment", ["starting", "ready", "draining", "stopping"])
def test_an_engine_that_dies_in_any_moment_costs_its_own_requests_alone(moment: str) -> None:
    class Dying(FakeEngine):
        async def stop(self) -> None:
            if moment == "stopping":
                self.die()
            await super().stop()

        async def start(self, report: Any) -> None:
            await super().start(report)
            if moment == "starting" and self.starts == 1:
                self.die()

    held = Held()
    first, second = Dying("a"), FakeEngine("b")
    if moment == "draining":
        first.behaviour = FakeBehaviour(token_seconds=1, wait=held)
    with run_fake(first, second, told=on_demand("a", "b", memory=200 * MIB), on_demand=ROOM) as gateway:
        with ThreadPoolExecutor() as pool:
            mine = pool.submit(post, gateway, TEXT)
            if moment == "draining":
                wait_for(lambda: first.active, "it does not run")
                other = pool.submit(post, gateway, TEXT | {"model": "b"})
                until_state(gateway, "a", "unloading")
                first.die()
                held.release()
                assert other.result().status_code == 200
                assert mine.result().status_code == 503
            elif moment == "ready":
                assert mine.result().status_code == 200
                first.die()
            mine.result()
        for _ in range(3):
            for name in "ab":
                wait_for(lambda name=name: post(gateway, TEXT | {"model": name}).status_code == 200, name)


@pytest.mark.fault("A26")
def test_two_operators_and_clients_at_once_leave_every_model_usable(gateway: FakeGateway) -> None:
    def press(what: str) -> None:
        for number in range(30):
            assert act(gateway, "abc"[number % 3], what).status_code == 202

    def ask(name: str) -> None:
        for _ in range(20):
            assert post(gateway, TEXT | {"model": name}).status_code in (200, 503)

    threads = [threading.Thread(target=press, args=(what,)) for what in ("stop", "start", "restart", "stop")]
    threads += [threading.Thread(target=ask, args=(name,)) for name in "abc"]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for name in "abc":
        act(gateway, name, "stop")
        until_state(gateway, name, "stopped")
        refused = post(gateway, TEXT | {"model": name})
        assert "stopped by an operator" in refused.json()["error"]["message"]
    for name in "abc":
        act(gateway, name, "start")
        until_state(gateway, name, "ready")
    assert sorted(states(gateway).values()) == ["ready", "ready", "unloaded"]
    for name in "abc":
        assert post(gateway, TEXT | {"model": name}).status_code == 200


def test_a_stop_of_a_model_that_is_not_loaded_costs_no_other_its_room(gateway: FakeGateway) -> None:
    for name in "ab":
        post(gateway, TEXT | {"model": name})
    act(gateway, "c", "stop")
    until_state(gateway, "c", "stopped")
    assert post(gateway, TEXT).status_code == 200
    assert states(gateway) == {"a": "ready", "b": "ready", "c": "stopped"}
    assert metric(gateway, 'baton_engine_unloads_total{engine="a",reason="budget"}') == 0


@pytest.mark.fault("A24")
def test_an_operators_start_that_fails_leaves_a_model_to_be_loaded_for_requests(gateway: FakeGateway) -> None:
    engine = gateway.engine("a")
    post(gateway, TEXT)
    engine.behaviour.start_error = StartError("gone")
    act(gateway, "a", "restart")
    wait_for(lambda: engine.starts == 2, "it is not started again")
    until_state(gateway, "a", "unloaded")
    assert row(gateway, "a")["why"].startswith("Its last start failed")
    engine.behaviour.start_error = None
    wait_for(lambda: post(gateway, TEXT).status_code == 200, "it is not tried again")


def test_an_operators_stop_of_an_unloaded_model_keeps_requests_from_loading_it(gateway: FakeGateway) -> None:
    act(gateway, "a", "stop")
    until_state(gateway, "a", "stopped")
    assert post(gateway, TEXT).status_code == 503
    with gateway.client() as client:
        assert client.get("/readyz").json()["status"] == "degraded"
    act(gateway, "a", "restart")
    until_state(gateway, "a", "ready")


@pytest.mark.fault("A28")
def test_what_was_handed_over_before_an_unload_is_there_after_it(gateway: FakeGateway) -> None:
    first = post(gateway, TEXT | {"handoff": {"save": True}}).json()["handoff"]["id"]
    for name in "bc":
        post(gateway, TEXT | {"model": name})
    assert states(gateway)["a"] == "unloaded"
    with gateway.client() as client:
        assert client.get(f"/v1/handoffs/{first}").json()["state"] == "ready"
    answer = post(gateway, TEXT | {"handoff": {"from": first}})
    assert answer.status_code == 200
    assert answer.json()["handoff"]["source"]["id"] == first


def test_a_plugin_and_the_chat_that_follows_it_up_take_turns(tmp_path: Path) -> None:
    """Both models do not fit: the plugin's is given back before the chat's is waited for."""
    maps = FakeEngine("maps", pooling=True, plugin=plugin(Describing(tmp_path)))
    told = on_demand("maps", "words", memory=200 * MIB)
    with run_fake(maps, FakeEngine("words"), told=told, on_demand=ROOM) as gateway:
        question = {"model": "words", "messages": [{"role": "user", "content": "What is it?"}]}
        body = {"model": "maps", "data": {"numbers": [0.25, 0.5]}, "follow_up": question}
        answer = post(gateway, body, "/pooling")
        assert answer.status_code == 200, answer.text
        assert "choices" in answer.json()["follow_up"], answer.text
        assert states(gateway) == {"maps": "unloaded", "words": "ready"}


def test_an_idle_model_is_unloaded_and_says_how_long_it_stays() -> None:
    with run_fake(
        FakeEngine("a"), FakeEngine("b"), told=on_demand("a", idle_s=0.2) | on_demand("b", idle_s=99)
    ) as gateway:
        for name in "ab":
            post(gateway, TEXT | {"model": name})
        assert 90 < row(gateway, "b")["unloads_in_s"] <= 99
        until_state(gateway, "a", "unloaded")
        assert row(gateway, "a")["why"] == "Nobody used it for 0.2 s; a request loads it."
        assert row(gateway, "b")["state"] == "ready"


def test_a_model_that_cannot_fit_is_refused_and_the_rest_answers() -> None:
    told = on_demand("a", memory=200 * MIB, pin=True) | on_demand("b")
    with run_fake(FakeEngine("a"), FakeEngine("b"), told=told, on_demand=ROOM) as gateway:
        assert post(gateway, TEXT).status_code == 200
        refused = post(gateway, TEXT | {"model": "b"})
        assert refused.status_code == 503
        assert (
            "needs 100 MiB of memory, and engines that stay leave 50 MiB"
            in refused.json()["error"]["message"]
        )
        assert int(refused.headers["retry-after"]) == 300
        assert post(gateway, TEXT).status_code == 200


# Groups and fallbacks.


def test_a_group_is_a_model_and_the_least_loaded_of_it_answers() -> None:
    held = Held()
    busy, free = FakeEngine("a", behaviour=FakeBehaviour(token_seconds=1, wait=held)), FakeEngine("b")
    told = {name: {"group": "fast"} for name in "ab"}
    with run_fake(busy, free, told=told) as gateway, ThreadPoolExecutor() as pool, gateway.client() as client:
        listed = client.get("/v1/models").json()["data"][-1]
        assert (listed["id"], listed["engines"], listed["capabilities"]) == ("fast", ["a", "b"], ["generate"])
        assert client.get("/v1/models/fast").json()["id"] == "fast"
        first = pool.submit(post, gateway, TEXT | {"model": "fast"})
        wait_for(lambda: busy.active, "the first does not work on it")
        answers = [post(gateway, TEXT | {"model": "fast"}) for _ in range(3)]
        assert [each.json()["model"] for each in answers] == ["fast"] * 3
        assert (len(busy.bodies), len(free.bodies)) == (1, 3)
        assert {each["model"] for each in free.bodies} == {"b"}, "vLLM knows the engine's name alone"
        free.die()
        held.release()
        assert first.result().status_code == 200
        assert post(gateway, TEXT | {"model": "fast"}).status_code == 200


def test_the_engine_that_made_a_handoff_comes_first_and_never_one_of_other_weights() -> None:
    engines = [FakeEngine(name, supports_handoffs=True, weights=name[0]) for name in ("x1", "x2", "y1")]
    with run_fake(*engines, told={each.name: {"group": "all"} for each in engines}) as gateway:
        body = TEXT | {"model": "x2", "handoff": {"save": True}}
        left = post(gateway, body).json()["handoff"]["id"]
        for _ in range(3):
            assert post(gateway, TEXT | {"model": "all", "handoff": {"from": left}}).status_code == 200
        with gateway.client(headers={"X-Baton-Handoff": left}) as client:
            assert client.post("/v1/completions", json=TEXT | {"model": "all"}).status_code == 200
        assert [bool(each.bodies) for each in engines] == [False, True, False]
        engines[1].behaviour.start_error = StartError("gone")
        engines[1].die()
        assert post(gateway, TEXT | {"model": "all", "handoff": {"from": left}}).status_code == 200
        assert [bool(each.bodies) for each in engines] == [True, True, False]


@pytest.mark.fault("A29")
def test_a_fallback_answers_before_the_first_token_and_is_told() -> None:
    first, second, third = (FakeEngine(name) for name in "abc")
    told = {"a": {"fallback": ["b"]}, "b": {"fallback": ["c"]}}
    with run_fake(first, second, third, told=told) as gateway, gateway.client() as client:
        assert "x-baton-fallback" not in post(gateway, TEXT).headers
        act(gateway, "a", "stop")
        until_state(gateway, "a", "stopped")
        whole = post(gateway, TEXT)
        assert (whole.status_code, whole.headers["x-baton-fallback"]) == (200, "b")
        with client.stream("POST", "/v1/completions", json=STREAM) as stream:
            assert stream.headers["x-baton-fallback"] == "b"
            assert "[DONE]" in stream.read().decode()
        act(gateway, "b", "stop")
        until_state(gateway, "b", "stopped")
        assert post(gateway, TEXT).headers["x-baton-fallback"] == "c", "and its fallback's"
        act(gateway, "c", "stop")
        until_state(gateway, "c", "stopped")
        refused = post(gateway, TEXT)
        assert refused.status_code == 503
        assert "'a' was stopped" in refused.json()["error"]["message"], "what was asked for is what is told"
        assert "x-baton-fallback" not in refused.headers
        labels = 'baton_fallbacks_total{{engine="a",reason="engine_unavailable",to="{}"}}'
        assert (metric(gateway, labels.format("b")), metric(gateway, labels.format("c"))) == (2, 1)


@pytest.mark.fault("A29")
def test_a_full_engine_falls_back_and_a_mistake_of_the_client_does_not() -> None:
    held = Held()
    first, second = FakeEngine("a", behaviour=FakeBehaviour(token_seconds=1, wait=held)), FakeEngine("b")
    admission = {"engine_requests": 1, "engine_waiting": 0}
    with run_fake(first, second, told={"a": {"fallback": ["b"]}}, admission=admission) as gateway:
        with ThreadPoolExecutor() as pool:
            running = [pool.submit(post, gateway, TEXT) for _ in range(1)]
            wait_for(lambda: first.active, "it does not run")
            answer = post(gateway, TEXT)
            assert (answer.status_code, answer.headers["x-baton-fallback"]) == (200, "b")
            held.release()
            assert running[0].result().status_code == 200
        assert post(gateway, TEXT | {"max_tokens": -1}).status_code == 400
        assert len(second.bodies) == 1


def test_a_handoff_that_no_fallback_can_continue_is_refused_for_now_not_for_good() -> None:
    """Its KV is of other weights: 503, with which the client comes back, and not the fallback's 409."""
    first = FakeEngine("a", supports_handoffs=True, weights="one")
    second = FakeEngine("b", supports_handoffs=True, weights="two")
    with run_fake(first, second, told={"a": {"fallback": ["b"]}}) as gateway:
        left = post(gateway, TEXT | {"handoff": {"save": True}}).json()["handoff"]["id"]
        act(gateway, "a", "stop")
        until_state(gateway, "a", "stopped")
        refused = post(gateway, TEXT | {"handoff": {"from": left}})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "x-baton-fallback" not in refused.headers
        assert second.bodies == []
        assert post(gateway, TEXT).headers["x-baton-fallback"] == "b"


def test_pooling_falls_back_too_with_and_without_a_plugin(tmp_path: Path) -> None:
    maps = [FakeEngine(name, pooling=True, plugin=plugin(Describing(tmp_path))) for name in ("m1", "m2")]
    embed = [FakeEngine(name, pooling=True) for name in ("e1", "e2")]
    told = {"m1": {"fallback": ["m2"]}, "e1": {"fallback": ["e2"]}}
    told = {name: told.get(name, {}) | {"runner": "pooling"} for name in ("m1", "m2", "e1", "e2")}
    with run_fake(*maps, *embed, told=told) as gateway:
        for name in ("m1", "e1"):
            act(gateway, name, "stop")
            until_state(gateway, name, "stopped")
        for model, more in (("m1", {"data": {"numbers": [0.5]}}), ("e1", {"input": "1 2"})):
            answer = post(gateway, {"model": model} | more, "/pooling")
            assert (answer.status_code, answer.headers["x-baton-fallback"]) == (200, model.replace("1", "2"))
        answer = post(gateway, {"model": "e1", "input": "1 2"}, "/v1/embeddings")
        assert answer.headers["x-baton-fallback"] == "e2"
        labels = 'baton_fallbacks_total{engine="e1",reason="engine_unavailable",to="e2"}'
        assert metric(gateway, labels) == 2


def test_a_model_that_cannot_be_loaded_falls_back() -> None:
    broken = FakeEngine("a", behaviour=FakeBehaviour(start_error=StartError("gone")))
    with run_fake(broken, FakeEngine("b"), told=on_demand("a", fallback=["b"])) as gateway:
        for _ in range(2):
            assert post(gateway, TEXT).headers["x-baton-fallback"] == "b"
        assert broken.state is EngineState.FAILED
