"""Limit each tenant's running requests and request rate, and share the engines' places between tenants.

A request holds one `Ticket` from its first byte to its answer's last. The ticket records what the request
holds, and gives it back however the request ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.admission.fair_queue import USUAL, FairQueue, Order, QueueLimits
from baton.config.groups import AdmissionSettings, BatchSettings
from baton.errors import BatonError, EngineOverloaded, EngineUnavailable, RateLimited
from baton.telemetry.metrics import AdmissionMetrics

ENGINE_RETRY_AFTER_S = 5
BURST_S = 10.0
"""Default burst: a tenant may send the requests of this many seconds at once."""


class TokenBucket:
    """A rate limit with bursts.

    Args:
        rate: tokens a minute.
        burst: tokens that the bucket holds at most, and at first.
        clock: returns seconds of a monotonic clock.
        used: the bucket that this one takes the place of, of which no more tokens are left over.
    """

    def __init__(
        self, rate: float, burst: float, clock: Callable[[], float], used: TokenBucket | None = None
    ) -> None:
        self._per_second = rate / 60
        self._burst = burst
        self._clock = clock
        self._tokens: float = burst if used is None else min(burst, used._tokens)
        self._at = clock()

    def take(self) -> float:
        """Take a token and return 0; if there is none, return the seconds until there is one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        if self._tokens < 1:
            return (1 - self._tokens) / self._per_second
        self._tokens -= 1
        return 0.0


@dataclass
class Tenant:
    """The use that one tenant makes of the gateway.

    Attributes:
        bucket: of its request rate; None: the rate is not limited.
        running: requests running now.
    """

    bucket: TokenBucket | None
    running: int = 0


class Ticket:
    """The holdings of one request: a count of its tenant's, a place at an engine, engines on demand."""

    __slots__ = ("_after", "_engines", "_kept", "_over", "_place", "_tenant")

    def __init__(self) -> None:
        self._after: list[Callable[[], None]] = []
        self._over = False
        self._tenant: Tenant | None = None
        self._place: Callable[[], None] | None = None
        self._engines: dict[str, Callable[[], None]] = {}
        self._kept = False

    def holds(self, engine: str) -> bool:
        """Return whether the request keeps this engine from being unloaded."""
        return engine in self._engines

    def hold(self, engine: str, release: Callable[[], None]) -> None:
        """Keep an engine from being unloaded until the request ends."""
        self._engines[engine] = release

    def lend(self, work: asyncio.Task[Any]) -> None:
        """Keep engines from being unloaded until `work` is done instead, which may outlive the answer."""
        while self._engines:
            work.add_done_callback(partial(_call, self._engines.popitem()[1]))

    def let_go(self) -> None:
        """Give the engine's place back, and let engines be unloaded: the request goes on without them."""
        self.leave_engine()
        while self._engines:
            self._engines.popitem()[1]()

    def counts_for(self, tenant: Tenant) -> None:
        """Count the request as one of the tenant's."""
        tenant.running += 1
        self._tenant = tenant

    async def enter(
        self,
        queue: FairQueue,
        tenant: str,
        give_way: Callable[[], None] | None = None,
        *,
        order: Order = USUAL,
    ) -> None:
        """Take a place at an engine, at once or after waiting; `give_way` as for `FairQueue.place`."""
        assert self._place is None
        if give_way is not None:
            self._place = await queue.enter_behind(tenant, give_way)
            return
        await queue.enter(tenant, order=order)
        self._place = partial(queue.leave, tenant)

    def leave_engine(self) -> None:
        """Give the engine's place back; a second call does nothing."""
        leave, self._place = self._place, None
        if leave is not None:
            leave()

    def keep_until(self, work: asyncio.Task[Any]) -> None:
        """Keep everything until `work` is done, which may outlive the answer."""
        self._kept = True
        work.add_done_callback(lambda _: self._give_back())

    def after(self, call: Callable[[], None]) -> None:
        """Call this once the request's work is over, which may be after its answer."""
        if self._kept and not self._over:
            self._after.append(call)
        else:
            call()

    def answered(self) -> None:
        """Give everything back, as the answer has ended or there is none."""
        if not self._kept:
            self._give_back()

    def _give_back(self) -> None:
        self.let_go()
        tenant, self._tenant = self._tenant, None
        if tenant is not None:
            tenant.running -= 1
        self._over = True
        while self._after:
            self._after.pop()()


def _call(release: Callable[[], None], _work: asyncio.Task[Any]) -> None:
    release()


