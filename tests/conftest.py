"""What all tests share: a clean environment, and gateways to talk to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateways import FakeGateway, RealGateway, run_fake

from baton.engines.fake import FakeEngine


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No setting of the person who runs the tests reaches them."""
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config"))


@pytest.fixture
def fake_gateway() -> Iterator[FakeGateway]:
    """A gateway with two fake engines and a fake pooling engine, on a real socket, of this test alone."""
    with run_fake(FakeEngine("alpha"), FakeEngine("beta"), FakeEngine("embed", pooling=True)) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def real_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    """`baton serve` with two engines on SmolLM2's real weights, shared by the whole run."""
    config = Path(__file__).parent / "engine" / "two_engines.toml"
    with RealGateway(["--config", str(config)], tmp_path_factory.mktemp("gateway")) as gateway:
        gateway.wait_until_ready()
        yield gateway
