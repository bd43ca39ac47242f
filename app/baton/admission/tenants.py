"""Limit how many requests a tenant has under way, how often it asks, and whose turn it is at an engine.

A request holds one `Ticket` from its first byte to its answer's last. The ticket notes what the request was
admitted to, and gives it all back, whatever ended the request.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.config.groups import AdmissionSettings
from baton.errors import BatonError, EngineOverloaded, RateLimited
from baton.telemetry.queues import AdmissionMetrics

ENGINE_RETRY_AFTER_S = 5
BURST_S = 10.0
"""Unless the settings say otherwise a tenant may use the requests of so many seconds at once."""


class TokenBucket:
    """So many a minute, some of them at once.

    Args:
        rate: tokens a minute.
        burst: tokens it holds at most; it is full at first.
        clock: in seconds, never set back.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._per_second = rate / 60
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._at = clock()

    def take(self) -> float:
        """Take a token; returns 0, or without a token the seconds until there is one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        if self._tokens < 1:
            return (1 - self._tokens) / self._per_second
        self._tokens -= 1
        return 0.0


@dataclass
class Tenant:
    """What one tenant uses: `running` requests now, and its bucket, where its rate is limited."""

    bucket: TokenBucket | None
    running: int = 0


class Ticket:
    """What one request was let into."""

    __slots__ = ("_kept", "_place", "_tenant")

    def __init__(self) -> None:
        self._tenant: Tenant | None = None
        self._place: tuple[FairQueue, str] | None = None
        self._kept = False

    def counts_for(self, tenant: Tenant) -> None:
        """It is one of the tenant's requests."""
        tenant.running += 1
        self._tenant = tenant

    async def enter(self, queue: FairQueue, tenant: str) -> None:
        """Take a place at an engine, at once or in turn."""
        assert self._place is None
        await queue.enter(tenant)
        self._place = (queue, tenant)

    def leave_engine(self) -> None:
        """The engine has done its part; a second call does nothing."""
        place, self._place = self._place, None
        if place is not None:
            queue, tenant = place
            queue.leave(tenant)

    def keep_until(self, work: asyncio.Task[Any]) -> None:
        """Hold everything until `work` is over, which may outlive the answer."""
        self._kept = True
        work.add_done_callback(lambda _: self._give_back())

    def answered(self) -> None:
        """The answer is over, or there will be none."""
        if not self._kept:
            self._give_back()

    def _give_back(self) -> None:
        self.leave_engine()
        tenant, self._tenant = self._tenant, None
        if tenant is not None:
            tenant.running -= 1


class Admission:
    """Lets requests in.

    Args:
        settings: the limits.
        engines: the names of the engines there are.
        metrics: where to count.
        clock: in seconds, never set back.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        engines: Iterable[str],
        metrics: AdmissionMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._limited = bool(settings.tenant_requests or settings.tenant_rate)
        self._tenants: dict[str, Tenant] = {}
        self._queues = {name: _queue(name, settings, metrics) for name in engines}

    def admit(self, ticket: Ticket, tenant: str) -> None:
        """Count a request for its tenant; called before the body is read.

        Args:
            ticket: the request's.
            tenant: who sent it.

        Raises:
            RateLimited: the tenant has too many under way, or made too many lately.
        """
        if not self._limited:
            return
        known = self._tenant(tenant)
        limit = self._settings.tenant_requests
        if limit and known.running >= limit:
            raise RateLimited(
                f"{known.running} of your requests are under way, and no more are allowed at once; "
                "try again when one is over."
            )
        if known.bucket is not None and (seconds := known.bucket.take()):
            raise RateLimited(
                f"You may make {self._settings.tenant_rate:g} requests a minute; try again later.",
                retry_after_s=max(1, math.ceil(seconds)),
            )
        ticket.counts_for(known)

    async def enter(self, ticket: Ticket, tenant: str, engine: str) -> None:
        """Wait for a place at an engine, in the tenant's turn.

        Args:
            ticket: the request's; it holds the place from then on.
            tenant: who sent the request.
            engine: the engine's name.

        Raises:
            EngineOverloaded: too many wait already, or the turn did not come in time.
        """
        await ticket.enter(self._queues[engine], tenant)

    def _tenant(self, name: str) -> Tenant:
        known = self._tenants.get(name)
        if known is None:  # as many as there are keys, so they may stay
            known = self._tenants[name] = Tenant(self._bucket())
        return known

    def _bucket(self) -> TokenBucket | None:
        rate = self._settings.tenant_rate
        if not rate:
            return None
        burst = self._settings.tenant_burst or max(1.0, rate * BURST_S / 60)
        return TokenBucket(rate, burst, self._clock)


def _queue(engine: str, settings: AdmissionSettings, metrics: AdmissionMetrics) -> FairQueue:
    limits = QueueLimits(settings.engine_requests, settings.engine_waiting, settings.wait_s)
    queue = FairQueue(limits, _no_place, metrics.seconds.labels(engine).observe)
    metrics.waiting.labels(engine).set_function(lambda: queue.waiting)
    metrics.running.labels(engine).set_function(lambda: queue.running)
    return queue


def _no_place(waited_s: float | None) -> BatonError:
    told = (
        None
        if waited_s is None
        else f"The engine had no place for this request within {waited_s:g} seconds; try again later."
    )
    return EngineOverloaded(told, retry_after_s=ENGINE_RETRY_AFTER_S)
