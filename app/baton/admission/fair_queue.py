"""Share a number of places between tenants, so that one tenant's flood does not delay another's requests.

Everything in the gateway that requests wait for is such a queue: engines, plugins, uploads, reading and
fetching images, threads for large bodies. The rules:

- One tenant alone may hold `places` at once. A reserve of an eighth of `places` is added for other tenants,
  because long work cannot be revoked: a tenant that comes later finds room at once.
- A tenant that holds places takes another only if it leaves free, of the reserve, the fraction that its own
  places are of `places`. So neither a second tenant nor a third can use up the reserve.
- A free place goes to the waiting tenant that holds the fewest; among equals they take turns. Within a tenant
  requests of a lower order come first, as the tenant asked (`priority`, `service_tier`), and among equals the
  first. No order of one tenant's changes when another tenant is served.
- Where tenants have shares, what one holds counts divided by its share: with 3 it ends up with three times
  the places of one with 1, while both want them. A tenant alone still holds as many as without shares.
- A request waits only if at least `places` are taken: the reserve costs no throughput.

Work that nobody waits for (`enter_behind`) has places of its own, behind these: `behind` of them while no
request runs or waits, and has not for `quiet_s`; `beside` of them otherwise, and what holds more gives way at
once: it is ended, and begins again later. Its tenants take turns too.

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
from functools import partial

from baton.errors import BatonError
from baton.telemetry.metrics import QueueMetrics

RESERVED = 8
"""One place is reserved for this many places; and one part in this many of the waiting list is kept for
tenants that use less than their share of it."""

Refusal = Callable[[float | None], BatonError]
"""Makes the error of a request that gets no place: from the seconds it waited, or None if too many wait."""
Order = tuple[int, int]
"""The order of a request among its tenant's own: by `service_tier`, then by `priority`; lower is sooner."""
USUAL: Order = (0, 0)
Waiters = dict[Order, OrderedDict[asyncio.Future[None], None]]
"""The waiting requests of one tenant, by their order; no entry is empty."""


@dataclass(frozen=True)
class QueueLimits:
    """The limits of a queue.

    Attributes:
        places: places that one tenant may hold.
        waiting: requests that may wait; None: no limit.
        wait_s: seconds that a request may wait; None: no limit.
        reserve: further places for other tenants; None: an eighth of `places`.
        behind: places for what nobody waits for, while nothing else runs or waits; 0: there are none.
        beside: those of them that are left to it while something does.
        quiet_s: seconds without a request after which it has all of them.
    """

    places: int
    waiting: int | None = None
    wait_s: float | None = None
    reserve: int | None = None
    behind: int = 0
    beside: int = 0
    quiet_s: float = 0.0


