"""Who is let in, and when: what a tenant may ask at once, whose turn it is at an engine, is there memory.

A request holds one `Ticket` from its first byte to its answer's last. What it was let into is noted
there, and `AdmissionMiddleware` gives it all back, whatever ended the request.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.errors import BatonError, EngineOverloaded, GatewayOverloaded, RateLimited
from baton.setting_groups import AdmissionSettings
from baton.telemetry.ids import RequestContext
from baton.telemetry.memory import MemoryWatch
from baton.telemetry.queues import AdmissionMetrics

ALWAYS_ANSWERED = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
"""Methods that are answered also without memory: they look, or they free something."""
MEMORY_RETRY_AFTER_S = 5
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

    def require_tenant(self, request: Request) -> None:
        """Count a request for its tenant; before anything of it is read.

        Raises:
            RateLimited: the tenant has too many under way, or made too many lately.
        """
        if not self._limited:
            return
        context, ticket = request.scope["baton"], _ticket(request)
        assert isinstance(context, RequestContext)
        tenant = self._tenant(context.tenant)
        limit = self._settings.tenant_requests
        if limit and tenant.running >= limit:
            raise RateLimited(
                f"{tenant.running} of your requests are under way, and no more are allowed at once; "
                "try again when one is over."
            )
        if tenant.bucket is not None and (seconds := tenant.bucket.take()):
            raise RateLimited(
                f"You may make {self._settings.tenant_rate:g} requests a minute; try again later.",
                retry_after_s=max(1, math.ceil(seconds)),
            )
        ticket.counts_for(tenant)

    async def engine(self, request: Request, engine: str) -> Ticket:
        """Give a request a place at an engine, in its tenant's turn.

        Raises:
            EngineOverloaded: too many wait already, or the turn did not come in time.
        """
        ticket = _ticket(request)
        await ticket.enter(self._queues[engine], request.scope["baton"].tenant)
        return ticket

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


def _ticket(request: Request) -> Ticket:
    ticket = request.scope["baton_ticket"]
    assert isinstance(ticket, Ticket)
    return ticket


class AdmissionMiddleware:
    """Turns new work away while memory is short, and takes back what a request was let into."""

    def __init__(self, app: ASGIApp, *, memory: MemoryWatch) -> None:
        self._app = app
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._memory.short and scope["method"] not in ALWAYS_ANSWERED:
            raise GatewayOverloaded(retry_after_s=MEMORY_RETRY_AFTER_S)
        ticket = scope["baton_ticket"] = Ticket()
        try:
            await self._app(scope, receive, send)
        finally:
            ticket.answered()
