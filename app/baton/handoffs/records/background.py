"""Work that goes on when the request that began it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from baton.errors import BatonError

Result = TypeVar("Result")


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
