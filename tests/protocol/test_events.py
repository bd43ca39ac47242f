"""`/v1/events` on the wire: each tenant its own handoffs, all the engines; resumed, bounded, ended."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.event_streams import Following
from support.gateways import FakeGateway, Held, run_fake
from support.handoff_requests import CHAT, TEXT, leave, post
from support.raw_requests import address, metric, rest_of, small_buffers, wait_for

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeBehaviour, FakeEngine

NAMED = {"id", "automatic", "model", "label", "parent", "tokens", "bytes"}


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with run_fake(FakeEngine("a", supports_handoffs=True), FakeEngine("b")) as running:
        yield running


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    return {tenant: create_key(tmp_path / "keys.json", tenant) for tenant in ("acme", "globex")}


def test_the_life_of_a_handoff_is_told_step_by_step(gateway: FakeGateway) -> None:
    with Following(gateway.url) as following, gateway.client() as client:
        assert following.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert following.headers["cache-control"] == "no-cache"
        first = leave(gateway, handoff={"save": {"label": "notes"}})
        told = following.wait_for("handoff.created").data
        assert told["handoff"] == {
            "id": first,
            "automatic": False,
            "model": "a",
            "label": "notes",
            "parent": None,
            "tokens": 6,
            "bytes": 0,
        }
        assert abs(told["at"] - time.time()) < 60
        second = post(gateway, TEXT | {"handoff": {"from": first, "save": True}}).json()["handoff"]
        used = following.wait_for("handoff.used").data
        source = second["source"]
        assert used["handoff"]["id"] == first
        assert (used["outcome"], used["reason"]) == (source["outcome"], source["reason"])
        assert (used["loaded_tokens"], used["resident_tokens"]) == (0, 0)
        assert following.wait_for("handoff.created", 2).data["handoff"]["parent"] == first
        client.patch(f"/v1/handoffs/{first}", json={"label": "other"})
        assert following.wait_for("handoff.changed").data["handoff"]["label"] == "other"
        client.delete(f"/v1/handoffs/{first}")
        assert following.wait_for("handoff.deleted").data["handoff"]["id"] == first
        leave(gateway, handoff={"save": {"ttl_s": 1}})
        assert following.wait_for("handoff.expired").data["handoff"]["tokens"] == 6
        assert all(set(each.data["handoff"]) == NAMED for each in following.told if "handoff" in each.data)
        assert all(each.data["type"] == each.kind for each in following.told)


def test_every_part_of_a_join_is_told_to_be_used(gateway: FakeGateway) -> None:
    parts = [leave(gateway, prompt=f"{number} 2 3") for number in (51, 52)]
    with Following(gateway.url) as following:
        answer = post(gateway, TEXT | {"handoff": {"from": parts}})
        assert answer.status_code == 200, answer.text
        following.wait_for("handoff.used", 2)
        assert sorted(each.data["handoff"]["id"] for each in following.told[1:]) == sorted(parts)


@pytest.mark.fault("D12")
def test_no_tenant_is_told_of_anothers_handoffs(tmp_path: Path, keys: dict[str, str]) -> None:
    """Nor of how many there are; of engines all are told alike. Two keys of one tenant are one tenant."""
    second = create_key(tmp_path / "keys.json", "acme")
    engine = FakeEngine("a", supports_handoffs=True)
    with (
        run_fake(engine, auth={"keys_file": tmp_path / "keys.json"}) as gateway,
        Following(gateway.url, keys["acme"]) as acme,
        Following(gateway.url, second) as too,
        Following(gateway.url, keys["globex"]) as globex,
    ):

        def ask(tenant: str, method: str, path: str, **body: Any) -> httpx.Response:
            with gateway.client(headers={"Authorization": f"Bearer {keys[tenant]}"}) as client:
                return client.request(method, path, json=body or None)

        body = TEXT | {"handoff": {"save": {"label": "of acme"}}}
        left = [ask("acme", "POST", "/v1/completions", **body).json()["handoff"]["id"] for _ in range(20)]
        for each in left[:10]:
            ask("acme", "POST", "/v1/completions", **TEXT, handoff={"from": each})
            ask("acme", "DELETE", f"/v1/handoffs/{each}")
            ask("globex", "POST", "/v1/completions", **TEXT, handoff={"from": each})
            ask("globex", "DELETE", f"/v1/handoffs/{left[-1]}")
        for each in (acme, too):
            each.wait_for("handoff.deleted", 10)
        engine.die()
        for each in (acme, too, globex):
            each.wait_for_state("a", "ready")
        assert {kind for kind in globex.kinds if kind.startswith("handoff")} == set()
        assert "of acme" not in str(globex.told)
        assert [each.id.rpartition("-")[2] for each in globex.told] == [
            str(n) for n in range(len(globex.told))
        ]
        assert [each.data for each in acme.told[1:]] == [each.data for each in too.told[1:]]
        assert acme.kinds.count("handoff.created") == 20
        assert acme.kinds.count("handoff.used") == 10
        print(f"D12: {len(acme.told)} events of one tenant, the other was told 0 of them")


def test_engines_are_told_to_be_lost_and_back_without_a_word_of_the_log(gateway: FakeGateway) -> None:
    with Following(gateway.url) as following:
        gateway.engine("b").die()
        lost = following.wait_for_state("b", "restarting").data
        assert lost["why"] == "It ended unexpectedly, and is being restarted."
        assert set(lost) == {"type", "at", "engine", "state", "why"}
        assert following.wait_for_state("b", "ready").data["why"] is None


def test_a_client_goes_on_where_it_was_cut_off(gateway: FakeGateway) -> None:
    with Following(gateway.url) as following:
        leave(gateway)
        last = following.wait_for("handoff.created").id
    missed = [leave(gateway) for _ in range(3)]
    with Following(gateway.url, last=last) as again:
        again.wait_for("handoff.created", 3)
        assert again.kinds[0] == "open"
        assert [each.data["handoff"]["id"] for each in again.told[1:]] == missed
    with Following(gateway.url, last="00000000-7") as lost:
        assert lost.kinds == ["reset"]
        leave(gateway)
        lost.wait_for("handoff.created")
        resumable = lost.told[0].id
    with Following(gateway.url, last=resumable) as resumed:
        assert resumed.wait_for("handoff.created").data == lost.told[1].data


def test_another_tenants_last_event_id_is_a_reset(tmp_path: Path, keys: dict[str, str]) -> None:
    with run_fake(FakeEngine("a"), auth={"keys_file": tmp_path / "keys.json"}) as gateway:
        with Following(gateway.url, keys["acme"]) as acme:
            known = acme.told[0].id
        with Following(gateway.url, keys["globex"], last=known) as globex:
            assert globex.kinds == ["reset"]
        with Following(gateway.url, keys["acme"], last=known) as acme:
            assert acme.kinds == ["open"]


def test_without_a_valid_key_there_is_no_stream(tmp_path: Path, keys: dict[str, str]) -> None:
    with run_fake(FakeEngine("a"), auth={"keys_file": tmp_path / "keys.json"}) as gateway:
        for key in (None, "wrong", keys["acme"] + "x"):
            refused = Following(gateway.url, key)
            assert (refused.status, refused.refusal()["code"]) == (401, "invalid_api_key")


@pytest.mark.fault("E21")
def test_streams_of_a_key_are_limited_and_are_no_running_requests(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    """Each of a tenant's keys has its own; and they take none of its requests at once."""
    second = create_key(tmp_path / "keys.json", "acme")
    limits = {"edge": {"event_streams": 2}, "admission": {"tenant_requests": 1}}
    with run_fake(FakeEngine("a"), auth={"keys_file": tmp_path / "keys.json"}, **limits) as gateway:
        with Following(gateway.url, keys["acme"]), Following(gateway.url, keys["acme"]):
            refused = Following(gateway.url, keys["acme"])
            assert (refused.status, refused.refusal()["code"]) == (429, "rate_limited")
            assert "edge.event_streams" in Following(gateway.url, keys["acme"]).refusal()["message"]
            with Following(gateway.url, second), Following(gateway.url, keys["globex"]):
                assert metric(gateway, "baton_event_streams") == 4
                answer = httpx.post(
                    f"{gateway.url}/v1/completions", json=TEXT, headers={"x-api-key": keys["acme"]}
                )
                assert answer.status_code == 200
        wait_for(lambda: metric(gateway, "baton_event_streams") == 0, "they were not given back")
        with Following(gateway.url, keys["acme"]):
            pass
        wait_for(lambda: metric(gateway, "baton_event_streams") == 0, "it was not given back")
        left = metric(gateway, 'baton_client_disconnects_total{phase="stream"}')
        assert not left, "who leaves an endless stream breaks nothing off"


