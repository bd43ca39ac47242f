"""Two gateways with stores of their own, as on two machines, share handoffs through a real Valkey.

The second has an engine that the first answers for, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.gateways import RealGateway
from support.relays import DOCUMENT, Served, ask, ids, once_saved, relay_there_and_back, told
from support.shared_gateways import gateways_over
from support.shared_stores import BINARIES, StoreServer, store_server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.skipif(BINARIES["valkey"] is None, reason="no valkey-server is installed"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with store_server("valkey", tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture(scope="module")
def gateways(
    server: StoreServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RealGateway, RealGateway]]:
    folder = tmp_path_factory.mktemp("gateways")
    with gateways_over(server.url, folder, elsewhere=True) as (one, two):
        yield one, two


RULES = "You compare cities, and say in one short line what they have in common.\n"


def test_b_on_another_machine_loads_what_a_computed_and_says_the_same(
    gateways: tuple[RealGateway, RealGateway],
) -> None:
    one, two = gateways
    relay_there_and_back(Served(one, "smollm2"), Served(two, "smollm2"))


def test_an_engine_elsewhere_loads_what_one_here_computed_and_says_the_same(
    gateways: tuple[RealGateway, RealGateway],
) -> None:
    """The second gateway sends requests for `there` on to the first."""
    _, two = gateways
    relayed = relay_there_and_back(Served(two, "smollm2"), Served(two, "there"))
    assert relayed.model == told(relayed)["model"] == "there"


def test_a_context_computed_elsewhere_is_loaded_here(gateways: tuple[RealGateway, RealGateway]) -> None:
    _, two = gateways
    with two.client() as client:
        made = client.post("/v1/handoffs", json={"model": "there", "prompt": DOCUMENT + " It ends."})
    assert made.status_code in (201, 202), made.text
    saved = once_saved(two, made.json())
    answer = ask(two, "smollm2", " In the end", handoff={"from": saved["id"]})
    assert told(answer)["source"]["outcome"] == "loaded"


def test_contexts_of_another_machine_are_joined_here(gateways: tuple[RealGateway, RealGateway]) -> None:
    """Exactly, and by moving KV: the one says what computing says, the other what it says where the KV is."""
    one, two = gateways
    names = []
    for city in ("Rome", "Madrid", "Paris"):
        text = f"{RULES}{' '.join(f'{city} has {n * 37 % 101} bridges.' for n in range(20))}"
        saved = once_saved(one, told(ask(one, "smollm2", text, handoff={"save": True})))
        names.append(once_saved(two, saved | {"state": "pending"})["id"])
    moved = ask(two, "smollm2", " So", handoff={"from": names, "join": "moved"})
    first, *others = told(moved)["source"]["parts"]
    assert (first["loaded_tokens"], first["moved_tokens"]) == (first["tokens"] - 1, 0)
    assert all(part["moved_tokens"] == part["tokens"] - 17 for part in others), others
    assert ids(moved) == ids(ask(one, "smollm2", " So", handoff={"from": names, "join": "moved"}))
    exact = ask(two, "smollm2", " So", handoff={"from": names})
    assert told(exact)["source"]["outcome"] == "loaded"
    assert ids(exact) == ids(ask(two, "smollm2", ids(exact)[0]))


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
