"""Run a plugin's own code off the gateway's event loop.

Synchronous hooks run in threads, a bounded number at once; the hook of a request that ends early goes on in
its thread. Coroutines run on an event loop of the plugin's own, in one thread as its author expects. A
coroutine that blocks holds up that loop, so later requests get a new one; a request stays on the loop it
began on, and a loop is closed when its last request is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import structlog

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.admission.fair_threads import FairThreads, WorkEscape
from baton.errors import PluginBusy

Result = TypeVar("Result")
log = structlog.get_logger("baton.pooling")

HEARTBEAT_S = 0.25
STALLED_S = 1.0
"""A plugin's loop that has not run its heartbeat for so many seconds is blocked."""


def hook_threads(name: str, limit: int | None) -> FairThreads:
    """Return threads for one plugin's synchronous code, shared between tenants.

    Args:
        name: the plugin's name, for the threads' names.
        limit: threads of one tenant at once; None: no limit.
    """
    queue = None if limit is None else FairQueue(QueueLimits(limit), _never)
    return FairThreads(queue, f"hook-{name}", may_hang=True)


def _never(_waited_s: float | None) -> PluginBusy:
    """Return the error that `FairQueue` asks for; never raised, for a hook waits without a limit."""
    return PluginBusy()


class HookLoop:
    """The event loop of one plugin's coroutines, replaced when it is blocked.

    Args:
        name: the plugin's name, for the threads' names.
        limit: blocked loops there may be; with more, requests are refused.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._current: PluginLoopThread | None = None
        self._retired: list[PluginLoopThread] = []

    @property
    def stuck(self) -> int:
        """Number of replaced loops whose thread still runs."""
        self._retired = [thread for thread in self._retired if thread.is_alive()]
        return len(self._retired)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[PluginLoopThread]:
        """Give one request a loop for as long as the block runs.

        Raises:
            PluginBusy: too many loops are blocked.
        """
        thread = self._pick()
        thread.users += 1
        try:
            yield thread
        finally:
            thread.users -= 1
            if thread is not self._current and thread.users == 0:
                thread.end()

    def _pick(self) -> PluginLoopThread:
        if self._current is not None and not self._current.responsive:
            log.warning("plugin_blocks_its_loop", plugin=self._name)
            self._retire()
        if self._current is None:
            if self.stuck >= self._limit:
                raise PluginBusy()
            self._current = PluginLoopThread(self._name)
            self._current.start()
        return self._current

    def _retire(self) -> None:
        thread, self._current = self._current, None
        if thread is None:
            return
        self._retired.append(thread)
        if thread.users == 0:
            thread.end()

    def close(self) -> None:
        self._retire()


class PluginLoopThread(threading.Thread):
    """A thread that keeps one event loop running, whatever a plugin does to it, until `end` is called.

    Attributes:
        users: requests that use the loop now.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=f"hooks-{name}", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._beat = time.monotonic()
        self._ending = False
        self.users = 0

    @property
    def responsive(self) -> bool:
        return self.is_alive() and time.monotonic() - self._beat <= STALLED_S

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._pulse)
        while not self._ending:
            try:
                self._loop.run_forever()  # returns when a plugin stops it, too
            except BaseException as error:  # noqa: BLE001  # a task of the plugin's own; the others go on
                log.error("plugin_task_failed", thread=self.name, cause=type(error).__name__)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        with contextlib.suppress(Exception):  # of the plugin's, while its generators are closed
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _pulse(self) -> None:
        self._beat = time.monotonic()
        self._loop.call_later(HEARTBEAT_S, self._pulse)

    def end(self) -> None:
        """End the thread once no coroutine blocks it."""
        self._ending = True
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def run_here(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Await `coroutine` on this thread's loop; cancelling the caller cancels the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_contained(coroutine), self._loop))


async def _contained(coroutine: Coroutine[Any, Any, Result]) -> Result:
    try:
        return await coroutine
    except Exception:
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise WorkEscape("CancelledError") from None
    except BaseException as error:  # noqa: BLE001  # a plugin must not end the thread
        raise WorkEscape(type(error).__name__) from None
