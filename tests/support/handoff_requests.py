"""Requests that leave and take handoffs, at a gateway with fake engines."""

from __future__ import annotations

import time
from typing import Any

import httpx

from support.gateways import FakeGateway

TEXT: dict[str, Any] = {"model": "a", "prompt": "11 12 13", "max_tokens": 3}
CHAT: dict[str, Any] = {"model": "a", "messages": [{"role": "user", "content": "11"}]}
CONTEXT = [11, 12, 13, 11, 12, 13]


def post(gateway: FakeGateway, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    with gateway.client() as client:
        return client.post(path, json=body)


def leave(gateway: FakeGateway, **more: Any) -> str:
    told = post(gateway, TEXT | {"handoff": {"save": True}} | more).json()["handoff"]
    assert told["state"] == "ready"
    found: str = told["id"]
    return found


def first_handoff(gateway: FakeGateway) -> str:
    """Wait for the first handoff that is listed; it is still pending."""
    deadline = time.monotonic() + 20
    with gateway.client() as client:
        while not (found := client.get("/v1/handoffs").json()["data"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert found[0]["state"] == "pending"
    first: str = found[0]["id"]
    return first
