"""Turns, buckets and what is given back (rows E8 and E12), without sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.admission.tenants import Admission, Ticket, TokenBucket
from baton.config.groups import AdmissionSettings
from baton.errors import BatonError, EngineOverloaded, GatewayOverloaded, InternalError, RateLimited
from baton.http.middleware.admission import AdmissionMiddleware
from baton.http.request_state import RequestState, state_of
from baton.telemetry.ids import RequestContext
from baton.telemetry.queues import AdmissionMetrics


def full(waited_s: float | None) -> EngineOverloaded:
    return EngineOverloaded(f"no place within {waited_s} seconds", retry_after_s=5)


def queue_of(places: int = 1, room: int = 100, wait_s: float = 60.0) -> FairQueue:
    """Without a reserve: all wait for the same places."""
    return FairQueue(QueueLimits(places, room, wait_s, reserve=0), full)


async def soon() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.fault("E8")
async def test_tenants_take_turns_and_within_one_first_come_is_first_served() -> None:

    queue, served = queue_of(), []

    async def ask(tenant: str, number: int) -> None:
        await queue.enter(tenant)
        served.append(f"{tenant}{number}")

    await queue.enter("a")
    tasks = [asyncio.create_task(ask("a", number)) for number in range(4)]
    await soon()
    tasks += [asyncio.create_task(ask(tenant, number)) for tenant in "bc" for number in range(2)]
    await soon()
    queue.leave("a")
    for number in range(len(tasks)):
        await soon()
        queue.leave(served[number][0])
    assert (queue.running, queue.waiting) == (0, 0)
    assert served == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "a3"]


@pytest.mark.fault("E8")
async def test_a_later_request_never_overtakes_a_waiting_one() -> None:
    queue = queue_of()
    await queue.enter("a")
    first = asyncio.create_task(queue.enter("a"))
    await soon()
    queue.leave("a")  # the place is the first's from now on, though it has not run yet
    second = asyncio.create_task(queue.enter("b"))
    await soon()
    assert first.done()
    assert not second.done()
    queue.leave("a")
    await second


@pytest.mark.fault("E8")
async def test_a_full_queue_refuses_at_once_and_keeps_room_for_other_tenants() -> None:
    """An eighth of it is for tenants who have less than their share."""
    queue = queue_of(room=16)
    await queue.enter("greedy")
    tasks = [asyncio.create_task(queue.enter("greedy")) for _ in range(20)]
    await soon()
    assert queue.waiting == 14
    for task in tasks[14:]:
        assert isinstance(task.exception(), EngineOverloaded)
    newcomers = [asyncio.create_task(queue.enter("modest")) for _ in range(3)]
    await soon()
    assert queue.waiting == 16
    assert [task.done() for task in newcomers] == [False, False, True]
    refusal = newcomers[2].exception()
    assert isinstance(refusal, EngineOverloaded)
    assert (refusal.retry_after_s or 0) >= 1
    for task in (*tasks, *newcomers):
        task.cancel()
    await asyncio.gather(*tasks, *newcomers, return_exceptions=True)
    assert (queue.running, queue.waiting) == (1, 0)


@pytest.mark.fault("E8")
async def test_many_tenants_with_few_requests_may_fill_the_whole_queue() -> None:
    queue = queue_of(room=16)
    await queue.enter("a")
    tasks = [asyncio.create_task(queue.enter(f"tenant-{number}")) for number in range(20)]
    await soon()
    assert (queue.waiting, sum(task.done() for task in tasks)) == (16, 4)
    for task in tasks[16:]:
        assert isinstance(task.exception(), EngineOverloaded)
    for task in tasks[:16]:
        task.cancel()
    await asyncio.gather(*tasks[:16], return_exceptions=True)


@pytest.mark.fault("E8")
async def test_a_queue_without_waiting_room_refuses_at_once() -> None:
    queue = queue_of(room=0)
    await queue.enter("a")
    with pytest.raises(EngineOverloaded):
        await queue.enter("a")
    queue.leave("a")
    await queue.enter("a")


@pytest.mark.fault("E8")
async def test_a_request_that_waits_too_long_is_refused_and_removed() -> None:
    queue = queue_of(wait_s=0.05)
    await queue.enter("a")
    began = time.monotonic()
    with pytest.raises(EngineOverloaded, match=r"within 0\.05 seconds"):
        await queue.enter("b")
    assert time.monotonic() - began >= 0.05
    assert (queue.running, queue.waiting) == (1, 0)
    queue.leave("a")
    assert queue.running == 0


@pytest.mark.fault("E8")
async def test_a_place_given_to_a_request_being_cancelled_goes_to_the_next() -> None:
    """Whichever of the two comes first."""
    for first in ("leave", "cancel"):
        queue = queue_of()
        await queue.enter("a")
        gone = asyncio.create_task(queue.enter("a"))
        await soon()
        following = asyncio.create_task(queue.enter("b"))
        await soon()
        steps: list[Callable[[], Any]] = [partial(queue.leave, "a"), gone.cancel]
        for step in steps if first == "leave" else reversed(steps):
            step()
        await soon()
        assert gone.cancelled()
        assert following.done()
        assert (queue.running, queue.waiting) == (1, 0)
        queue.leave("b")
        assert queue.running == 0


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


def admit(admission: Admission, request: Request) -> None:
    state = state_of(request.scope)
    admission.admit(state.ticket, state.context.tenant)


async def enter(admission: Admission, request: Request, engine: str) -> Ticket:
    state = state_of(request.scope)
    await admission.enter(state.ticket, state.context.tenant, engine)
    return state.ticket


async def through(
    handler: Handler, tenant: str = "acme", *, method: str = "POST", short: bool = False
) -> None:
    """One request through the middleware, to `handler`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await handler(Request(scope))

    async def nothing(*_: Any) -> Any:
        return None

    scope: dict[str, Any] = {"type": "http", "method": method, "headers": []}
    RequestState(RequestContext("id", tenant=tenant)).attach(scope)
    memory: Any = SimpleNamespace(short=short)
    await AdmissionMiddleware(app, memory=memory)(scope, nothing, nothing)


