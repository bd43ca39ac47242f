from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import tracemalloc
from functools import cache
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize
from starlette.requests import Request

from baton.admission.body_budget import BodyBudget, BodyLease, BodyRoom, BodyRooms
from baton.config.groups import MIB, EdgeSettings, EngineSettings, LimitSettings
from baton.config.settings import Settings, load_settings
from baton.engines.fake.engine import FakeEngine
from baton.engines.fleet import Fleet
from baton.errors import (
    BatonError,
    GatewayOverloaded,
    InvalidJson,
    InvalidRequest,
    RateLimited,
    RequestTimeout,
    UnsupportedMediaType,
)
from baton.http.body.fields import strip_arguments, strip_steering
from baton.http.middleware.frame import ErrorMiddleware
from baton.http.middleware.weight import Body
from baton.http.request import KEY, RequestState, read_json
from baton.server import create_app
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import GatewayMetrics

LIMITS = LimitSettings(body_depth=8)


def budget(total: int, each: int = 1, *, one_tenant: bool = False, **options: Any) -> BodyBudget:
    room = BodyRoom(each, total, "limits.bodies_bytes", one_tenant)
    return BodyBudget(room, GatewayMetrics().bodies.labels("memory"), **options)


def lease(tenant: str = "acme") -> BodyLease:
    return BodyLease(budget(2**20), tenant)


@cache
def gateway_app() -> FastAPI:
    """A gateway that was never started; its threads parse large bodies."""
    engines = (EngineSettings(name="a", model="fake"),)
    return create_app(load_settings(port=0, engines=engines), Fleet([FakeEngine("a")]))


async def parse(body: bytes, content_type: str = "application/json") -> dict[str, Any]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", content_type.encode())]
    scope = {
        "type": "http",
        "headers": headers,
        "app": gateway_app(),
        KEY: RequestState(RequestContext("id")),
    }
    return await read_json(Request(scope, receive), LIMITS)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", InvalidJson),
        (b"{", InvalidJson),
        (b"[]", InvalidJson),
        (b'"text"', InvalidJson),
        (b'{"a": NaN}', InvalidJson),
        (b'{"a": Infinity}', InvalidJson),
        (b'{"a": "\xff"}', InvalidJson),
        (b'{"a": "\\ud800"}', InvalidJson),
        (b"[" * 100_000, InvalidRequest),
        (b'{"a":' * 9 + b"1" + b"}" * 9, InvalidRequest),
        (b'{"a": ' + b"[" * 8 + b"]" * 8 + b"}", InvalidRequest),
    ],
)
async def test_what_is_no_json_object_or_too_deep_is_refused(body: bytes, error: type[BatonError]) -> None:
    with pytest.raises(error):
        await parse(body)


async def receive_slowly(pause_s: float, work_s: float) -> list[bytes]:
    """A body in three pieces: each comes after a pause, and each takes the application a while."""
    pieces = [b"a", b"b", b"c"]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause_s)
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    edge = EdgeSettings(body_s=0.5, body_bytes_per_s=ByteSize(1000))
    body = Body(receive, ByteSize(1024), edge, lease())
    taken = []
    for _ in range(3):
        taken.append((await body.receive())["body"])
        await asyncio.sleep(work_s)
    return taken


async def test_a_body_s_time_is_what_the_gateway_waits_for_it() -> None:
    assert await receive_slowly(pause_s=0.001, work_s=0.3) == [b"a", b"b", b"c"]
    with pytest.raises(RequestTimeout, match=r"may take 0\.5 s"):
        await receive_slowly(pause_s=0.3, work_s=0)


async def test_after_the_body_the_client_s_end_is_awaited_without_a_deadline() -> None:

    events = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0 if len(events) == 2 else 0.3)
        return events.pop(0)

    body = Body(receive, ByteSize(1024), EdgeSettings(body_s=0.1), lease())
    await body.receive()
    assert str((await body.receive())["type"]) == "http.disconnect"


async def test_a_body_at_the_depth_limit_passes() -> None:
    assert await parse(b'{"a":' * 8 + b"1" + b"}" * 8)


async def test_many_shallow_containers_are_not_depth() -> None:
    assert len((await parse(json.dumps({"a": [[1]] * 1000}).encode()))["a"]) == 1000


@pytest.mark.parametrize(
    "content_type", ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonx"]
)
async def test_only_json_is_taken(content_type: str) -> None:
    with pytest.raises(UnsupportedMediaType):
        await parse(b"{}", content_type)


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.x+json"]
)
async def test_json_by_any_of_its_names_is_taken(content_type: str) -> None:
    assert await parse(b'{"a": 1}', content_type) == {"a": 1}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.text("xyz", max_size=3), json_values, max_size=3))
def test_what_passes_is_what_was_sent(value: dict[str, Any]) -> None:
    assert asyncio.run(parse(json.dumps(value).encode())) == value


