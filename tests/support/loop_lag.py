"""How late a gateway's event loop is by this process's own doing, measured from within it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from support.gateways import FakeGateway

EVERY_S = 0.005


@dataclass
class Lag:
    """The longest time that a wake-up came too late, of which the process used the processor.

    What others had of the cores meanwhile, or a machine that stood still, is nothing that a body costs.
    """

    worst_s: float = 0.0
    stopped: bool = False


@contextmanager
def loop_lag(gateway: FakeGateway) -> Iterator[Lag]:
    lag = Lag()

    async def probe() -> None:
        while not lag.stopped:
            began, used = time.perf_counter(), time.process_time()
            await asyncio.sleep(EVERY_S)
            late = time.perf_counter() - began - EVERY_S
            lag.worst_s = max(lag.worst_s, min(late, time.process_time() - used))

    loop = gateway.server.servers[0].get_loop()
    probing = asyncio.run_coroutine_threadsafe(probe(), loop)
    try:
        yield lag
    finally:
        lag.stopped = True
        probing.result(30)
