"""One engine's requests: so many are given to it, the others wait, and each tenant has its turn."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from baton.errors import EngineOverloaded
from baton.setting_groups import AdmissionSettings

RETRY_AFTER_S = 5
KEPT_FREE = 8
"""One place in so many is kept for tenants with less than their share of the queue, so that a newcomer
finds room where one tenant alone has filled it."""

Waiters = OrderedDict[asyncio.Future[None], None]


class FairQueue:
    """Places for requests, handed out round robin over tenants, first come first served within one.

    A place that becomes free goes straight to the next in turn, so nobody who comes later is before them.

    Args:
        settings: how many places there are, how many may wait, and how long.
        observe: told the seconds each request waited that got a place.

    Attributes:
        running: places that are taken.
        waiting: requests that wait for one.
    """

    def __init__(self, settings: AdmissionSettings, observe: Callable[[float], None]) -> None:
        self._places = settings.engine_requests
        self._room = settings.engine_waiting
        self._wait_s = settings.wait_s
        self._observe = observe
        self._turns: OrderedDict[str, Waiters] = OrderedDict()
        self.running = 0
        self.waiting = 0

    async def enter(self, tenant: str) -> None:
        """Take a place, at once or in turn; whoever has one gives it back with `leave`.

        Raises:
            EngineOverloaded: the queue is full, or the turn did not come in time.
        """
        if self.running < self._places:
            self.running += 1
            self._observe(0.0)
            return
        if not self._has_room(tenant):
            raise EngineOverloaded(retry_after_s=RETRY_AFTER_S)
        began = time.monotonic()
        await self._turn(tenant)
        self._observe(time.monotonic() - began)

    def leave(self) -> None:
        """Give a place back: to the next in turn, if anyone waits."""
        while self._turns:
            tenant, waiters = next(iter(self._turns.items()))
            waiter = next(iter(waiters))
            self._forget(tenant, waiter)
            if tenant in self._turns:
                self._turns.move_to_end(tenant)
            if not waiter.done():  # one that was cancelled may not have come to leave the queue yet
                waiter.set_result(None)
                return
        self.running -= 1

    def _has_room(self, tenant: str) -> bool:
        mine = len(self._turns.get(tenant, ()))
        others = len(self._turns) - (tenant in self._turns)
        share = max(1, self._room // (others + 2))  # as if one tenant more were there: it may come any time
        free = self._room - self.waiting
        return free > (0 if mine < share else self._room // KEPT_FREE)

    async def _turn(self, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._turns.setdefault(tenant, OrderedDict())[waiter] = None
        self.waiting += 1
        timer = loop.call_later(self._wait_s, self._too_late, tenant, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._forget(tenant, waiter)
            elif waiter.exception() is None:  # its turn had come, but it will not use it
                self.leave()
            raise
        finally:
            timer.cancel()

    def _too_late(self, tenant: str, waiter: asyncio.Future[None]) -> None:
        if waiter.done():
            return
        self._forget(tenant, waiter)
        waiter.set_exception(
            EngineOverloaded(
                f"The engine had no place for this request within {self._wait_s:g} seconds; try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        )

    def _forget(self, tenant: str, waiter: asyncio.Future[None]) -> None:
        waiters = self._turns.get(tenant)
        if waiters is None or waiter not in waiters:
            return
        del waiters[waiter]
        self.waiting -= 1
        if not waiters:
            del self._turns[tenant]