@pytest.mark.fault("E8")
async def test_each_tenant_has_its_own_rate_and_gets_retry_after() -> None:
    clock = Clock()
    admission = admission_of(clock, tenant_rate=6, tenant_burst=2)

    async def handler(request: Request) -> None:
        admit(admission, request)

    await through(handler)
    await through(handler)
    for passed, left in ((0.0, 10), (2.5, 8)):
        clock.now += passed
        with pytest.raises(RateLimited) as refused:
            await through(handler)
        assert refused.value.retry_after_s == left
    await through(handler, "globex")
    clock.now += 8
    await through(handler)


@pytest.mark.fault("E8")
async def test_a_tenants_running_requests_are_counted_until_their_answers_end() -> None:
    """However they end; and a refused one does not count."""
    admission = admission_of(tenant_requests=1)
    open_door = asyncio.Event()

    async def slow(request: Request) -> None:
        admit(admission, request)
        await open_door.wait()

    async def failing(request: Request) -> None:
        admit(admission, request)
        raise InternalError

    running = asyncio.create_task(through(slow))
    await soon()
    for _ in range(2):
        with pytest.raises(RateLimited):
            await through(slow)
    with pytest.raises(InternalError):
        await through(failing, "globex")
    with pytest.raises(InternalError):
        await through(failing, "globex")
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    open_door.set()
    await through(slow)


@pytest.mark.fault("E8")
async def test_a_request_refused_because_others_are_under_way_costs_nothing_of_the_rate() -> None:
    """Two may be made; one is under way, and many more are refused meanwhile."""
    admission = admission_of(tenant_requests=1, tenant_rate=6, tenant_burst=2)
    open_door = asyncio.Event()

    async def slow(request: Request) -> None:
        admit(admission, request)
        await open_door.wait()

    running = asyncio.create_task(through(slow))
    await soon()
    for _ in range(5):
        with pytest.raises(RateLimited, match="are running"):
            await through(slow)
    open_door.set()
    await running
    await through(slow)
    with pytest.raises(RateLimited, match="a minute"):
        await through(slow)


@pytest.mark.fault("E8")
async def test_a_full_engine_does_not_delay_another() -> None:
    admission = admission_of(engine_requests=1, engine_waiting=0)

    async def at_f(request: Request) -> None:
        await enter(admission, request, "f")

    async def at_e(request: Request) -> None:
        await enter(admission, request, "e")
        with pytest.raises(EngineOverloaded):
            await through(at_e)
        await through(at_f)

    await through(at_e)


@pytest.mark.fault("E8")
async def test_work_that_goes_on_after_the_answer_keeps_its_place() -> None:
    admission = admission_of(engine_requests=1, engine_waiting=0, tenant_requests=1)
    done = asyncio.Event()
    work = asyncio.create_task(done.wait())

    async def handler(request: Request) -> None:
        admit(admission, request)
        (await enter(admission, request, "e")).keep_until(work)

    await through(handler)
    with pytest.raises(RateLimited):
        await through(handler)
    done.set()
    await work
    await soon()
    await through(handler)


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
        admit(admission, request)
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
            await through(handler, draw.choice(["a", "a", "a", "b", "c"]))
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
