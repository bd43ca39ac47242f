"""Share a number of places between tenants, so that one tenant's flood does not hold up another's requests.

Every place in the gateway that requests wait for is such a queue: engines, plugins, uploads, the reading and
fetching of images, the threads for large bodies. The rules:

- One tenant alone may hold `places` at once. A reserve, an eighth of `places`, comes on top of them, for
  other tenants: work that goes on for long cannot be revoked, and whoever comes later finds room at once.
- A tenant that holds places takes another only if it leaves free, of the reserve, the fraction that its
  own places are of `places`. So a second tenant cannot use up the reserve either, nor can a third.
- A place that becomes free goes to the waiting tenant that holds the fewest; among equals they take turns.
  Within a tenant the first to come is the first served.
- Somebody waits only if at least `places` are taken: the reserve costs no throughput.

Example: of 256 places and a reserve of 32 one tenant with endless requests takes 256, a second 28, a third 3,
a fourth 1. As requests end, the places move to whoever holds fewer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.errors import BatonError
from baton.telemetry.queues import QueueMetrics

RESERVED = 8
"""For so many places there is one more in reserve; and of the room to wait one part in so many is kept for
tenants that use less than their share of it."""

Refusal = Callable[[float | None], BatonError]
"""What to tell a request that gets no place: the seconds it has waited, or None if too many wait already."""
Waiters = OrderedDict[asyncio.Future[None], None]


@dataclass(frozen=True)
class QueueLimits:
    """What a queue may hold.

    Attributes:
        places: requests at once, of one tenant.
        waiting: requests that may wait; None: any number.
        wait_s: seconds that one waits at most; None: as long as it likes.
        reserve: places above these, for other tenants; None: one for eight places.
    """

    places: int
    waiting: int | None = None
    wait_s: float | None = None
    reserve: int | None = None


class FairQueue:
    """Hand out places by the rules above.

    Args:
        limits: how many places there are, how many requests may wait, and how long.
        refuse: makes the error for a request that gets no place.
        observe: told the seconds each request waited that got a place.

    Attributes:
        most: places there are, the reserve included.
        running: places that are taken.
        waiting: requests that wait for one.
    """

    def __init__(
        self, limits: QueueLimits, refuse: Refusal, observe: Callable[[float], None] = lambda _: None
    ) -> None:
        self._places = limits.places
        self._reserve = -(-limits.places // RESERVED) if limits.reserve is None else limits.reserve
        self._room = limits.waiting
        self._wait_s = limits.wait_s
        self._refuse = refuse
        self._observe = observe
        self._held: Counter[str] = Counter()
        self._turns: OrderedDict[str, Waiters] = OrderedDict()
        self.most = self._places + self._reserve
        self.running = 0
        self.waiting = 0

    async def enter(self, tenant: str) -> None:
        """Take a place, at once or in turn; whoever has one gives it back with `leave`.

        Raises:
            BatonError: too many wait already, or the turn did not come in time.
        """
        if self._may_take(tenant):
            self._take(tenant)
            self._observe(0.0)
            return
        self.require_room(tenant)
        began = time.monotonic()
        await self._turn(tenant)
        self._observe(time.monotonic() - began)

    def leave(self, tenant: str) -> None:
        """Give a place of this tenant's back; whoever is next in turn has it from now on."""
        self.running -= 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        while (following := self._next()) is not None:
            self._serve(following)

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place for as long as the block runs.

        Raises:
            BatonError: as `enter`.
        """
        await self.enter(tenant)
        try:
            yield
        finally:
            self.leave(tenant)

    def require_room(self, tenant: str) -> None:
        """See to it that a request of this tenant's could come in, or wait.

        Raises:
            BatonError: too many wait already.
        """
        if not (self._may_take(tenant) or self._may_wait(tenant)):
            raise self._refuse(None)

    def held(self, tenant: str) -> int:
        """Places this tenant has."""
        return self._held[tenant]

    def _take(self, tenant: str) -> None:
        self.running += 1
        self._held[tenant] += 1

    def _may_take(self, tenant: str) -> bool:
        """Whether a tenant may have another place now; never true of one that waits already."""
        held, left = self._held[tenant], self.most - self.running - 1
        return left >= 0 and left * self._places >= held * self._reserve

    def _may_wait(self, tenant: str) -> bool:
        if self._room is None:
            return True
        mine = len(self._turns.get(tenant, ()))
        others = len(self._turns) - (tenant in self._turns)
        share = max(1, self._room // (others + 2))  # as if one tenant more were there: it may come any time
        return self._room - self.waiting > (0 if mine < share else self._room // RESERVED)

    def _next(self) -> str | None:
        """The tenant whose turn it is, of those that wait and may have a place; None: there is none."""
        waiting = (tenant for tenant in self._turns if self._may_take(tenant))
        return min(waiting, key=self.held, default=None)  # of equals the first; it goes to the end then

    def _serve(self, tenant: str) -> None:
        waiter = next(iter(self._turns[tenant]))
        self._forget(tenant, waiter)
        if waiter.done():  # one that was cancelled may not have come to leave the queue yet
            return
        if tenant in self._turns:
            self._turns.move_to_end(tenant)
        self._take(tenant)
        waiter.set_result(None)

    async def _turn(self, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._turns.setdefault(tenant, OrderedDict())[waiter] = None
        self.waiting += 1
        timer = (
            None if self._wait_s is None else loop.call_later(self._wait_s, self._too_late, tenant, waiter)
        )
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._forget(tenant, waiter)
            elif waiter.exception() is None:  # its turn had come, but it will not use it
                self.leave(tenant)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _too_late(self, tenant: str, waiter: asyncio.Future[None]) -> None:
        if waiter.done():
            return
        self._forget(tenant, waiter)
        waiter.set_exception(self._refuse(self._wait_s))

    def _forget(self, tenant: str, waiter: asyncio.Future[None]) -> None:
        waiters = self._turns.get(tenant)
        if waiters is None or waiter not in waiters:
            return
        del waiters[waiter]
        self.waiting -= 1
        if not waiters:
            del self._turns[tenant]


def watched_queue(
    limits: QueueLimits, refuse: Refusal, metrics: QueueMetrics, name: str, *, engine: str = ""
) -> FairQueue:
    """A queue whose running and waiting requests stand in the metrics.

    Args:
        limits: the queue's.
        refuse: makes the error for a request that gets no place.
        metrics: where to count.
        name: of the queue, in the label `queue`.
        engine: whose queue it is; empty: all engines share it.
    """
    queue = FairQueue(limits, refuse, metrics.seconds.labels(name, engine).observe)
    metrics.running.labels(name, engine).set_function(lambda: queue.running)
    metrics.waiting.labels(name, engine).set_function(lambda: queue.waiting)
    return queue