def test_steering_fields_are_dropped_wherever_they_stand() -> None:
    body: dict[str, Any] = {
        "prompt": "x",
        "kv_transfer_params": {"do_remote_prefill": True},
        "ec_transfer_params": "a string where a dict belongs",
        "cache_salt": "mine",
        "priority": -5,
        "vllm_xargs": {"kv_transfer_params": "smuggled", "other": 1},
    }
    assert strip_steering(body) == [
        "kv_transfer_params",
        "ec_transfer_params",
        "cache_salt",
        "priority",
        "kv_transfer_params",
    ]
    assert body == {"prompt": "x", "vllm_xargs": {"other": 1}}


@pytest.mark.fault("E15")
def test_one_tenant_s_bodies_leave_room_for_another_s() -> None:
    shared = budget(1200)
    with shared.lease("acme") as first, shared.lease("acme") as second, shared.lease("globex") as other:
        first.take(400)
        second.take(200)
        with pytest.raises(RateLimited, match=r"share \(setting limits\.bodies_bytes\)"):
            second.take(1)
        other.take(300)
        with pytest.raises(RateLimited):
            other.take(1)
        with shared.lease("initech") as newcomer:
            newcomer.take(150)
    with shared.lease("acme") as again:
        again.take(600)


@pytest.mark.fault("E15")
def test_a_tenant_may_hold_one_body_of_the_largest_size_however_many_others_hold_something() -> None:
    shared = budget(1000, each=300)
    with contextlib.ExitStack() as open_:
        for number in range(50):
            open_.enter_context(shared.lease(f"tenant-{number}")).take(1)
        for tenant in ("acme", "globex", "initech"):
            open_.enter_context(shared.lease(tenant)).take(300)
        with pytest.raises(GatewayOverloaded, match=r"limits\.bodies_bytes"):
            open_.enter_context(shared.lease("umbrella")).take(300)


def test_without_keys_all_of_the_room_is_everybody_s() -> None:
    with budget(1000, one_tenant=True).lease("local") as body:
        body.take(1000)
        with pytest.raises(GatewayOverloaded):
            body.take(1)


@pytest.mark.fault("E15")
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 700)), max_size=60),
    st.integers(100, 2000),
)
def test_bodies_never_take_more_than_they_may_together_and_give_all_of_it_back(
    bodies: list[tuple[str, int]], total: int
) -> None:
    shared = budget(total)
    with contextlib.ExitStack() as open_:
        leases = []
        for tenant, size in bodies:
            held = open_.enter_context(shared.lease(tenant))
            with contextlib.suppress(RateLimited, GatewayOverloaded):
                held.take(size)
            leases.append((tenant, held))
            assert sum(each.size for _, each in leases) <= total
            assert all(
                sum(each.size for owner, each in leases if owner == name) <= total // 2 for name in "abcd"
            )
    with shared.lease("z") as last:
        last.take(total // 2)


def test_no_body_grows_while_memory_is_short() -> None:
    short = False
    with budget(1000, short=lambda: short).lease("acme") as body:
        body.take(10)
        short = True
        with pytest.raises(GatewayOverloaded, match="short of memory"):
            body.take(10)


@pytest.mark.parametrize(
    ("available", "expected"),
    [(None, 2048 * MIB), (64 * 1024 * MIB, 2048 * MIB), (8 * 1024 * MIB, 1024 * MIB), (MIB, 128 * MIB)],
)
def test_unless_it_is_set_the_room_for_bodies_goes_by_the_memory_there_is(
    available: int | None, expected: int
) -> None:
    unset = Settings()
    said = Settings(limits=LimitSettings(body_bytes=ByteSize(MIB), bodies_bytes=ByteSize(2 * MIB)))
    assert BodyRooms.of(unset, available=available, one_tenant=False).memory.together == expected
    assert BodyRooms.of(said, available=available, one_tenant=False).memory.together == 2 * MIB
    assert BodyRooms.of(unset, available=available, one_tenant=True).disk.together == 16 * 1024 * MIB


@pytest.mark.parametrize(
    ("given", "kept", "dropped"),
    [
        ({"top_n_sigma": 2, "x": 1, "y": [1]}, {"vllm_xargs": {"top_n_sigma": 2}}, 2),
        ({"x": 1}, {}, 1),
        ({}, {}, 0),
        ("no object", {"vllm_xargs": "no object"}, 0),
    ],
)
def test_only_arguments_that_are_allowed_pass(given: Any, kept: dict[str, Any], dropped: int) -> None:
    body = {"vllm_xargs": given}
    assert strip_arguments(body, ("top_n_sigma",)) == dropped
    assert body == kept


@pytest.mark.fault("E7")
async def test_a_refused_request_keeps_nothing_of_its_body() -> None:
    """Not even until the garbage collector runs: the budget of bodies is given back when the request ends."""
    size = 4 * 1024 * 1024

    async def refusing(scope: Any, receive: Any, _send: Any) -> None:
        body = (await receive())["body"]
        assert len(body) == size
        raise InvalidRequest("no")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(size), "more_body": False}

    async def send(_message: Any) -> None:
        return None

    app = ErrorMiddleware(refusing, metrics=GatewayMetrics())
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(5):
            scope: dict[str, Any] = {"type": "http", "path": "/v1/completions", "headers": []}
            RequestState(RequestContext("0" * 32)).attach(scope)
            await app(scope, receive, send)
            del scope
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert kept < size
