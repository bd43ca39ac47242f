"""Run blocking work in threads that tenants share fairly."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.admission.fair_queue import FairQueue

Result = TypeVar("Result")


class FairThreads:
    """Threads for blocking work, one for each place of a queue.

    A thread cannot be stopped: the work of a cancelled request keeps its place until it is done.

    Args:
        queue: gives the places.
        name: prefix of the threads' names.
    """

    def __init__(self, queue: FairQueue, name: str) -> None:
        self._queue = queue
        self._pool = ThreadPoolExecutor(queue.most, thread_name_prefix=name)

    def close(self) -> None:
        """Refuse further work; running work is finished."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Call `work` in a thread, once it is the tenant's turn, and return its result.

        Raises:
            BatonError: the queue refused the request.
            Exception: `work` raised it.
        """
        await self._queue.enter(tenant)
        loop = asyncio.get_running_loop()
        try:
            job = self._pool.submit(contextvars.copy_context().run, work)
        except RuntimeError:  # the pool is shut down
            self._queue.leave(tenant)
            raise

        def leave(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits
                loop.call_soon_threadsafe(self._queue.leave, tenant)

        job.add_done_callback(leave)
        return await asyncio.wrap_future(job)
