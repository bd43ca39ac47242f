"""Rates, running requests and what is given back (rows E8 and E12), without sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request

from baton.admission.tenants import Admission, Ticket, TokenBucket
from baton.config.groups import AdmissionSettings
from baton.errors import (
    BatonError,
    EngineOverloaded,
    EngineUnavailable,
    GatewayOverloaded,
    InternalError,
    RateLimited,
)
from baton.http.middleware.gate import AuthMiddleware
from baton.http.middleware.weight import MemoryShortageMiddleware
from baton.http.request import RequestState, state_of
from baton.telemetry.ids import LOCAL_TENANT, RequestContext
from baton.telemetry.metrics import AdmissionMetrics


async def soon() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.fault("E8")
def test_a_bucket_holds_its_burst_and_fills_at_its_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(rate=60, burst=3, clock=clock)
    assert [bucket.take() for _ in range(3)] == [0, 0, 0]
    assert bucket.take() == pytest.approx(1)
    clock.now += 0.25
    assert bucket.take() == pytest.approx(0.75)
    clock.now += 0.75
    assert bucket.take() == 0
    assert bucket.take() == pytest.approx(1)
    clock.now += 1000
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, pytest.approx(1)]


def admission_of(clock: Clock | None = None, **settings: Any) -> Admission:
    metrics = AdmissionMetrics(CollectorRegistry())
    return Admission(AdmissionSettings(**settings), ["e", "f"], metrics, clock=clock or Clock())


Handler = Callable[[Request], Awaitable[None]]


async def enter(admission: Admission, request: Request, engine: str) -> Ticket:
    state = state_of(request.scope)
    await admission.enter(state.ticket, state.context.tenant, engine)
    return state.ticket


async def through(
    handler: Handler,
    *,
    tenant: str = LOCAL_TENANT,
    admission: Admission | None = None,
    method: str = "POST",
    short: bool = False,
) -> None:
    """One request through the middleware, to `handler`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await handler(Request(scope))

    async def nothing(*_: Any) -> Any:
        return None

    scope: dict[str, Any] = {"type": "http", "path": "/v1/x", "method": method, "headers": []}
    RequestState(RequestContext("id", tenant=tenant)).attach(scope)
    memory: Any = SimpleNamespace(short=short)
    inner = MemoryShortageMiddleware(app, memory=memory)
    auth = AuthMiddleware(inner, keyring=None, admission=admission or admission_of(), open_to_all=False)
    await auth(scope, nothing, nothing)


@pytest.mark.fault("E8")
async def test_each_tenant_has_its_own_rate_and_gets_retry_after() -> None:
    clock = Clock()
    admission = admission_of(clock, tenant_rate=6, tenant_burst=2)

    async def handler(_: Request) -> None:
        return None

    await through(handler, admission=admission)
    await through(handler, admission=admission)
    for passed, left in ((0.0, 10), (2.5, 8)):
        clock.now += passed
        with pytest.raises(RateLimited) as refused:
            await through(handler, admission=admission)
        assert refused.value.retry_after_s == left
    await through(handler, admission=admission, tenant="globex")
    clock.now += 8
    await through(handler, admission=admission)


@pytest.mark.fault("E8")
async def test_a_tenants_running_requests_are_counted_until_their_answers_end() -> None:
    """However they end; and a refused one does not count."""
    admission = admission_of(tenant_requests=1)
    open_door = asyncio.Event()

    async def slow(request: Request) -> None:
        await open_door.wait()

    async def failing(request: Request) -> None:
        raise InternalError

    running = asyncio.create_task(through(slow, admission=admission))
    await soon()
    for _ in range(2):
        with pytest.raises(RateLimited):
            await through(slow, admission=admission)
    with pytest.raises(InternalError):
        await through(failing, admission=admission, tenant="globex")
    with pytest.raises(InternalError):
        await through(failing, admission=admission, tenant="globex")
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    open_door.set()
    await through(slow, admission=admission)


@pytest.mark.fault("E8")
async def test_a_request_refused_because_others_are_under_way_costs_nothing_of_the_rate() -> None:
    """Two may be made; one is under way, and many more are refused meanwhile."""
    admission = admission_of(tenant_requests=1, tenant_rate=6, tenant_burst=2)
    open_door = asyncio.Event()

    async def slow(request: Request) -> None:
        await open_door.wait()

    running = asyncio.create_task(through(slow, admission=admission))
    await soon()
    for _ in range(5):
        with pytest.raises(RateLimited, match="are running"):
            await through(slow, admission=admission)
    open_door.set()
    await running
    await through(slow, admission=admission)
    with pytest.raises(RateLimited, match="a minute"):
        await through(slow, admission=admission)


@pytest.mark.fault("E8")
async def test_a_full_engine_does_not_delay_another() -> None:
    admission = admission_of(engine_requests=1, engine_waiting=0)

    async def at_f(request: Request) -> None:
        await enter(admission, request, "f")

    async def at_e(request: Request) -> None:
        await enter(admission, request, "e")
        with pytest.raises(EngineOverloaded):
            await through(at_e, admission=admission)
        await through(at_f, admission=admission)

    await through(at_e, admission=admission)


