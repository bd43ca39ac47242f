"""An engine whose process is killed: its clients are told, the other engine goes on, the log is quiet."""

from __future__ import annotations

import json
import signal
import time

import httpx
import psutil
import pytest
from gateways import RealGateway

pytestmark = pytest.mark.chaos
TOLD_WITHIN_S = 10
LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def test_a_killed_engine_ends_its_own_streams_with_one_error_event(real_gateway: RealGateway) -> None:
    cores = [
        child
        for child in psutil.Process(real_gateway.process.pid).children()
        if child.name().startswith("VLLM::EngineCor")
    ]
    first = min(cores, key=lambda process: process.create_time())
    with (
        real_gateway.client() as client,
        client.stream("POST", "/v1/completions", json=LONG | {"model": "smollm2"}) as dying,
        client.stream("POST", "/v1/completions", json=LONG | {"model": "smollm2-fp32"}) as living,
    ):
        dying_lines, living_lines = dying.iter_lines(), living.iter_lines()
        next(dying_lines)
        next(living_lines)
        first.send_signal(signal.SIGKILL)
        rest = [line for line in dying_lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert (rest[-2], error["code"]) == ("event: error", "engine_unavailable")
        assert next(line for line in living_lines if line).startswith("data: {")
    _refused_with_retry_after(real_gateway)
    answer = httpx.post(
        f"{real_gateway.url}/v1/completions",
        json={"model": "smollm2-fp32", "prompt": "x", "max_tokens": 2},
        timeout=60,
    )
    assert answer.status_code == 200
    assert "Traceback" not in real_gateway.log


def _refused_with_retry_after(gateway: RealGateway) -> None:
    deadline = time.monotonic() + TOLD_WITHIN_S
    while httpx.get(f"{gateway.url}/readyz").status_code == 200:
        assert time.monotonic() < deadline, "the gateway still calls itself ready"
        time.sleep(0.05)
    refused = httpx.post(f"{gateway.url}/v1/completions", json={"model": "smollm2", "prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