class FairQueue:
    """Hands out places by the rules above.

    Args:
        refuse: makes the error of a request that gets no place.
        record_wait: called with the seconds that a request waited for its place.
        share: returns a tenant's share; None: all have the same.

    Attributes:
        most: number of places, the reserve included.
        running: places taken.
    """

    def __init__(
        self,
        limits: QueueLimits,
        refuse: Refusal,
        record_wait: Callable[[float], None] = lambda _: None,
        share: Callable[[str], int] | None = None,
    ) -> None:
        self._refuse = refuse
        self._record_wait = record_wait
        self._share = share
        self._held: Counter[str] = Counter()
        self._turns: OrderedDict[str, Waiters] = OrderedDict()
        self._behind = Behind(limits, lambda: bool(self.running or self.waiting)) if limits.behind else None
        self.running = 0
        self.waiting = 0
        self.limit(limits)

    def limit(self, limits: QueueLimits) -> None:
        """Set the limits, also of a queue in use: nobody loses a place, and who has room now gets one."""
        self._places = limits.places
        self._reserve = -(-limits.places // RESERVED) if limits.reserve is None else limits.reserve
        self._room = limits.waiting
        self._wait_s = limits.wait_s
        self.most = self._places + self._reserve
        self._serve_all()

    async def enter(self, tenant: str, *, order: Order = USUAL, patient: bool = False) -> None:
        """Take a place, at once or after waiting; `leave` gives it back.

        Args:
            order: among the tenant's own requests that wait.

        Raises:
            BatonError: too many requests wait already, or this one waited for `wait_s`.
        """
        if tenant not in self._turns and self._may_take(tenant):
            self._take(tenant)
            self._record_wait(0.0)
            return
        if not patient:
            self.require_room(tenant)
        began = time.monotonic()
        await self._turn(tenant, order, None if patient else self._wait_s)
        self._record_wait(time.monotonic() - began)

    async def enter_behind(self, tenant: str, give_way: Callable[[], None]) -> Callable[[], None]:
        """Take a place for what nobody waits for, after waiting however long; returns what gives it back.

        Args:
            give_way: called at most once, when a request needs the engine; it must lead to giving the place
                back.
        """
        assert self._behind is not None
        return await self._behind.enter(tenant, give_way)

    def leave(self, tenant: str) -> None:
        """Give a place of this tenant back, to the next that waits if any does."""
        self.running -= 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._serve_all()

    def _serve_all(self) -> None:
        while (following := self._next()) is not None:
            self._serve(following)
        if self._behind is not None:
            self._behind.front_moved()

    @asynccontextmanager
    async def place(
        self, tenant: str, give_way: Callable[[], None] | None = None, *, order: Order = USUAL
    ) -> AsyncIterator[None]:
        """Hold a place for as long as the block runs.

        Args:
            give_way: of what nobody waits for: the place is one behind, see `enter_behind`.

        Raises:
            BatonError: as `enter`.
        """
        if give_way is None:
            await self.enter(tenant, order=order)
            leave: Callable[[], None] = partial(self.leave, tenant)
        else:
            leave = await self.enter_behind(tenant, give_way)
        try:
            yield
        finally:
            leave()

    def require_room(self, tenant: str) -> None:
        """Require that a request of this tenant could take a place, or wait for one.

        Raises:
            BatonError: too many requests wait already.
        """
        if not (self._may_take(tenant) or self._may_wait(tenant)):
            raise self._refuse(None)

    def held(self, tenant: str) -> int:
        """Return the number of places that a tenant holds."""
        return self._held[tenant]

    def _take(self, tenant: str) -> None:
        self.running += 1
        self._held[tenant] += 1
        if self._behind is not None:
            self._behind.front_moved()

    def _may_take(self, tenant: str, top: int | None = None) -> bool:
        """Return whether a tenant may take another place now; never true while its requests wait.

        Args:
            top: the largest share of those that hold a place or wait; None: not known yet.
        """
        held, left = self._held[tenant], self.most - self.running - 1
        if self._share is None or left < 0 or self.running < self._places:
            return left >= 0 and left * self._places >= held * self._reserve
        top = top or self._top(tenant)
        return left * self._places * self._share(tenant) >= held * self._reserve * top

    def _top(self, tenant: str | None = None) -> int:
        """Return the largest share of the tenants that hold a place or wait, and of this one."""
        if self._share is None:
            return 1
        one = {tenant} if tenant is not None else set()
        return max(map(self._share, one.union(self._held, self._turns)), default=1)

    def _may_wait(self, tenant: str) -> bool:
        if self._room is None:
            return True
        mine = sum(map(len, self._turns.get(tenant, {}).values()))
        others = len(self._turns) - (tenant in self._turns)
        share = max(
            1, self._room // (others + 2)
        )  # as if there were one tenant more, which may come at any time
        return self._room - self.waiting > (0 if mine < share else self._room // RESERVED)

    def _next(self) -> str | None:
        """Return the waiting tenant whose turn it is and that may take a place; None: there is none."""
        if not self._turns:
            return None
        top = self._top()
        waiting = (tenant for tenant in self._turns if self._may_take(tenant, top))
        # The first of equals, which `_serve` moves to the end.
        return min(waiting, key=self._weighed, default=None)

    def _weighed(self, tenant: str) -> float:
        held = self._held[tenant]
        return held if self._share is None else held / self._share(tenant)

    def _serve(self, tenant: str) -> None:
        order = min(self._turns[tenant])
        waiter = next(iter(self._turns[tenant][order]))
        self._forget(tenant, order, waiter)
        if waiter.done():  # cancelled, and not yet removed from the queue
            return
        if tenant in self._turns:
            self._turns.move_to_end(tenant)
        self._take(tenant)
        waiter.set_result(None)

    async def _turn(self, tenant: str, order: Order, wait_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._turns.setdefault(tenant, {}).setdefault(order, OrderedDict())[waiter] = None
        self.waiting += 1
        timer = None if wait_s is None else loop.call_later(wait_s, self._too_late, tenant, order, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._forget(tenant, order, waiter)
                self._serve_all()  # with it the largest share may have gone
            elif waiter.exception() is None:  # it had got the place, and will not use it
                self.leave(tenant)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _too_late(self, tenant: str, order: Order, waiter: asyncio.Future[None]) -> None:
        if waiter.done():
            return
        self._forget(tenant, order, waiter)
        waiter.set_exception(self._refuse(self._wait_s))
        self._serve_all()

    def _forget(self, tenant: str, order: Order, waiter: asyncio.Future[None]) -> None:
        orders = self._turns.get(tenant, {})
        waiters = orders.get(order)
        if waiters is None or waiter not in waiters:
            return
        del waiters[waiter]
        self.waiting -= 1
        if not waiters:
            del orders[order]
        if not orders:
            del self._turns[tenant]


@dataclass(eq=False)
class Holder:
    """One piece of work that nobody waits for.

    Attributes:
        admitted: done once it has a place.
        leaving: it was told to give way.
    """

    tenant: str
    give_way: Callable[[], None]
    admitted: asyncio.Future[None]
    leaving: bool = False


class Behind:
    """The places of a queue for what nobody waits for.

    Args:
        busy: returns whether a request runs or waits.
    """

    def __init__(self, limits: QueueLimits, busy: Callable[[], bool]) -> None:
        self._limits = limits
        self._busy = busy
        self._quiet = True
        self._idle_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._holding: list[Holder] = []
        self._turns: OrderedDict[str, list[Holder]] = OrderedDict()

    async def enter(self, tenant: str, give_way: Callable[[], None]) -> Callable[[], None]:
        """Take a place; see `FairQueue.enter_behind`."""
        holder = Holder(tenant, give_way, asyncio.get_running_loop().create_future())
        self._turns.setdefault(tenant, []).append(holder)
        self._fill()
        self._await_quiet()
        try:
            await holder.admitted
        except asyncio.CancelledError:
            self._leave(holder)
            raise
        return partial(self._leave, holder)

    def front_moved(self) -> None:
        """Look at the requests again, as one of them has come or gone."""
        if not self._busy():
            self._idle_since = time.monotonic()
            self._await_quiet()
            return
        self._quiet = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._holding:
            self._give_way()

    def _await_quiet(self) -> None:
        """Look again when it has been quiet for long enough, if anybody waits for that."""
        if self._turns and not self._quiet and not self._busy() and self._timer is None:
            left = self._idle_since + self._limits.quiet_s - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, left), self._calm)

    def _calm(self) -> None:
        self._timer, self._quiet = None, True
        self._fill()

    def _places(self) -> int:
        return self._limits.behind if self._quiet else self._limits.beside

    def _give_way(self) -> None:
        """Have those leave that hold too many places: of the tenant with most, the one that came last."""
        staying = [holder for holder in self._holding if not holder.leaving]
        for _ in range(len(staying) - self._places()):
            held = Counter(holder.tenant for holder in staying)
            last = max(enumerate(staying), key=lambda each: (held[each[1].tenant], each[0]))[1]
            last.leaving = True
            staying.remove(last)
            last.give_way()

    def _fill(self) -> None:
        """Give free places to the waiting tenants that hold the fewest, in turns."""
        while self._turns and len(self._holding) < self._places():
            held = Counter(holder.tenant for holder in self._holding)
            tenant = min(self._turns, key=lambda each: held[each])
            holder = self._turns[tenant].pop(0)
            self._turns.move_to_end(tenant)
            if not self._turns[tenant]:
                del self._turns[tenant]
            if not holder.admitted.done():
                self._holding.append(holder)
                holder.admitted.set_result(None)

    def _leave(self, holder: Holder) -> None:
        if holder in self._holding:
            self._holding.remove(holder)
        elif holder in (waiting := self._turns.get(holder.tenant, [])):
            waiting.remove(holder)
            if not waiting:
                del self._turns[holder.tenant]
        self._fill()


def watched_queue(
    limits: QueueLimits, refuse: Refusal, metrics: QueueMetrics, name: str, *, engine: str = ""
) -> FairQueue:
    """Return a queue that the metrics show.

    Args:
        refuse: makes the error of a request that gets no place.
        engine: the label `engine`; empty: all engines share the queue.
    """
    queue = FairQueue(limits, refuse, metrics.seconds.labels(name, engine).observe)
    metrics.running.labels(name, engine).set_function(lambda: queue.running)
    metrics.waiting.labels(name, engine).set_function(lambda: queue.waiting)
    return queue
