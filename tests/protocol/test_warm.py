"""`/v1/handoffs/{id}/warm` on the wire, with fake engines: stored KV is brought into memory while a tool runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, Held, run_fake
from support.handoff_requests import CHAT, TEXT, leave, post

from baton.admission.api_keys import create_key
from baton.engines.backend import EngineState, Operation
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.library.handoff import Context, Handoff, HandoffState, new_id
from baton.relay.automatic import SaveWish, key_digest, save_wish
from baton.relay.warm import AT_ONCE, MOST_CONTEXTS
from baton_kv.contract import TransferFailure, Warmed

ALL = Warmed(4096, 6, whole=True, memory=1 << 20)


def engines() -> tuple[FakeEngine, ...]:
    return (
        FakeEngine("a", supports_handoffs=True),
        FakeEngine("same", supports_handoffs=True),
        FakeEngine("other", supports_handoffs=True, weights="others"),
        FakeEngine("plain"),
    )


@pytest.fixture
def relay() -> Iterator[FakeGateway]:
    with run_fake(*engines()) as gateway:
        yield gateway


def record_of(gateway: FakeGateway, handoff_id: str) -> Handoff:
    library = gateway.app.state.gateway.library
    found: Handoff = library.index.known(handoff_id)
    return found


def stored(gateway: FakeGateway, told: Warmed = ALL, *, at: tuple[str, ...] = ("a", "same")) -> str:
    """Leave a handoff of which engines say so; fake engines store no KV, so its record is told that they have."""
    found = leave(gateway)
    record = record_of(gateway, found)
    record.bytes = 4096
    for name in at:
        gateway.engine(name).memory[record.key] = told
    return found


def warm(gateway: FakeGateway, handoff_id: str, body: dict[str, Any] | None = None) -> httpx.Response:
    with gateway.client() as client:
        path = f"/v1/handoffs/{handoff_id}/warm"
        return client.post(path) if body is None else client.post(path, json=body)


def row(engine: str, told: Warmed = ALL, reason: str | None = None) -> dict[str, Any]:
    held = {"bytes": told.bytes, "tokens": told.tokens, "whole": told.whole}
    return {"engine": engine, "reason": reason} | held


def test_kv_is_brought_to_every_engine_that_would_load_it(relay: FakeGateway) -> None:
    found = stored(relay)
    for _ in range(2):
        answer = warm(relay, found)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {
            "object": "handoff.warm",
            "id": found,
            "state": "done",
            "contexts": 1,
            "data": [row("a"), row("same")],
            "actions": None,
        }
    key = record_of(relay, found).key
    assert [relay.engine(name).warmed for name in ("a", "same", "other", "plain")] == [[key] * 2] * 2 + [
        []
    ] * 2


def test_one_engine_may_be_named(relay: FakeGateway) -> None:
    found = stored(relay)
    assert warm(relay, found, {"model": "same"}).json()["data"] == [row("same")]
    assert warm(relay, found, {"model": "other"}).json()["data"] == []
    assert relay.engine("a").warmed == []
    assert warm(relay, found, {"model": "nobody"}).status_code == 404
    refused = warm(relay, found, {"model": "plain"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "operation_unsupported")
    unknown = warm(relay, found, {"engine": "a"})
    assert (unknown.status_code, "engine" in unknown.json()["error"]["message"]) == (400, True)


FAILURES = {
    TransferFailure.MISSING: "kv_gone",
    TransferFailure.CORRUPT: "kv_corrupt",
    TransferFailure.INCOMPATIBLE: "kv_incompatible",
    TransferFailure.DEVICE: "store_unreadable",
    TransferFailure.OTHER: "unsupported",
}


@pytest.mark.fault("B26")
def test_what_is_not_there_says_why(relay: FakeGateway) -> None:
    for failure, reason in FAILURES.items():
        found = stored(relay, Warmed(failure=failure), at=("a",))
        assert warm(relay, found, {"model": "a"}).json()["data"] == [row("a", Warmed(), reason)]
        gone = failure in (TransferFailure.MISSING, TransferFailure.CORRUPT)
        assert record_of(relay, found).bytes == (0 if gone else 4096)
    partly = Warmed(1024, 2, memory=2048)
    assert warm(relay, stored(relay, partly), {"model": "a"}).json()["data"] == [row("a", partly, "no_room")]
    nothing = stored(relay, Warmed())
    assert warm(relay, nothing, {"model": "a"}).json()["data"] == [row("a", Warmed(), "off")]
    never = leave(relay)
    assert warm(relay, never, {"model": "a"}).json()["data"] == [row("a", Warmed(), "kv_gone")]
    found = stored(relay)
    relay.engine("same").state = EngineState.STARTING
    assert warm(relay, found).json()["data"] == [row("a"), row("same", Warmed(), "not_ready")]


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.fault("B26")
def test_what_is_unknown_deleted_or_another_tenant_s_is_not_found(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    mine, theirs = (create_key(keys, tenant) for tenant in ("acme", "globex"))
    with run_fake(*engines(), auth={"keys_file": keys}) as gateway:

        def ask(key: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
            with gateway.client(headers={"Authorization": f"Bearer {key}"}) as client:
                return client.post(path, json=body or {})

        left = ask(mine, "/v1/completions", TEXT | {"handoff": {"save": True}}).json()["handoff"]["id"]
        missing = (404, "handoff_not_found")
        assert refused(ask(theirs, f"/v1/handoffs/{left}/warm")) == missing
        assert refused(ask(mine, "/v1/handoffs/nothing/warm")) == missing
        assert ask(mine, f"/v1/handoffs/{left}/warm").status_code == 200
        with gateway.client(headers={"Authorization": f"Bearer {mine}"}) as client:
            assert client.delete(f"/v1/handoffs/{left}").status_code == 204
        assert refused(ask(mine, f"/v1/handoffs/{left}/warm")) == missing
        hint = action("kv.prefetch", {"handoff": left})
        for key in (mine, theirs):
            told = ask(key, "/v1/warm", envelope(hint)).json()
            assert [each["status"] for each in told["actions"]] == ["not_found"]


@contextmanager
def held_gateway(wait_s: float) -> Iterator[tuple[FakeGateway, Held]]:
    held = Held()
    behaviour = FakeBehaviour(wait=held, warm_seconds=1)
    with run_fake(
        FakeEngine("a", supports_handoffs=True, behaviour=behaviour), handoffs={"wait_s": wait_s}
    ) as gateway:
        try:
            yield gateway, held
        finally:
            held.release()


@pytest.mark.fault("B26")
def test_what_takes_long_goes_on_and_is_told_when_it_is_asked_again() -> None:
    """Requests for one handoff meanwhile wait for the same work, and no client that leaves ends it."""
    with held_gateway(0.05) as (gateway, held):
        found = stored(gateway, at=("a",))
        for _ in range(3):
            answer = warm(gateway, found)
            assert (answer.status_code, answer.json()["state"], answer.json()["data"]) == (202, "pending", [])
        assert len(gateway.engine("a").warmed) == 1
        held.release()
        while (answer := warm(gateway, found)).status_code == 202:
            pass
        assert answer.json()["data"] == [row("a")]


@pytest.mark.fault("B26")
def test_a_handoff_that_is_deleted_meanwhile_is_not_found() -> None:
    with held_gateway(30) as (gateway, held):
        found, answers = stored(gateway, at=("a",)), list[httpx.Response]()
        waiting = threading.Thread(target=lambda: answers.append(warm(gateway, found)))
        waiting.start()
        while not gateway.engine("a").warmed:
            pass
        with gateway.client() as client:
            assert client.delete(f"/v1/handoffs/{found}").status_code == 204
        held.release()
        waiting.join(30)
        assert refused(answers[0]) == (404, "handoff_not_found")


@pytest.mark.fault("B26")
def test_a_tenant_that_warms_much_leaves_room_for_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    mine, theirs = (create_key(keys, tenant) for tenant in ("acme", "globex"))
    held = Held()
    engine = FakeEngine("a", supports_handoffs=True, behaviour=FakeBehaviour(wait=held, warm_seconds=1))
    with run_fake(engine, auth={"keys_file": keys}, handoffs={"wait_s": 0.01}) as gateway:

        def client(key: str) -> httpx.Client:
            return gateway.client(headers={"Authorization": f"Bearer {key}"})

        def leave_one(key: str) -> str:
            with client(key) as of_tenant:
                sent = TEXT | {"handoff": {"save": True}}
                found: str = of_tenant.post("/v1/completions", json=sent).json()["handoff"]["id"]
            record_of(gateway, found).bytes = 4096
            return found

        try:
            many, one = [leave_one(mine) for _ in range(3 * AT_ONCE)], leave_one(theirs)
            with client(mine) as flood, client(theirs) as other:
                assert {flood.post(f"/v1/handoffs/{each}/warm").status_code for each in many} == {202}
                assert len(engine.warmed) == AT_ONCE
                assert other.post(f"/v1/handoffs/{one}/warm").status_code == 202
                assert len(engine.warmed) == AT_ONCE + 1
        finally:
            held.release()


def keyed(gateway: FakeGateway, key: str, first: int) -> Handoff:
    """Put a context into the index that the gateway has saved by itself for a request with a key."""
    now = time.time() + first
    record = Handoff(
        id=new_id(automatic=True),
        automatic=True,
        tenant="local",
        model="a",
        weights="fake",
        created_at=now,
        ttl_s=60,
        expires_at=now + 60,
        state=HandoffState.READY,
        bytes=4096,
        cache_key=key_digest(key),
    )
    record.fill([first, *range(100)], Context(), [])
    index = gateway.app.state.gateway.library.index
    index.add(record, 60)
    index.publish(record)
    gateway.engine("a").memory[record.key] = ALL
    return record


def warm_key(gateway: FakeGateway, body: dict[str, Any]) -> httpx.Response:
    with gateway.client() as client:
        return client.post("/v1/warm", json=body)


def test_automatic_contexts_are_brought_by_their_key() -> None:
    with run_fake(FakeEngine("a", supports_handoffs=True)) as gateway:
        wanted, _ = keyed(gateway, "agent-7", 1), keyed(gateway, "agent-8", 2)
        told = warm_key(gateway, {"prompt_cache_key": "agent-7"}).json()
        assert (told["contexts"], told["id"], told["data"]) == (1, None, [row("a")])
        assert gateway.engine("a").warmed == [wanted.key]
        nothing = warm_key(gateway, {"prompt_cache_key": "agent-9"})
        assert (nothing.status_code, nothing.json()["contexts"], nothing.json()["data"]) == (200, 0, [])
        written = wanted.model_dump_json()
        assert "agent-7" not in written, "a key may be somebody's name"
        assert Handoff.model_validate_json(written).cache_key == wanted.cache_key


def test_a_request_s_key_goes_with_what_is_saved_for_it() -> None:
    for body in ({"prompt_cache_key": "k"}, {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}):
        assert save_wish(Operation.CHAT, body) == SaveWish(cache_key=key_digest("k"))
    assert save_wish(Operation.CHAT, {"prompt_cache_retention": "24h"}) == SaveWish()
    assert save_wish(Operation.CHAT, {"prompt_cache_key": ["k"]}) == SaveWish()


def test_of_many_contexts_with_a_key_the_newest_are_brought() -> None:
    with run_fake(FakeEngine("a", supports_handoffs=True)) as gateway:
        records = [keyed(gateway, "agents", number) for number in range(MOST_CONTEXTS + 2)]
        told = warm_key(gateway, {"prompt_cache_key": "agents"}).json()
        assert told["contexts"] == MOST_CONTEXTS
        assert told["data"] == [row("a", Warmed(4096 * MOST_CONTEXTS, 6 * MOST_CONTEXTS, whole=True))]
        assert sorted(gateway.engine("a").warmed) == sorted(each.key for each in records[2:])


def action(kind: str, payload: dict[str, Any], version: str = "0.1") -> dict[str, Any]:
    return {"action_id": f"{kind}-1", "action_type": kind, "action_version": version, "payload": payload}


def envelope(*actions: dict[str, Any], version: str = "0.1") -> dict[str, Any]:
    return {"kv_hints": {"protocol_version": version, "message_id": "m", "actions": list(actions)}}


def test_hints_of_an_orchestrator_are_done_as_far_as_they_mean_this(relay: FakeGateway) -> None:
    """The rest is told, none is dropped silently."""
    found = stored(relay)
    told = warm_key(
        relay,
        envelope(
            action("kv.prefetch", {"handoff": found}),
            action("kv.prefetch", {"prompt_cache_key": "nobody"}, "1.0"),
            action("kv.prefetch", {"session_id": "s"}),
            action("kv.prefetch", {"handoff": found, "tier": "gpu"}),
            action("kv.prefetch", {"handoff": 7}),
            action("kv.prefetch", {"handoff": found}, "9"),
            action("kv.retain", {"directives": []}),
        ),
    ).json()
    statuses = [each["status"] for each in told["actions"]]
    assert statuses == ["done", "not_found", *["unsupported"] * 5]
    assert all((each["reason"] is not None) == (each["status"] == "unsupported") for each in told["actions"])
    assert (told["contexts"], told["data"]) == (1, [row("a"), row("same")])
    later = warm_key(relay, envelope(action("kv.prefetch", {"handoff": found}), version="7")).json()
    assert [each["status"] for each in later["actions"]] == ["unsupported"]
    for wrong in (
        {},
        {"prompt_cache_key": "k"} | envelope(),
        {"kv_hints": {"actions": []}},
        {"prompt_cache_key": ""},
    ):
        assert refused(warm_key(relay, wrong))[0] == 400


def test_hints_beside_a_request_are_begun_and_the_rest_is_in_a_header(relay: FakeGateway) -> None:
    found = stored(relay)
    hints = envelope(action("kv.prefetch", {"handoff": found}), action("kv.evict", {}))
    for model, unused in (("a", "kv.evict@0.1"), ("plain", "kv.prefetch@0.1, kv.evict@0.1")):
        answer = post(relay, CHAT | {"model": model} | hints, "/v1/chat/completions")
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-baton-kv-hints-unused"] == unused
        assert "kv_hints" not in relay.engine(model).bodies[-1]
    while not relay.engine("same").warmed:
        pass
    wrong = post(relay, CHAT | {"kv_hints": {"actions": "all"}}, "/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["param"].split(".")[0]) == (400, "kv_hints")
    plain = post(relay, CHAT, "/v1/chat/completions")
    assert "x-baton-kv-hints-unused" not in plain.headers
    for kind in ("a\r\nset-cookie: b", "é", "", "x" * 65):
        forged = post(relay, CHAT | envelope(action(kind, {})), "/v1/chat/completions")
        assert (forged.status_code, "set-cookie" in forged.headers) == (400, False)
    many = post(relay, CHAT | envelope(*[action("kv.evict", {})] * 64), "/v1/chat/completions")
    assert many.headers["x-baton-kv-hints-unused"] == "kv.evict@0.1"
