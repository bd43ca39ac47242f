"""Measure the delay of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from prometheus_client import Histogram

EVERY_S = 0.1
STALL_S = 0.5
"""A delay above this is logged."""


async def watch_lag(lag: Histogram, ready: Callable[[], bool] = lambda: True) -> None:
    """Sleep repeatedly and record how late the loop resumes, until cancelled.

    Args:
        ready: whether the gateway is. Until it was once, engines that start import vLLM in threads, which
            holds the loop up too: that is recorded, and no reason for a warning.
    """
    loop = asyncio.get_running_loop()
    was_ready = False
    log = structlog.get_logger("baton.loop")
    while True:
        due = loop.time() + EVERY_S
        await asyncio.sleep(EVERY_S)
        late = max(0.0, loop.time() - due)
        lag.observe(late)
        was_ready = was_ready or ready()
        if late > STALL_S and was_ready:
            log.warning("event_loop_stalled", seconds=round(late, 3))