@pytest.mark.fault("E21")
def test_a_client_that_does_not_read_is_dropped_and_others_are_told_all(gateway: FakeGateway) -> None:
    """Its connection's buffers are small, so that it is the gateway that has to wait for it."""
    small_buffers(gateway)
    events, loop = gateway.fleet.events, gateway.server.servers[0].get_loop()

    def tell(count: int) -> None:
        for _ in range(count):
            events.tell("local", "handoff.created", lambda: {"handoff": {"label": "x" * 500}})

    with socket.socket() as slow, Following(gateway.url) as quick:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(20)
        slow.connect(address(gateway.url))
        slow.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for(lambda: metric(gateway, "baton_event_streams") == 2, "it did not begin")
        told = 0
        while not metric(gateway, "baton_event_streams_dropped_total"):
            loop.call_soon_threadsafe(tell, 100)
            told += 100
            quick.wait_for("handoff.created", told)
            assert told < 10_000, "it was never dropped"
        print(f"E21: dropped after {told} events, all of which the other client has")
        assert 0 < rest_of(slow).count(b"event: handoff.created") < told
    wait_for(lambda: metric(gateway, "baton_event_streams") == 0, "it was not given back")


def test_comments_come_while_nothing_happens() -> None:
    with (
        run_fake(FakeEngine("a"), edge={"keep_alive_s": 0.02}) as gateway,
        Following(gateway.url) as following,
    ):
        wait_for(lambda: following.comments > 2, "no comments came")
        assert following.kinds == ["open"]


