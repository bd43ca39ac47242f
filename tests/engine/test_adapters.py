"""Two LoRA adapters and the weights below them answer as each alone, through handoffs, caches and restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.gateways import RealGateway
from support.lora import MixedRequests, write_adapter

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
REQUESTS = 48
NAMES = {"base": "base", "a": "a", "b": "b", "b'": "another-b"}
"""What answers alone for each of the weights that answer together."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b", "another-b")):
        write_adapter(folder / name, seed)
    settings = (HERE / "adapter_engines.toml").read_text().format(folder=folder, caching="true")
    (folder / "baton.toml").write_text(settings)
    (folder / "alone.toml").write_text((HERE / "alone_engines.toml").read_text().format(folder=folder))
    (folder / "of-alone").mkdir()
    return folder


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[RealGateway]:
    with RealGateway(["--config", str(folder / "baton.toml")], folder) as running:
        running.wait_until_ready()
        yield running


def operate(gateway: RealGateway, path: str, **body: Any) -> None:
    with gateway.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text


def kill_the_engine(gateway: RealGateway) -> None:
    """Kill the engine's processes, whose state is its adapters' too."""
    for child in psutil.Process(gateway.process.pid).children(recursive=True):
        if "EngineCore" in child.name() or any("EngineCore" in word for word in child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)


def test_each_answers_as_alone_through_handoffs_caches_and_restarts(
    gateway: RealGateway, folder: Path
) -> None:
    operate(gateway, "/v1/load_lora_adapter", lora_name="b", lora_path=str(folder / "b"))
    mixed = MixedRequests(gateway, ["base", "a", "b"], seed=1)
    mixed.run(REQUESTS // 3, meanwhile=lambda: kill_the_engine(gateway))
    gateway.restart()
    mixed.run(REQUESTS // 3)
    operate(
        gateway,
        "/v1/load_lora_adapter",
        lora_name="b",
        lora_path=str(folder / "another-b"),
        load_inplace=True,
    )
    mixed.weights["b"] = "b'"
    mixed.run(REQUESTS // 3)
    gateway.stop()
    with RealGateway(["--config", str(folder / "alone.toml")], folder / "of-alone") as alone:
        alone.wait_until_ready()
        wrong = mixed.wrong(alone, NAMES)
    assert len(mixed.asked) == REQUESTS
    assert wrong == [], f"{len(wrong)} of {len(mixed.asked)}"
    assert mixed.outcomes[True, "loaded"] + mixed.outcomes[True, "resident"] > 0, mixed.outcomes
    assert mixed.outcomes[False, "recomputed"] > 0, mixed.outcomes
    said = {weights: {each.answer for each in mixed.asked if each.weights == weights} for weights in NAMES}
    assert all(not said[one] >= said[other] for one in NAMES for other in NAMES if one != other), (
        "they differ"
    )
