"""An engine of two tensor-parallel ranks behind the gateway: handoffs, a rank that dies, another number of ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import psutil
import pytest
from support.gateways import RealGateway
from support.made_models import make_models
from support.relay_requests import ask, cached, ids, once_saved, told
from support.watched_streams import cores, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(900)]
TINY_MODELS = Path(__file__).parents[1] / "connector" / "tiny_models.py"
DOCUMENT = "".join(f"Bird {number} sings {number * 37 % 101} songs. " for number in range(12))
SETTINGS = {"BATON_SUPERVISION__BACKOFF_S": "0.5"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of four heads, random but lively."""
    return make_models(TINY_MODELS, tmp_path_factory.mktemp("families")) / "llama-4-heads"


def gateway_of(model: Path, folder: Path, ranks: int) -> RealGateway:
    """`baton serve` with one engine of so many ranks, over the store in a folder."""
    args = {"dtype": "float32", "max_model_len": 1024, "block_size": 32, "tensor_parallel_size": ranks}
    engine = {"name": "reader", "model": str(model), "handoff": True, "kv_cache_memory": "64MiB"}
    values = {
        "BATON_ENGINES": json.dumps([engine | {"args": args | {"enable_prefix_caching": False}}]),
        "BATON_HANDOFFS__STORE": f"file:{folder / 'store'}",
    }
    return RealGateway([], folder, SETTINGS | values)


def workers(gateway: RealGateway) -> list[psutil.Process]:
    (core,) = cores(gateway.process.pid)
    return [child for child in core.children(recursive=True) if "Worker" in child.name()]


def goes_on(gateway: RealGateway, handoff: str, expected: list[int]) -> int:
    """Continue a handoff four times; the answer is always what the whole prompt is answered with.

    The planner may compute a tiny model's context anew, but then loads at every second time to measure. Return how
    often its KV was loaded.
    """
    loads = 0
    for _ in range(4):
        relayed = ask(gateway, "reader", " And", handoff={"from": handoff})
        assert ids(relayed)[1] == expected
        assert (cached(relayed) > 100) is (told(relayed)["source"]["outcome"] == "loaded")
        loads += cached(relayed) > 0
    assert ids(ask(gateway, "reader", ids(relayed)[0]))[1] == expected
    assert loads >= 2
    return loads


@pytest.mark.fault("A2")
def test_a_handoff_outlives_a_rank_and_goes_on_with_another_number_of_ranks(
    model: Path, tmp_path: Path
) -> None:
    with gateway_of(model, tmp_path, 2) as gateway:
        gateway.wait_until_ready()
        assert len(workers(gateway)) == 2
        first = once_saved(gateway, told(ask(gateway, "reader", DOCUMENT, handoff={"save": True})))
        assert first["state"] == "ready"
        context = ask(gateway, "reader", " And", handoff={"from": first["id"]})
        expected = ids(ask(gateway, "reader", ids(context)[0]))[1]
        loads = goes_on(gateway, first["id"], expected) + (cached(context) > 0)
        assert transfers(gateway) == {"load": loads, "failed": 0}, "once a request, not once a rank"
        workers(gateway)[1].kill()
        wait_for(lambda: httpx.get(f"{gateway.url}/readyz").json()["engines"] != {"ready": 1}, 30)
        wait_for(lambda: httpx.get(f"{gateway.url}/readyz").json()["engines"] == {"ready": 1}, 300)
        goes_on(gateway, first["id"], expected)
        assert transfers(gateway)["failed"] == 0
    with gateway_of(model, tmp_path, 1) as gateway:
        gateway.wait_until_ready()
        goes_on(gateway, first["id"], expected)
    assert list((tmp_path / "store" / "writing").iterdir()) == []


def transfers(gateway: RealGateway) -> dict[str, float]:
    """How many loads there were, and how many loads and saves failed."""
    page = httpx.get(f"{gateway.url}/metrics").text
    loads = re.findall(
        r'^baton_store_op_duration_seconds_count{[^}]*op="load"[^}]*} (\S+)$', page, re.MULTILINE
    )
    failed = re.findall(r"^baton_store_errors_total{[^}]*} (\S+)$", page, re.MULTILINE)
    return {"load": sum(map(float, loads)), "failed": sum(map(float, failed))}
