"""The gateway that the tests in this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gateways import RealGateway
from vision.tiny_vision import make_llava

CONFIG = Path(__file__).with_name("engines.toml")


@pytest.fixture(scope="session")
def vision_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    """`baton serve` with a tiny random LLaVA: two engines that hand over, and one with a short context."""
    folder = tmp_path_factory.mktemp("vision")
    make_llava(folder / "model")
    (folder / "baton.toml").write_text(CONFIG.read_text().format(folder=folder))
    with RealGateway(["--config", str(folder / "baton.toml")], folder, forked=True) as gateway:
        gateway.wait_until_ready()
        yield gateway
