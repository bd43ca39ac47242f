"""Tell whether an engine has nothing to do, for work that should keep nobody waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.engines.port import Engine, EngineState

LOOK_EVERY_S = 0.05
"""Seconds between two looks: an agent's next request comes at once, so one idle moment is not enough."""


def is_idle(engine: Engine) -> bool:
    """Return whether an engine runs, and has no request."""
    return engine.state is EngineState.READY and not engine.active


async def until_idle(engine: Engine, within_s: float, unless: Callable[[], bool] = lambda: False) -> None:
    """Wait until an engine was idle at two looks, one after the other.

    Args:
        engine: the engine.
        within_s: most seconds to wait.
        unless: returns whether the wait is to end at once.
    """
    deadline, before = time.monotonic() + within_s, False
    while time.monotonic() < deadline and not unless():
        idle = is_idle(engine)
        if idle and before:
            return
        before = idle
        await asyncio.sleep(LOOK_EVERY_S)
