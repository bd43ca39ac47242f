"""The queue that tenants share: how many places each gets, who is next, and that none is lost."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.admission.fair_threads import FairThreads
from baton.errors import EngineOverloaded, GatewayOverloaded

pytestmark = pytest.mark.fault("E13")
TENANTS = "abcd"


def refused(waited_s: float | None) -> EngineOverloaded:
    return EngineOverloaded("full" if waited_s is None else f"after {waited_s:g} seconds", retry_after_s=5)


def queue_of(places: int, **limits: float) -> FairQueue:
    return FairQueue(QueueLimits(places, **limits), refused)  # type: ignore[arg-type]  # whole numbers all


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@dataclass
class Crowd:
    """Requests at a queue, as the test knows of them.

    Attributes:
        queue: where they are.
        waiting: of each tenant, in the order they came.
        held: places of each tenant.
    """

    queue: FairQueue
    waiting: dict[str, list[asyncio.Task[None]]] = field(default_factory=lambda: {t: [] for t in TENANTS})
    held: Counter[str] = field(default_factory=Counter)

    async def come(self, tenant: str, count: int) -> None:
        self.waiting[tenant] += [asyncio.create_task(self.queue.enter(tenant)) for _ in range(count)]
        await self.look()

    async def go(self, tenant: str) -> None:
        """One of the tenant's requests is over."""
        self.held[tenant] -= 1
        self.queue.leave(tenant)
        await self.look()

    async def give_up(self, tenant: str, which: int, *, also_leaves: str | None = None) -> None:
        """One that waits is cancelled, in the same moment in which another's place may become its own."""
        task = self.waiting[tenant].pop(which % len(self.waiting[tenant]))
        if which % 2:
            task.cancel()
        if also_leaves is not None:
            self.held[also_leaves] -= 1
            self.queue.leave(also_leaves)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.look()

    async def look(self) -> None:
        """Note who has a place by now, and see that it was their turn."""
        await settle()
        before, served = self.held.copy(), []
        for tenant, tasks in self.waiting.items():
            done = [task.done() for task in tasks]
            assert done == sorted(done, reverse=True), "within a tenant the first to come is the first served"
            while tasks and tasks[0].done():
                tasks.pop(0).result()
                self.held[tenant] += 1
                served.append(tenant)
        for tenant in served:
            for other in self.those_who_wait():
                assert self.held[other] >= before[tenant], (
                    f"{other} holds fewer than {tenant} and still waits"
                )

    def those_who_wait(self) -> list[str]:
        return [tenant for tenant, tasks in self.waiting.items() if tasks]

    def check(self, places: int, reserve: int) -> None:
        running = sum(self.held.values())
        assert self.queue.running == running <= places + reserve
        assert self.queue.waiting == sum(map(len, self.waiting.values()))
        assert all(self.queue.held(tenant) == self.held[tenant] <= places for tenant in TENANTS)
        for tenant in self.those_who_wait():
            assert running >= places, "somebody waits though fewer work than without a reserve"
            left = places + reserve - running - 1
            assert left < 0 or left / reserve < self.held[tenant] / places, (
                "it waits beside a place it may have"
            )


Step = tuple[str, str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "go", "go", "go", "give up", "both"]),
        st.sampled_from(TENANTS),
        st.integers(0, 9),
    ),
    max_size=60,
)


async def play(places: int, steps: list[Step]) -> None:
    reserve = -(-places // 8)
    crowd = Crowd(queue_of(places))
    for what, tenant, number in steps:
        busy = [one for one in TENANTS if crowd.held[one]]
        if what == "come":
            await crowd.come(tenant, 1 + number % 5)
        elif what == "go" and busy:
            await crowd.go(busy[number % len(busy)])
        elif what in ("give up", "both") and crowd.waiting[tenant]:
            leaves = busy[number % len(busy)] if what == "both" else None
            await crowd.give_up(tenant, number, also_leaves=leaves)
        crowd.check(places, reserve)
    while busy := [one for one in TENANTS if crowd.held[one]]:
        await crowd.go(busy[0])
        crowd.check(places, reserve)
    assert (crowd.queue.running, crowd.queue.waiting, crowd.those_who_wait()) == (0, 0, [])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 8, 9]), STEPS)
