"""Dear schemas on a real engine: refused or answered, and other tenants are answered all the while."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from support.gateways import RealGateway
from support.schemas import DEAR, ORDINARY
from support.steady_requests import asked_all_the_time

pytestmark = [
    pytest.mark.engine,
    pytest.mark.chaos,
    pytest.mark.alone,
    pytest.mark.fault("E10"),
    pytest.mark.fault("E14"),
    pytest.mark.timeout(600),
]
UNNOTICED_S = 0.25
"""What nobody calls a wait: one of these schemas compiled in the engine takes seconds."""
READ_WITHIN_S = 2.0
"""The engine reads one body after the other, and 512 tools take it a quarter of a second."""
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


@contextmanager
def chatting(gateway: RealGateway, tenant: str) -> Iterator[list[float]]:
    """A tenant who chats all the time; the seconds each answer took."""
    waits: list[float] = []
    over = threading.Event()

    def chat() -> None:
        with gateway.client(tenant) as client:
            while not over.is_set():
                began = time.monotonic()
                assert client.post("/v1/chat/completions", json=CHAT, timeout=120).status_code == 200
                waits.append(time.monotonic() - began)

    thread = threading.Thread(target=chat)
    thread.start()
    try:
        yield waits
    finally:
        over.set()
        thread.join()


def test_one_tenants_dear_schemas_are_not_the_others_wait(tiny_gateway: RealGateway) -> None:
    with chatting(tiny_gateway, "globex") as alone:
        time.sleep(5)
    with (
        tiny_gateway.client("acme") as client,
        asked_all_the_time(tiny_gateway, "E14"),
        chatting(tiny_gateway, "globex") as beside,
    ):
        for name, (more, param) in DEAR.items():
            began = time.monotonic()
            answer = client.post("/v1/chat/completions", json=CHAT | more)
            print(f"E14: {name}: {answer.status_code} after {time.monotonic() - began:.2f} s")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), name
    usual, late = (float(np.median(waits)) for waits in (alone, beside))
    print(
        f"E14: the other tenant's chats: median {usual:.2f} s, at most {max(alone):.2f} s alone; "
        f"{late:.2f} and {max(beside):.2f} s beside {len(DEAR)} schemas"
    )
    assert late < max(3 * max(alone), UNNOTICED_S)
    assert max(beside) < READ_WITHIN_S


@pytest.mark.parametrize("name", [name for name, body in ORDINARY.items() if "response_format" in body])
def test_ordinary_schemas_are_answered(tiny_gateway: RealGateway, name: str) -> None:
    with tiny_gateway.client("acme") as client:
        began = time.monotonic()
        answer = client.post("/v1/chat/completions", json=CHAT | ORDINARY[name], timeout=120)
    print(f"E14: {name}: {answer.status_code} after {time.monotonic() - began:.2f} s")
    assert answer.status_code == 200, answer.text
