"""Threads that tenants share: a flood of one tenant's work leaves a thread to the others."""

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
    """Run blocking work in threads, one for each place of a queue.

    A thread cannot be stopped: the work of a request that was given up keeps its place until it is done.

    Args:
        queue: whose turn it is.
        name: of the threads, for a debugger's list.
    """

    def __init__(self, queue: FairQueue, name: str) -> None:
        self._queue = queue
        self._pool = ThreadPoolExecutor(queue.most, thread_name_prefix=name)

    def close(self) -> None:
        """Take no more work; what runs comes to its end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Call `work` in a thread, once it is the tenant's turn.

        Raises:
            BatonError: there was no place for it.
            Exception: whatever the work raises.
        """
        await self._queue.enter(tenant)
        loop = asyncio.get_running_loop()
        try:
            job = self._pool.submit(contextvars.copy_context().run, work)
        except RuntimeError:  # the threads are closed
            self._queue.leave(tenant)
            raise

        def over(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._queue.leave, tenant)

        job.add_done_callback(over)
        return await asyncio.wrap_future(job)