def test_whatever_comes_goes_and_gives_up_no_place_is_lost_and_turns_are_kept(
    places: int, steps: list[Step]
) -> None:
    """Never more than all places; who holds fewest is next; nobody waits beside a place they may have."""
    asyncio.run(play(places, steps))


async def test_tenants_with_endless_requests_leave_room_for_the_next() -> None:
    """Of 256 places and 32 in reserve; and one tenant alone has what it has without a reserve."""
    queue, tasks = queue_of(256), []
    for tenant in TENANTS:
        tasks += [asyncio.create_task(queue.enter(tenant)) for _ in range(400)]
        await settle()
    held = [queue.held(tenant) for tenant in TENANTS]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert held == [256, 28, 3, 1]


async def test_as_requests_end_the_places_move_to_equal_shares() -> None:
    """The first tenant had them all, and goes on asking for more."""
    queue = queue_of(64)
    waiting = [asyncio.create_task(queue.enter(tenant)) for tenant in "ab" for _ in range(400)]
    await settle()
    least = queue.running
    for number in range(200):
        queue.leave(("a" if queue.held("a") > queue.held("b") else "b") if number % 2 else "a")
        await settle()
        least = min(least, queue.running)
    a, b = queue.held("a"), queue.held("b")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert abs(a - b) <= 1
    assert least >= 64


async def test_a_free_place_goes_to_the_tenant_that_holds_fewest() -> None:
    """Though another has waited longer."""
    queue = queue_of(4, reserve=0)
    for tenant in "aabc":
        await queue.enter(tenant)
    longer = asyncio.create_task(queue.enter("a"))
    await settle()
    shorter = asyncio.create_task(queue.enter("b"))
    await settle()
    queue.leave("c")
    await settle()
    assert (shorter.done(), longer.done()) == (True, False)
    queue.leave("b")
    await longer


async def test_a_tenant_with_few_requests_is_not_starved_by_one_with_many() -> None:
    """One place, no reserve: they take turns, however many the other has waiting."""
    queue, served = queue_of(1, reserve=0), []

    async def ask(tenant: str) -> None:
        async with queue.place(tenant):
            served.append(tenant)
            await settle()

    await asyncio.gather(*(ask(tenant) for tenant in "a" * 20 + "b" * 3))
    assert served[:7] == ["a", "a", "b", "a", "b", "a", "b"]


async def test_one_that_waits_too_long_is_told_how_long_and_when_to_come_back() -> None:
    queue = queue_of(1, wait_s=0.02)
    await queue.enter("a")
    with pytest.raises(EngineOverloaded, match=r"after 0\.02 seconds") as told:
        await queue.enter("a")
    assert told.value.retry_after_s == 5
    await queue.enter("b")
    assert (queue.running, queue.waiting) == (2, 0)


def threads_of(places: int) -> tuple[FairQueue, FairThreads]:
    queue = FairQueue(QueueLimits(places), lambda _: GatewayOverloaded())
    return queue, FairThreads(queue, "test")


async def test_work_that_was_given_up_keeps_its_thread_until_it_is_done() -> None:
    """A thread cannot be stopped; what came later would wait behind it, whoever's it is."""
    queue, threads = threads_of(1)
    begun, release = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(20)

    given_up = asyncio.create_task(threads.run("a", work))
    await asyncio.to_thread(begun.wait, 20)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert queue.held("a") == 1
    following = asyncio.create_task(threads.run("a", lambda: "a's next"))
    assert await threads.run("b", lambda: "b's") == "b's"
    assert not following.done()
    release.set()
    assert await following == "a's next"
    await settle()
    assert queue.running == 0
    threads.close()


