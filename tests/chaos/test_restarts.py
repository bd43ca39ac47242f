"""Many starts and stops of one gateway: nothing of them adds up."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest
from support.gateways import free_port, run_fake
from support.raw_requests import TEXT

from baton.engines.fake.engine import FakeEngine

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.fault("H4"), pytest.mark.timeout(300)]
STARTS = 100


def held() -> dict[str, int]:
    """What this process holds that a start could leave behind."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "shared memory": sum(name.startswith("baton") for name in os.listdir("/dev/shm")),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
    }


def test_a_hundred_starts_and_stops_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one port, with one store, a request each: the port is free again each time."""
    scratch = tmp_path / "scratch"  # the machine's own is used by others too
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    port, store = free_port(), f"file:{tmp_path / 'store'}"
    after_two: dict[str, int] = {}
    for count in range(STARTS):
        engine = FakeEngine("a")
        with (
            run_fake(engine, port=port, handoffs={"store": store}) as gateway,
            gateway.client() as client,
        ):
            assert client.post("/v1/completions", json=TEXT).status_code == 200
        if count == 1:
            after_two = held()
    assert held() == after_two
    assert [entry.name for entry in tmp_path.iterdir()] in (
        ["scratch"],
        ["scratch", "store"],
        ["store", "scratch"],
    )
