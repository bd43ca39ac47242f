"""What is done beside the event loop: work that outlives its request, and threads that wait for storage."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from baton.admission.fair_queue import FairQueue, QueueLimits, watched_queue
from baton.admission.fair_threads import FairThreads
from baton.errors import BatonError, GatewayOverloaded
from baton.telemetry.metrics import QueueMetrics

Result = TypeVar("Result")
THREADS = 8
FETCHES = 4
"""Fetches at once; they are not the threads that files of this machine are read by."""
PUSHES = 4
"""Handoffs that are copied to other machines at once, in threads that no request waits for."""
MAX_PUSHES = 64
"""Of more, the KV is not copied: the store is slower than the engines, and other machines compute."""
RETRY_AFTER_S = 5
LOOKS, WRITES = " looks", " writes"
"""What all tenants wait for takes turns of its own, like a tenant: looks for what other gateways changed, and
writes under the budget's lock. Neither waits behind removals, or behind a tenant's flood."""


class HandoffThreads:
    """The threads of one gateway's handoffs, shared between tenants.

    Args:
        wait_s: seconds that a request may wait for a thread; None: no limit.
        metrics: show the queues; None: nobody looks.

    Attributes:
        storage: look handoffs up, write and remove them.
        fetches: copy KV to this machine.
        pushes: copy KV and images to where other machines find them.
    """

    def __init__(self, wait_s: float | None = None, metrics: QueueMetrics | None = None) -> None:
        def threads(name: str, limits: QueueLimits) -> FairThreads:
            queue = watched_queue(limits, _busy, metrics, name) if metrics else FairQueue(limits, _busy)
            return FairThreads(queue, f"baton-{name}")

        self.storage = threads("handoffs", QueueLimits(THREADS, wait_s=wait_s))
        self.fetches = threads("handoff_fetches", QueueLimits(FETCHES, wait_s=wait_s))
        self.pushes = threads("handoff_pushes", QueueLimits(PUSHES, waiting=MAX_PUSHES))

    def close(self) -> None:
        """Begin no more fetches and pushes; those under way end by their deadlines."""
        self.fetches.close()
        self.pushes.close()


def _busy(_waited_s: float | None) -> BatonError:
    return GatewayOverloaded(
        "Too many requests use stored handoffs already; try again shortly.", retry_after_s=RETRY_AFTER_S
    )


class BackgroundWork:
    """The running work of one owner."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._log = structlog.get_logger("baton.handoffs")

    @property
    def running(self) -> frozenset[asyncio.Task[Any]]:
        """Return what has not ended yet."""
        return frozenset(self._running)

    def begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run work; an error that nobody can expect is logged."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, BatonError):  # whoever awaits the task raises those
            self._log.error("handoff_work_failed", exc_info=error)