async def test_work_that_fails_gives_its_thread_back_and_says_why() -> None:
    queue, threads = threads_of(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", lambda: 1 // 0)
    await settle()
    assert queue.running == 0
    threads.close()
    with pytest.raises(RuntimeError):
        await threads.run("a", time.monotonic)
    assert queue.running == 0


async def shared_out(places: int, shares: dict[str, int], rounds: int = 4000) -> dict[str, int]:
    """The places that tenants with endless requests of random length hold in the end."""
    queue = FairQueue(QueueLimits(places), refused, share=lambda tenant: shares[tenant])
    chance, waiting = random.Random(5), []
    for _ in range(3 * places):
        waiting += [asyncio.create_task(queue.enter(tenant), name=tenant) for tenant in shares]
    await settle()
    for _ in range(rounds):
        tenant = chance.choices(list(shares), [queue.held(each) for each in shares])[0]
        queue.leave(tenant)
        waiting.append(asyncio.create_task(queue.enter(tenant), name=tenant))
        await settle()
    held = {tenant: queue.held(tenant) for tenant in shares}
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return held


async def test_places_move_to_the_tenants_shares() -> None:
    """By shares of 3, 2 and 1, and whoever came first; no place that one tenant alone would have is left free."""
    held = await shared_out(64, {"one": 1, "three": 3, "two": 2})
    assert sum(held.values()) >= 64
    unit = sum(held.values()) / 6
    print(f"shares of 1, 3 and 2 of {sum(held.values())} places: {held}")
    assert all(abs(held[name] - unit * share) <= 3 for name, share in (("one", 1), ("three", 3), ("two", 2)))


async def test_a_tenant_alone_has_every_place_whatever_its_share() -> None:
    for share in (1, 100):
        queue = FairQueue(QueueLimits(16), refused, share=lambda _, share=share: share)
        entered = [asyncio.create_task(queue.enter("alone")) for _ in range(40)]
        await settle()
        assert queue.held("alone") == 16
        for each in entered:
            each.cancel()
        await asyncio.gather(*entered, return_exceptions=True)


async def test_one_with_a_large_share_that_leaves_makes_room_at_once() -> None:
    """What kept the others waiting was its share; nobody waits for a place that is free."""
    queue = FairQueue(QueueLimits(8), refused, share=lambda tenant: 100 if tenant == "large" else 1)
    small = [asyncio.create_task(queue.enter("small")) for _ in range(20)]
    await settle()
    assert queue.held("small") == 8
    large = asyncio.create_task(queue.enter("large"))
    await settle()
    assert queue.held("large") == 1
    queue.leave("large")
    other = asyncio.create_task(queue.enter("other"))
    await settle()
    assert (queue.held("small"), queue.held("other"), queue.running) == (8, 1, 9)
    for each in (*small, large, other):
        each.cancel()
    await asyncio.gather(*small, large, other, return_exceptions=True)


async def test_other_limits_hold_at_once_and_take_no_place_away() -> None:
    queue = queue_of(2)
    held = [asyncio.create_task(queue.enter("a")) for _ in range(6)]
    await settle()
    assert (queue.held("a"), queue.waiting) == (2, 4)
    queue.limit(QueueLimits(5, 10, 60))
    await settle()
    assert (queue.held("a"), queue.waiting) == (5, 1)
    queue.limit(QueueLimits(1, 10, 60))
    queue.leave("a")
    await settle()
    assert (queue.held("a"), queue.waiting) == (4, 1)
    for _ in range(4):
        queue.leave("a")
    await settle()
    assert (queue.held("a"), queue.waiting) == (1, 0)
    await asyncio.gather(*held)


async def test_a_tenants_orders_are_kept_whoever_gives_up() -> None:
    """Against a list that is sorted each time."""
    chance = random.Random(3)
    queue, served = queue_of(1, waiting=1000), list[int]()
    await queue.enter("a")

    async def ask(number: int, order: tuple[int, int]) -> None:
        await queue.enter("a", order=order)
        served.append(number)

    orders = [(chance.randint(-1, 1), chance.randint(-3, 3)) for _ in range(60)]
    asked = [asyncio.create_task(ask(number, order)) for number, order in enumerate(orders)]
    await settle()
    left = set(chance.sample(range(60), 20))
    for number in left:
        asked[number].cancel()
    await settle()
    for _ in range(40):
        queue.leave("a")
        await settle()
    assert served == sorted(set(range(60)) - left, key=lambda number: orders[number])
    assert queue.waiting == 0
    await asyncio.gather(*asked, return_exceptions=True)
