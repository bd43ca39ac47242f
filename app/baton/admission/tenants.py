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

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.config.groups import AdmissionSettings, BatchSettings
from baton.errors import BatonError, EngineOverloaded, RateLimited
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
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._per_second = rate / 60
        self._burst = burst
        self._clock = clock
        self._tokens = burst
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
    """The holdings of one request: a count of its tenant's, a place at an engine."""

    __slots__ = ("_kept", "_place", "_tenant")

    def __init__(self) -> None:
        self._tenant: Tenant | None = None
        self._place: Callable[[], None] | None = None
        self._kept = False

    def counts_for(self, tenant: Tenant) -> None:
        """Count the request as one of the tenant's."""
        tenant.running += 1
        self._tenant = tenant

    async def enter(self, queue: FairQueue, tenant: str, give_way: Callable[[], None] | None = None) -> None:
        """Take a place at an engine, at once or after waiting; `give_way` as for `FairQueue.place`."""
        assert self._place is None
        if give_way is not None:
            self._place = await queue.enter_behind(tenant, give_way)
            return
        await queue.enter(tenant)
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

    def answered(self) -> None:
        """Give everything back, as the answer has ended or there is none."""
        if not self._kept:
            self._give_back()

    def _give_back(self) -> None:
        self.leave_engine()
        tenant, self._tenant = self._tenant, None
        if tenant is not None:
            tenant.running -= 1


class Admission:
    """Admits requests to the gateway and to its engines.

    Args:
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        engines: Iterable[str],
        metrics: AdmissionMetrics,
        *,
        batches: BatchSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._limited = bool(settings.tenant_requests or settings.tenant_rate)
        self._tenants: dict[str, Tenant] = {}
        batches = batches or BatchSettings()
        self._queues = {name: _queue(name, settings, batches, metrics) for name in engines}

    def admit(self, ticket: Ticket, tenant: str) -> None:
        """Count a request for its tenant; called before the body is read.

        Raises:
            RateLimited: the tenant has too many running requests, or exceeds its rate.
        """
        if not self._limited:
            return
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
        self, ticket: Ticket, tenant: str, engine: str, give_way: Callable[[], None] | None = None
    ) -> None:
        """Wait for a place at an engine, in the tenant's turn.

        Args:
            ticket: of the request; it holds the place from then on.
            give_way: of work that nobody waits for: see `FairQueue.enter_behind`. None: a client waits.

        Raises:
            EngineOverloaded: too many requests wait already, or this one waited too long.
        """
        await ticket.enter(self._queues[engine], tenant, give_way)

    def at(self, engine: str) -> tuple[int, int]:
        """Return how many requests an engine has, of all tenants, and how many wait for it."""
        queue = self._queues[engine]
        return queue.running, queue.waiting

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

    def _bucket(self) -> TokenBucket | None:
        rate = self._settings.tenant_rate
        if not rate:
            return None
        burst = self._settings.tenant_burst or max(1.0, rate * BURST_S / 60)
        return TokenBucket(rate, burst, self._clock)


def _queue(
    engine: str, settings: AdmissionSettings, batches: BatchSettings, metrics: AdmissionMetrics
) -> FairQueue:
    limits = QueueLimits(
        settings.engine_requests,
        settings.engine_waiting,
        settings.wait_s,
        behind=batches.lines,
        beside=batches.lines_beside,
        quiet_s=batches.quiet_s,
    )
    queue = FairQueue(limits, _no_place, metrics.seconds.labels(engine).observe)
    metrics.waiting.labels(engine).set_function(lambda: queue.waiting)
    metrics.running.labels(engine).set_function(lambda: queue.running)
    return queue


def _no_place(waited_s: float | None) -> BatonError:
    message = (
        None
        if waited_s is None
        else f"The engine had no place for this request within {waited_s:g} seconds; try again later."
    )
    return EngineOverloaded(message, retry_after_s=ENGINE_RETRY_AFTER_S)
