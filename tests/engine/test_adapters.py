"""Two LoRA adapters and the weights below them answer as each alone, through handoffs, caches and restarts."""

from __future__ import annotations

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

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
REQUESTS = 6
"""Of each phase, at least; `tests/chaos/test_adapters.py` makes a thousand."""


@pytest.mark.fault("B19")
def test_each_answers_as_alone_through_handoffs_caches_and_restarts(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b", "another-b")):
        write_adapter(tmp_path / name, seed)
    settings = write_settings(tmp_path, caching=True)
    with RealGateway(["--config", str(settings)], tmp_path, forked=True) as gateway:
        gateway.wait_until_ready()
        with gateway.client() as client:
            parents = {card["id"]: card["parent"] for card in client.get("/v1/models").json()["data"]}
            assert parents == {"base": None, "a": "base"}
        load_b(gateway, tmp_path, "b")
        mixed = MixedRequests(gateway, ["base", "a", "b"], seed=1)
        mixed.run(REQUESTS, meanwhile=lambda: kill_engine(gateway))
        write_settings(tmp_path, caching=False)  # so that KV comes from the store
        gateway.restart()
        mixed.run(REQUESTS)
        load_b(gateway, tmp_path, "another-b", load_inplace=True)
        mixed.weights["b"] = "b'"
        mixed.run(REQUESTS)
        while not (mixed.outcomes[True, "loaded"] and mixed.outcomes[False, "recomputed"]):
            mixed.run(4)  # what is drawn has had neither yet
    assert_each_as_alone(mixed, tmp_path, documents=4)