def test_a_drain_ends_the_streams_at_once_and_begins_no_more() -> None:
    """They would keep the gateway from ending; a request that works is waited for as ever."""
    held = Held()
    engine = FakeEngine("a", behaviour=FakeBehaviour(token_seconds=1, wait=held))
    # The head of a stream without an event yet goes out with its first comment.
    with run_fake(engine, drain_timeout_s=20, edge={"keep_alive_s": 0.02}) as gateway:
        following = Following(gateway.url)
        with (
            following,
            gateway.client() as client,
            client.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as stream,
        ):
            loop = gateway.server.servers[0].get_loop()
            loop.call_soon_threadsafe(gateway.app.state.gateway.drain.begin)
            wait_for(lambda: following.ended, "the stream did not end")
            assert following.kinds == ["open", "end"]
            refused = Following(gateway.url)
            assert (refused.status, refused.refusal()["code"]) == (503, "shutting_down")
            held.release()
            assert "[DONE]" in stream.read().decode()


def test_text_of_a_tenant_is_text_in_an_event(gateway: FakeGateway) -> None:
    label = 'a\n\nevent: end\r\ndata: {"x": 1}\u2028</script>\u0000'
    with Following(gateway.url) as following:
        leave(gateway, handoff={"save": {"label": label}})
        assert following.wait_for("handoff.created").data["handoff"]["label"] == label
        assert following.kinds == ["open", "handoff.created"]


def test_automatic_contexts_are_told_apart_and_their_ids_are_of_no_use(tmp_path: Path) -> None:
    """With a fake engine none has KV, so that none is kept: the library's own tests tell of those that are."""
    engine = FakeEngine("a", supports_handoffs=True)
    with run_fake(engine) as gateway, Following(gateway.url) as following, gateway.client() as client:
        library = gateway.app.state.gateway.library
        record = library.begin(engine, "local", automatic="auto-" + "x" * 20)
        library.holdings.tell("created", record)
        told = following.wait_for("handoff.created").data["handoff"]
        assert told["automatic"] is True
        for path in (f"/v1/handoffs/{told['id']}", f"/v1/handoffs/{told['id']}/messages"):
            assert client.get(path).status_code == 404
        assert client.get("/v1/handoffs").json()["data"] == []
        assert post(gateway, TEXT | {"handoff": {"from": told["id"]}}).status_code == 404


def test_a_chat_is_told_as_any_other(gateway: FakeGateway) -> None:
    with Following(gateway.url) as following:
        answer = post(gateway, CHAT | {"handoff": {"save": True}, "stream": True}, "/v1/chat/completions")
        assert '"handoff"' in answer.text
        assert json.dumps(following.wait_for("handoff.created").data)
