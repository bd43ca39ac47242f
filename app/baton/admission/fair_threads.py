"""Run blocking work in threads: in turns that tenants share fairly, or in a thread of its own.

`asyncio.to_thread` is not used: its threads are one queue for all tenants, in which one tenant's slow work
holds up everybody's. What a request waits for has a `FairThreads`. A thread of its own (`in_own_thread`) is
for what is bounded elsewhere: a request that holds a place in another queue, or what the gateway itself does.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import structlog

from baton.admission.fair_queue import FairQueue

Result = TypeVar("Result")
OURS = ""
"""Stands for the tenant where the gateway itself has something to do."""


class WorkEscape(Exception):
    """Stands for an exception of a thread that would mean something else to its caller, as `SystemExit`."""


class FairThreads:
    """Threads for blocking work, one for each place of a queue: requests' own work, and plugins' hooks.

    A thread cannot be stopped: the work of a cancelled request keeps its place until it is done.

    Args:
        queue: gives the places; None: there is no limit.
        may_hang: the work may never end, as a plugin's: a cancelled request gives its place back, and the
            process does not wait for its threads.

    Attributes:
        left_behind: threads that still run though their request is over.
    """

    def __init__(self, queue: FairQueue | None, name: str, *, may_hang: bool = False) -> None:
        self._queue = queue
        self._name = name
        self._may_hang = may_hang
        self._closed = False
        self.left_behind = 0

    def close(self) -> None:
        """Refuse further work, and what waits; running work is finished."""
        self._closed = True

    async def run(
        self, tenant: str, work: Callable[..., Result], *args: Any, patient: bool = False
    ) -> Result:
        """Call `work` in a thread, once it is the tenant's turn, and return its result.

        Args:
            patient: nobody waits for it: it takes its turn however late that comes.

        Raises:
            BatonError: the queue refused the request.
            RuntimeError: the threads are closed.
            Exception: `work` raised it.
        """
        if self._queue is not None:
            await self._queue.enter(tenant, patient=patient)

        def leave() -> None:
            if self._queue is not None:
                self._queue.leave(tenant)

        if self._closed:
            leave()
            raise RuntimeError("the gateway ends")
        call = _Call(work, args, leave)
        try:
            call.start(self._name, daemon=self._may_hang)
            result: Result = await call.future
            return result
        except asyncio.CancelledError:
            if not call.done:
                self.left_behind += 1
                call.when_done.append(self._one_ended)
                if self._may_hang:
                    call.leave()
            raise

    def _one_ended(self) -> None:
        self.left_behind -= 1


async def in_own_thread(work: Callable[..., Result], *args: Any, **named: Any) -> Result:
    """Call `work` in a thread of its own, and return its result."""
    return await FairThreads(None, "baton-work").run(OURS, partial(work, *args, **named))


class _Call:
    """One call in a thread.

    Args:
        leave: gives its place back; called once.
    """

    def __init__(self, work: Callable[..., Any], args: tuple[Any, ...], leave: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._args = args
        self._leave: Callable[[], None] | None = leave
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self.done = False
        self.when_done: list[Callable[[], None]] = []

    def start(self, name: str, *, daemon: bool) -> None:
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=daemon)
        try:
            thread.start()
        except RuntimeError:  # the system has no further threads
            self.leave()
            raise

    def leave(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def _run(self) -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = self._work(*self._args)
        except (StopIteration, StopAsyncIteration) as raised:  # no future can hold one
            error = WorkEscape(type(raised).__name__)
        except Exception as raised:  # noqa: BLE001  # the thread's border: raised where the work is awaited
            error = raised
        except BaseException as raised:  # noqa: BLE001  # a plugin must not end the process
            error = WorkEscape(type(raised).__name__)
        try:
            self._loop.call_soon_threadsafe(self._settle, result, error)
        except RuntimeError:  # the loop is closed; nobody awaits the call
            structlog.get_logger("baton.server").debug("work_outlived_gateway")

    def _settle(self, result: Any, error: Exception | None) -> None:
        self.done = True
        self.leave()
        for each in self.when_done:
            each()
        with contextlib.suppress(asyncio.InvalidStateError):  # cancelled
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)
