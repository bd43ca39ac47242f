"""How late the loop is (row E11)."""

from __future__ import annotations

import asyncio
import time

import pytest
import structlog

from baton.telemetry import lag as lag_module
from baton.telemetry.lag import until_beat, watch_lag
from baton.telemetry.metrics import GatewayMetrics


async def watched(stall_s: float, *, ready: bool = True) -> tuple[GatewayMetrics, list[str]]:
    """The metrics and the log of a loop that is held once for so long."""
    metrics = GatewayMetrics()
    with structlog.testing.capture_logs() as logs:
        watch = asyncio.create_task(watch_lag(metrics.loop_lag, lambda: ready))
        await asyncio.sleep(0.15)
        time.sleep(stall_s)  # noqa: ASYNC251  # holds the loop on purpose
        await asyncio.sleep(0.15)
        watch.cancel()
    return metrics, [line["event"] for line in logs]


@pytest.mark.fault("E11")
async def test_a_blocked_loop_is_measured_and_logged() -> None:
    metrics, logs = await watched(0.75)
    registry = metrics.registry
    held = registry.get_sample_value("baton_event_loop_lag_seconds_sum") or 0
    seen = registry.get_sample_value("baton_event_loop_lag_seconds_count") or 0
    below = registry.get_sample_value("baton_event_loop_lag_seconds_bucket", {"le": "0.5"}) or 0
    print(f"E11: held for 0.75 s, {held:.2f} s of lag seen in {seen:.0f} looks")
    assert held >= 0.6
    assert seen - below >= 1
    assert logs.count("event_loop_stalled") >= 1


@pytest.mark.fault("E11")
async def test_where_a_loop_is_held_up_is_logged_while_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag_module, "STUCK_S", 0.3)
    monkeypatch.setattr(lag_module, "LOOK_EVERY_S", 0.01)
    with structlog.testing.capture_logs() as logs:
        watch = asyncio.create_task(watch_lag(GatewayMetrics().loop_lag))
        await asyncio.sleep(0)  # it watches from its first step, not from its first look
        ends = time.monotonic() + 20
        while not logs and time.monotonic() < ends:
            time.sleep(0.01)  # noqa: ASYNC251  # holds the loop on purpose
        watch.cancel()
    (line,) = logs
    assert line["event"] == "event_loop_stuck"
    assert any(call.endswith("test_where_a_loop_is_held_up_is_logged_while_it_is") for call in line["stack"])


@pytest.mark.fault("E11")
async def test_before_the_gateway_is_ready_a_blocked_loop_is_measured_only() -> None:
    """A healthy start warns of nothing: vLLM's imports hold the loop up, and nobody waits yet."""
    metrics, logs = await watched(0.75, ready=False)
    assert (metrics.registry.get_sample_value("baton_event_loop_lag_seconds_sum") or 0) >= 0.6
    assert logs == []


@pytest.mark.fault("E11")
async def test_a_short_delay_is_measured_only() -> None:
    metrics, logs = await watched(0.2)
    assert (metrics.registry.get_sample_value("baton_event_loop_lag_seconds_sum") or 0) >= 0.05
    below = metrics.registry.get_sample_value("baton_event_loop_lag_seconds_bucket", {"le": "0.5"}) or 0
    seen = metrics.registry.get_sample_value("baton_event_loop_lag_seconds_count") or 0
    assert logs.count("event_loop_stalled") == seen - below, "only what the machine itself held up for longer"


async def test_looks_of_different_lengths_meet_at_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is skipped, and one that woke a moment too early does not come twice."""
    loop, now = asyncio.get_running_loop(), 100.03
    monkeypatch.setattr(loop, "time", lambda: now)
    assert now + until_beat(0.1) == pytest.approx(100.1)
    assert now + until_beat(0.2) == pytest.approx(100.2)
    now = 100.1996
    assert now + until_beat(0.1) == pytest.approx(100.3)
    assert now + until_beat(0.2) == pytest.approx(100.4)
