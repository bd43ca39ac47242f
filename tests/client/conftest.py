"""A gateway that hands over, and the client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.gateways import FakeGateway, run_fake

from baton.engines.fake.engine import FakeEngine
from baton_client import Baton


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    engines = (
        FakeEngine("a", supports_handoffs=True, placeholder=0),
        FakeEngine("same", supports_handoffs=True),
        FakeEngine("other", supports_handoffs=True, weights="others"),
        FakeEngine("plain"),
    )
    with run_fake(*engines) as running:
        yield running


@pytest.fixture
def baton(gateway: FakeGateway) -> Iterator[Baton]:
    with Baton(gateway.url, timeout_s=30, retries=0) as client:
        yield client
