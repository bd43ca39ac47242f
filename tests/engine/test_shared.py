"""Two gateways with stores of their own, as on two machines, share handoffs through a real Valkey."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.gateways import RealGateway
from support.relays import ask, cached, ids, once_saved, told
from support.shared_gateways import gateways_over
from support.shared_stores import BINARIES, StoreServer, store_server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.skipif(BINARIES["valkey"] is None, reason="no valkey-server is installed"),
]
DOCUMENT = " ".join(f"Chapter {number} tells of {number * 37 % 101} birds." for number in range(60))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with store_server("valkey", tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture(scope="module")
def gateways(
    server: StoreServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RealGateway, RealGateway]]:
    with gateways_over(server.url, tmp_path_factory.mktemp("gateways")) as (one, two):
        yield one, two


def test_b_on_another_machine_loads_what_a_computed_and_says_the_same(
    gateways: tuple[RealGateway, RealGateway],
) -> None:
    one, two = gateways
    saved = once_saved(one, told(ask(one, "smollm2", DOCUMENT, handoff={"save": True})))
    relayed = ask(two, "smollm2", " In the end", handoff={"from": saved["id"], "save": True})
    prompt, said = ids(relayed)
    source = told(relayed)["source"]
    assert (source["outcome"], source["loaded_tokens"]) == ("loaded", saved["tokens"] - 1)
    assert cached(relayed) == saved["tokens"] - 1
    plain = ask(one, "smollm2", prompt)
    assert (said, cached(plain)) == (ids(plain)[1], 0)
    # and back: what continues it shares its file, of which the first machine has the beginning
    longer = once_saved(two, told(relayed))
    again = ask(one, "smollm2", " The first bird", handoff={"from": longer["id"]})
    assert told(again)["source"]["outcome"] == "loaded"
    assert ids(again)[1] == ids(ask(one, "smollm2", ids(again)[0]))[1]


def test_what_another_machine_deletes_is_gone(gateways: tuple[RealGateway, RealGateway]) -> None:
    one, two = gateways
    saved = once_saved(one, told(ask(one, "smollm2", DOCUMENT, handoff={"save": True})))
    with two.client() as client:
        assert client.patch(f"/v1/handoffs/{saved['id']}", json={"label": "theirs"}).status_code == 200
    with one.client() as client:
        assert client.get(f"/v1/handoffs/{saved['id']}").json()["label"] == "theirs"
    with two.client() as client:
        assert client.delete(f"/v1/handoffs/{saved['id']}").is_success
    with one.client() as client:
        assert client.get(f"/v1/handoffs/{saved['id']}").status_code == 404


def test_a_store_that_hangs_or_is_lost_costs_no_answer(
    gateways: tuple[RealGateway, RealGateway], server: StoreServer
) -> None:
    one, two = gateways
    saved = once_saved(one, told(ask(one, "smollm2", DOCUMENT, handoff={"save": True})))
    once_saved(two, saved | {"state": "pending"})  # its KV has reached the store
    plain = ids(ask(one, "smollm2", "The capital of France is"))[1]
    with server.stopped():
        assert ids(ask(two, "smollm2", "The capital of France is"))[1] == plain
        relayed = ask(two, "smollm2", " In the end", handoff={"from": saved["id"]})
        assert told(relayed)["source"]["outcome"] == "recomputed"
    server.kill()
    again = ask(one, "smollm2", " In the end", handoff={"from": saved["id"]})
    assert told(again)["source"]["outcome"] == "loaded"
    assert ids(again)[1] == ids(relayed)[1]
    with two.client() as client:
        answer = client.get("/v1/handoffs/" + "x" * 32)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "handoff_store_unavailable")
    assert answer.headers["Retry-After"]
