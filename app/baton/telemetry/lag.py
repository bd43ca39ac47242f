"""Measure the delay of the event loop, and log where it is held up."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import structlog
from prometheus_client import Histogram

EVERY_S = 0.1
STALL_S = 0.5
"""A delay above this is logged."""
STUCK_S = 5.0
"""After so long, the loop's stack is logged while it is held up."""
LOOK_EVERY_S = 1.0
DEEPEST = 12
"""Most calls of the stack in the log, the innermost."""


def until_beat(seconds: float) -> float:
    """Seconds until the event loop's clock shows a multiple of `seconds`, and at least half of them.

    Looks that come at the same beats wake the process once: a wake costs an idle processor more than a look.
    """
    left = seconds - asyncio.get_running_loop().time() % seconds
    return left if left > seconds / 2 else left + seconds


async def watch_lag(lag: Histogram, ready: Callable[[], bool] = lambda: True) -> None:
    """Sleep repeatedly and record how late the loop resumes, until cancelled.

    Args:
        ready: whether the gateway is. Until it was once, engines that start import vLLM in threads, which
            holds the loop up too: that is recorded, and no reason for a warning.
    """
    loop = asyncio.get_running_loop()
    was_ready = False
    log = structlog.get_logger("baton.loop")
    with _looking_from_outside() as resumed:
        while True:
            was_ready = was_ready or ready()
            if was_ready:
                resumed()
            due = loop.time() + (left := until_beat(EVERY_S))
            await asyncio.sleep(left)
            late = max(0.0, loop.time() - due)
            lag.observe(late)
            if late > STALL_S and was_ready:
                log.warning("event_loop_stalled", seconds=round(late, 3))


@contextlib.contextmanager
def _looking_from_outside() -> Iterator[Callable[[], None]]:
    """Log this thread's stack, once, if `STUCK_S` pass after a call of what this yields without the next."""
    thread, ended, last = threading.get_ident(), threading.Event(), float("inf")

    def resumed() -> None:
        nonlocal last
        last = time.monotonic()

    def look() -> None:
        told = 0.0
        while not ended.wait(LOOK_EVERY_S):
            seconds, seen = time.monotonic() - last, last
            if seconds > STUCK_S and seen != told:
                told = seen
                calls = traceback.extract_stack(sys._current_frames()[thread])[-DEEPEST:]
                stack = [f"{call.filename}:{call.lineno} {call.name}" for call in calls]
                structlog.get_logger("baton.loop").error(
                    "event_loop_stuck", seconds=round(seconds, 1), stack=stack
                )

    threading.Thread(target=look, name="loop-watch", daemon=True).start()
    try:
        yield resumed
    finally:
        ended.set()
