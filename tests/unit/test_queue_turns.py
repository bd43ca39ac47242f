"""Turns in a fair queue: who is next, who is refused, and what is given back (row E8), without sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.errors import EngineOverloaded


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
