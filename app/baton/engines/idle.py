"""Tell whether an engine has nothing to do, for work that should keep nobody waiting."""

from __future__ import annotations

import asyncio
import time

from baton.engines.port import Engine, EngineState

LOOK_EVERY_S = 0.05
"""Seconds between two looks: an agent's next request comes at once, so one idle moment is not enough."""


def is_idle(engine: Engine) -> bool:
    """Return whether an engine runs, and has no request."""
    return engine.state is EngineState.READY and not engine.active


async def until_idle(engine: Engine, within_s: float) -> None:
    """Wait until an engine was idle at two looks, one after the other, at most `within_s` seconds."""
    deadline, before = time.monotonic() + within_s, False
    while time.monotonic() < deadline:
        idle = is_idle(engine)
        if idle and before:
            return
        before = idle
        await asyncio.sleep(LOOK_EVERY_S)