@pytest.mark.fault("E8")
async def test_work_that_goes_on_after_the_answer_keeps_its_place() -> None:
    admission = admission_of(engine_requests=1, engine_waiting=0, tenant_requests=1)
    done = asyncio.Event()
    work = asyncio.create_task(done.wait())

    async def handler(request: Request) -> None:
        (await enter(admission, request, "e")).keep_until(work)

    await through(handler, admission=admission)
    with pytest.raises(RateLimited):
        await through(handler, admission=admission)
    done.set()
    await work
    await soon()
    await through(handler, admission=admission)


@pytest.mark.fault("E8")
async def test_when_memory_is_short_new_work_is_refused_but_not_get_and_delete() -> None:
    async def handler(_: Request) -> None:
        return None

    for method in ("POST", "PUT", "PATCH"):
        with pytest.raises(GatewayOverloaded) as refused:
            await through(handler, method=method, short=True)
        assert refused.value.retry_after_s
    for method in ("GET", "HEAD", "DELETE", "OPTIONS"):
        await through(handler, method=method, short=True)
    await through(handler, short=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.fault("E8")
async def test_no_place_is_lost_whatever_ends_three_thousand_requests(seed: int) -> None:
    """Answered, failed, cancelled while waiting, while working, before they began, or refused."""
    draw = random.Random(seed)
    registry = CollectorRegistry()
    metrics = AdmissionMetrics(registry)
    settings = AdmissionSettings(tenant_requests=30, engine_requests=7, engine_waiting=40, wait_s=0.02)
    admission = Admission(settings, ["e"], metrics)
    ended: Counter[str] = Counter()
    most = 0

    def shown(name: str) -> float | None:
        return registry.get_sample_value(f"baton_admission_{name}", {"engine": "e"})

    async def handler(request: Request) -> None:
        nonlocal most
        ticket = await enter(admission, request, "e")
        most = max(most, int(shown("running") or 0))
        await asyncio.sleep(draw.random() * 0.004)
        if draw.random() < 0.2:
            raise InternalError
        if draw.random() < 0.5:
            ticket.leave_engine()
            await asyncio.sleep(0)
        elif draw.random() < 0.2:
            ticket.keep_until(asyncio.create_task(asyncio.sleep(0.001)))

    async def ask() -> None:
        try:
            await through(handler, admission=admission, tenant=draw.choice(["a", "a", "a", "b", "c"]))
            ended["answered"] += 1
        except BatonError as error:
            ended[error.code] += 1

    tasks = []
    for _ in range(3000):
        task = asyncio.create_task(ask())
        tasks.append(task)
        if draw.random() < 0.4:
            asyncio.get_running_loop().call_later(draw.random() * 0.02, task.cancel)
        if draw.random() < 0.1:
            await asyncio.sleep(draw.random() * 0.004)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    ended["cancelled"] = sum(isinstance(result, asyncio.CancelledError) for result in results)
    await asyncio.sleep(0.01)
    print(f"E8: seed {seed}: {dict(ended)}, at most {most} at once")
    assert sum(ended.values()) == 3000
    assert set(ended) == {"answered", "internal_error", "engine_overloaded", "rate_limited", "cancelled"}
    assert most == 8  # seven, and the one in reserve for other tenants
    assert (shown("running"), shown("waiting")) == (0, 0)
    assert all(tenant.running == 0 for tenant in admission._tenants.values())


async def test_a_request_that_picked_an_engine_that_is_removed_meanwhile_is_told() -> None:
    admission = admission_of()
    admission.add("g")
    admission.add("g")
    ticket = Ticket()
    await admission.enter(ticket, "a", "g")
    ticket.leave_engine()
    admission.remove("g")
    with pytest.raises(EngineUnavailable, match="removed"):
        await admission.enter(Ticket(), "a", "g")


@pytest.mark.fault("E8")
def test_another_rate_holds_at_once_and_gives_no_second_burst() -> None:
    clock = Clock()
    admission = admission_of(clock, tenant_rate=60, tenant_burst=4)
    admission.admit(Ticket(), "a")
    for burst in (8, 4):
        admission.change(AdmissionSettings(tenant_rate=60, tenant_burst=burst))
    for _ in range(3):
        admission.admit(Ticket(), "a")
    with pytest.raises(RateLimited):
        admission.admit(Ticket(), "a")
    admission.change(AdmissionSettings(tenant_requests=4))
    with pytest.raises(RateLimited, match="4 of your requests"):
        admission.admit(Ticket(), "a")


def test_what_is_to_be_done_after_a_request_waits_for_what_outlives_its_answer() -> None:
    told: list[str] = []
    plain = Ticket()
    plain.answered()
    plain.after(lambda: told.append("plain"))
    assert told == ["plain"]


async def test_what_outlives_an_answer_is_waited_for() -> None:
    told: list[str] = []
    ticket, work = Ticket(), asyncio.create_task(asyncio.sleep(0.01))
    ticket.keep_until(work)
    ticket.answered()
    ticket.after(lambda: told.append("kept"))
    assert told == []
    await work
    await soon()
    assert told == ["kept"]
