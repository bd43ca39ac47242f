"""Measure the delay of the event loop."""

from __future__ import annotations

import asyncio

import structlog
from prometheus_client import Histogram

EVERY_S = 0.1
STALL_S = 0.5
"""A delay above this is logged."""


async def watch_lag(lag: Histogram) -> None:
    """Sleep repeatedly and record how late the loop resumes, until cancelled."""
    loop = asyncio.get_running_loop()
    log = structlog.get_logger("baton.loop")
    while True:
        due = loop.time() + EVERY_S
        await asyncio.sleep(EVERY_S)
        late = max(0.0, loop.time() - due)
        lag.observe(late)
        if late > STALL_S:
            log.warning("event_loop_stalled", seconds=round(late, 3))
