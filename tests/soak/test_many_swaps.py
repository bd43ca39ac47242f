"""Row A21: ten thousand times a model makes room for another; what stays behind is counted."""

from __future__ import annotations

import asyncio
import gc

import psutil
import pytest
from support.gateways import FakeGateway, run_fake
from support.raw_requests import metric, wait_for

from baton.engines.fake.engine import FakeEngine

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
SWAPS = 5000
MIB = 2**20
ALLOWED_MIB = 8
"""Beyond what allocators keep; a swap that left 2 KiB behind would show as 10."""


def loads(gateway: FakeGateway) -> float:
    return sum(
        metric(gateway, f'baton_engine_loads_total{{engine="{name}",outcome="ready"}}') for name in "ab"
    )


def swap(gateway: FakeGateway, count: int) -> None:
    with gateway.client() as client:
        for number in range(count):
            name = "ab"[number % 2]
            body = {"model": name, "prompt": "1 2 3", "max_tokens": 2, "stream": number % 3 == 0}
            assert client.post("/v1/completions", json=body).status_code == 200
            gateway.engine(name).bodies.clear()  # the fake keeps them for tests to look at
            gateway.engine(name).adapted.clear()


@pytest.mark.fault("A21")
def test_ten_thousand_swaps_leave_nothing_behind() -> None:
    told = {name: {"start": "on_demand", "memory": 100 * MIB} for name in "ab"}
    room = {"budget": 150 * MIB, "min_loaded_s": 0}
    process = psutil.Process()
    with run_fake(FakeEngine("a"), FakeEngine("b"), told=told, on_demand=room) as gateway:
        loop = gateway.app.state.started.get_loop()

        def figures() -> tuple[int, int, int, int]:
            gc.collect()
            tasks = len(asyncio.all_tasks(loop))
            return process.num_fds(), process.num_threads(), tasks, process.memory_info().rss

        swap(gateway, SWAPS)  # caches and allocators find their size
        before, first = figures(), loads(gateway)
        swap(gateway, SWAPS)
        wait_for(lambda: len(asyncio.all_tasks(loop)) <= before[2], "tasks stay behind")
        after = figures()
        assert first + loads(gateway) >= 2 * SWAPS
        grown = (after[3] - before[3]) / MIB
        print(
            f"A21: {SWAPS} swaps after as many: {grown:+.1f} MiB, descriptors {before[0]} -> {after[0]}, "
            f"threads {before[1]} -> {after[1]}, tasks {before[2]} -> {after[2]}"
        )
        assert after[0] <= before[0] + 2
        assert after[1] <= before[1] + 2
        assert grown < ALLOWED_MIB
