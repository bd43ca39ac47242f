"""A thousand requests of a model and its adapters, mixed, with handoffs across them: none is wrong."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.gateways import RealGateway
from support.lora import (
    MixedRequests,
    assert_each_as_alone,
    kill_engine,
    load_b,
    write_adapter,
    write_settings,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]
REQUESTS = 250
"""Of each of four phases."""


@pytest.mark.fault("B19")
def test_a_thousand_mixed_requests_are_each_answered_as_alone(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b", "another-b")):
        write_adapter(tmp_path / name, seed)
    settings = write_settings(tmp_path, caching=True)
    with RealGateway(["--config", str(settings)], tmp_path, forked=True) as gateway:
        gateway.wait_until_ready()
        load_b(gateway, tmp_path, "b")
        mixed = MixedRequests(gateway, ["base", "a", "b"], seed=2)
        mixed.run(REQUESTS, workers=8, meanwhile=lambda: kill_engine(gateway))
        gateway.restart(signal.SIGKILL)
        mixed.run(REQUESTS, workers=8)
        load_b(gateway, tmp_path, "another-b", load_inplace=True)
        mixed.weights["b"] = "b'"
        mixed.run(REQUESTS, workers=8, meanwhile=lambda: kill_engine(gateway))
        write_settings(tmp_path, caching=False)  # so that KV comes from the store
        gateway.restart()
        mixed.run(REQUESTS, workers=8, meanwhile=lambda: kill_engine(gateway))
    assert len(mixed.asked) == 4 * REQUESTS
    assert_each_as_alone(mixed, tmp_path)
