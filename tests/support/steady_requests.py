"""A gateway that is asked all the time while it has heavy work to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from support.gateways import RealGateway
from support.load import waited_for_a_core

HELD_UP_S = 1.0
"""What would hold the loop does so for seconds; the time in which other processes had its core does not count."""


@contextmanager
def asked_all_the_time(gateway: RealGateway, row: str) -> Iterator[None]:
    """`/livez` is asked every 5 ms meanwhile, and answers."""
    waits: list[float] = []
    over = threading.Event()
    loop = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}")

    def ask() -> None:
        mine = Path(f"/proc/self/task/{threading.get_native_id()}")
        with gateway.client() as probe:
            while not over.is_set():
                began, waited = time.monotonic(), waited_for_a_core(mine) + waited_for_a_core(loop)
                assert probe.get("/livez").status_code == 200
                waited = waited_for_a_core(mine) + waited_for_a_core(loop) - waited
                waits.append(max(0.0, time.monotonic() - began - waited))
                time.sleep(0.005)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join()
    median, late, most = (1000 * float(np.quantile(waits, share)) for share in (0.5, 0.99, 1.0))
    print(f"{row}: /livez {len(waits)} asked, median {median:.1f} ms, p99 {late:.1f} ms, most {most:.0f} ms")
    assert most < HELD_UP_S * 1000