class Admission:
    """Admits requests to the gateway and to its engines.

    Args:
        clock: returns seconds of a monotonic clock.
        share: returns a tenant's share of the engines' places; None: all have the same.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        engines: Iterable[str],
        metrics: AdmissionMetrics,
        *,
        batches: BatchSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        share: Callable[[str], int] | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._share = share
        self._tenants: dict[str, Tenant] = {}
        self._batches = batches or BatchSettings()
        self._queues = {name: self._queue(name) for name in engines}

    def change(self, settings: AdmissionSettings) -> None:
        """Set other limits; they hold for what comes from now on, and for what waits."""
        self._settings = settings
        for queue in self._queues.values():
            queue.limit(self._limits())
        for tenant in self._tenants.values():
            tenant.bucket = self._bucket(tenant.bucket)

    def add(self, engine: str) -> None:
        """Make the queue of a further engine, unless there is one."""
        if engine not in self._queues:
            self._queues[engine] = self._queue(engine)

    def remove(self, engine: str) -> None:
        """Forget the queue of an engine that was removed and has no request any more."""
        del self._queues[engine]
        for gauge in (self._metrics.waiting, self._metrics.running, self._metrics.seconds):
            gauge.remove(engine)

    def admit(self, ticket: Ticket, tenant: str) -> None:
        """Count a request for its tenant; called before the body is read.

        Raises:
            RateLimited: the tenant has too many running requests, or exceeds its rate.
        """
        known = self._tenant(tenant)
        limit = self._settings.tenant_requests
        if limit and known.running >= limit:
            raise RateLimited(
                f"{known.running} of your requests are running, and no more are allowed at once; "
                "try again when one has ended."
            )
        if known.bucket is not None and (seconds := known.bucket.take()):
            raise RateLimited(
                f"You may make {self._settings.tenant_rate:g} requests a minute; try again later.",
                retry_after_s=max(1, math.ceil(seconds)),
            )
        ticket.counts_for(known)

    async def enter(
        self,
        ticket: Ticket,
        tenant: str,
        engine: str,
        give_way: Callable[[], None] | None = None,
        *,
        order: Order = USUAL,
    ) -> None:
        """Wait for a place at an engine, in the tenant's turn.

        Args:
            ticket: of the request; it holds the place from then on.
            give_way: of work that nobody waits for: see `FairQueue.enter_behind`. None: a client waits.
            order: of the request among the tenant's own.

        Raises:
            EngineOverloaded: too many requests wait already, or this one waited too long.
            EngineUnavailable: the engine was removed meanwhile.
        """
        if (queue := self._queues.get(engine)) is None:
            raise EngineUnavailable(f"The engine '{engine}' was removed by an operator.", retry_after_s=30)
        await ticket.enter(queue, tenant, give_way, order=order)

    def at(self, engine: str) -> tuple[int, int]:
        """Return how many requests an engine has, of all tenants, and how many wait for it."""
        queue = self._queues[engine]
        return queue.running, queue.waiting

    def requests(self, engine: str) -> int:
        """Count the requests that an engine has or that wait for it."""
        return sum(self.at(engine))

    def load(self) -> float:
        """Return how full the fullest engine is: requests that run or wait, by the places of one tenant.

        1 means that all places are taken and nobody waits; above it requests wait.
        """
        places = self._settings.engine_requests
        return max(((queue.running + queue.waiting) / places for queue in self._queues.values()), default=0.0)

    def _tenant(self, name: str) -> Tenant:
        known = self._tenants.get(name)
        if known is None:  # no more than there are keys, so none is ever dropped
            known = self._tenants[name] = Tenant(self._bucket())
        return known

    def _bucket(self, used: TokenBucket | None = None) -> TokenBucket | None:
        rate = self._settings.tenant_rate
        if not rate:
            return None
        burst = self._settings.tenant_burst or max(1.0, rate * BURST_S / 60)
        return TokenBucket(rate, burst, self._clock, used)

    def _queue(self, engine: str) -> FairQueue:
        metrics = self._metrics
        queue = FairQueue(self._limits(), _no_place, metrics.seconds.labels(engine).observe, self._share)
        metrics.waiting.labels(engine).set_function(lambda: queue.waiting)
        metrics.running.labels(engine).set_function(lambda: queue.running)
        return queue

    def _limits(self) -> QueueLimits:
        settings, batches = self._settings, self._batches
        return QueueLimits(
            settings.engine_requests,
            settings.engine_waiting,
            settings.wait_s,
            behind=batches.lines,
            beside=batches.lines_beside,
            quiet_s=batches.quiet_s,
        )


def _no_place(waited_s: float | None) -> BatonError:
    message = (
        None
        if waited_s is None
        else f"The engine had no place for this request within {waited_s:g} seconds; try again later."
    )
    return EngineOverloaded(message, retry_after_s=ENGINE_RETRY_AFTER_S)
