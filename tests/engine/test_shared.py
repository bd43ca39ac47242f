"""Two gateways with stores of their own, as on two machines, share handoffs through a real Valkey.

The second has an engine that the first answers for, too; the first archives what is pinned in a real S3 server.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
from support.archives import BUCKET, WEED, Archive, archive_server, with_s3
from support.gateways import RealGateway
from support.raw_requests import wait_for
from support.relay_requests import DOCUMENT, Served, ask, cached, ids, once_saved, relay_there_and_back, told
from support.resumed_streams import read
from support.shared_gateways import gateways_over
from support.shared_stores import BINARIES, StoreServer, store_server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.skipif(BINARIES["valkey"] is None, reason="no valkey-server is installed"),
]
ARCHIVING = Path(__file__).with_name("archive_engines.toml")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archive | None]:
    """An S3 server that a test may kill, where one is installed."""
    if WEED is None:
        yield None
        return
    with archive_server(tmp_path_factory.mktemp("s3") / "s3") as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with store_server("valkey", tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture(scope="module")
def gateways(
    server: StoreServer, s3: Archive | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RealGateway, RealGateway]]:
    folder = tmp_path_factory.mktemp("gateways")
    archive = {
        f"BATON_HANDOFFS__ARCHIVE{name}": value
        for name, value in (
            (("", f"s3://{BUCKET}/baton"), ("_ENDPOINT", s3.endpoint), ("_KEY_FILE", str(s3.key_file)))
            if s3 is not None
            else ()
        )
    }
    with gateways_over(server.url, folder, elsewhere=True, first=archive) as (one, two):
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


@contextmanager
def archiving(folder: Path, archive: Archive) -> Iterator[RealGateway]:
    """A gateway with an archive alone, that starts with whatever is in its folder."""
    folder.mkdir(exist_ok=True)
    secret, config = folder.parent / "secret", folder / "baton.toml"
    secret.write_text("the secret that outlives all of these machines")
    config.write_text(
        ARCHIVING.read_text().format(
            folder=folder, bucket=BUCKET, endpoint=archive.endpoint, key=archive.key_file, secret=secret
        )
    )
    with RealGateway(["--config", str(config)], folder, forked=True) as running:
        running.wait_until_ready()
        yield running


def saved_in_the_archive(running: RealGateway, archive: Archive) -> dict[str, Any]:
    """Save a pinned handoff, and wait until the archive has it."""
    saved = once_saved(running, told(ask(running, "smollm2", DOCUMENT, handoff={"save": {"pin": True}})))
    assert saved["pin"] is True
    deadline = time.monotonic() + 60
    with running.client() as client:
        while not client.get(f"/v1/handoffs/{saved['id']}").json()["archived"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert len(archive.names("records")) == 1
    return saved


def require_loaded(relayed: dict[str, Any], saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Require that all but one token came from the handoff, and the answer is the one that it gave before."""
    source = told(relayed)["source"]
    assert (source["outcome"], source["loaded_tokens"]) == ("loaded", saved["tokens"] - 1)
    assert cached(relayed) == saved["tokens"] - 1
    assert ids(relayed) == ids(here)


@with_s3
@pytest.mark.fault("C16")
def test_b_loads_from_the_archive_what_its_machine_has_lost(
    gateways: tuple[RealGateway, RealGateway], server: StoreServer, s3: Archive
) -> None:
    """Nor has the shared store it any more; then the archive is lost, for as long as these gateways run."""
    running, _ = gateways
    saved = saved_in_the_archive(running, s3)
    here = ask(running, "smollm2", " In the end", handoff={"from": saved["id"]})
    assert told(here)["source"]["outcome"] == "loaded"
    store = running.output.parent / "store"
    for folder in ("entries", "records"):
        for each in (path for path in (store / folder).rglob("*") if path.is_file()):
            each.unlink()
    server.client.flushall()
    relayed = ask(running, "smollm2", " In the end", handoff={"from": saved["id"]})
    require_loaded(relayed, saved, here)
    assert list((store / "entries").rglob("*.kv"))  # it is on the machine again
    plain = ask(running, "smollm2", ids(relayed)[0])
    assert (ids(relayed)[1], cached(plain)) == (ids(plain)[1], 0)
    s3.kill()
    again = ask(running, "smollm2", " In the end", handoff={"from": saved["id"]})
    assert told(again)["source"]["outcome"] == "loaded"
    with running.client() as client:
        unknown = client.get("/v1/handoffs/" + "x" * 32)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "handoff_store_unavailable")
    assert "archive" in unknown.json()["error"]["message"]


def said_by(event: dict[str, Any]) -> str:
    """The text of one event of a stream."""
    choice = (event.get("choices") or [{}])[0]
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


@pytest.mark.fault("A20")
def test_streams_of_a_gateway_that_ends_go_on_at_the_other(gateways: tuple[RealGateway, RealGateway]) -> None:
    """What both say together is what an unbroken stream says."""
    one, two = gateways
    greedy = {"model": "smollm2", "temperature": 0, "ignore_eos": True, "stream": True}
    chat = {"messages": [{"role": "user", "content": "Count from one to a hundred, in words."}]}
    bodies = [
        ("/v1/completions", greedy | {"prompt": DOCUMENT[:300], "max_tokens": 900}, {"prompt": ""}),
        ("/v1/chat/completions", greedy | chat | {"max_tokens": 900}, {"messages": []}),
    ]
    begun = Semaphore(0)

    def until_it_ends(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return read(two, path, body, at=20, then=begun.release).events

    def stop() -> int:
        for _ in bodies:
            assert begun.acquire(timeout=60)
        two.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "draining" in two.log, "it does not drain")
        two.process.send_signal(signal.SIGTERM)
        return two.process.wait(timeout=60)

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(until_it_ends, path, body) for path, body, _ in bodies]
        stopped = pool.submit(stop)
        told_of = [each.result(120) for each in running]
        assert stopped.result(120) == 0
    for (path, body, nothing), events in zip(bodies, told_of, strict=True):
        left = events[-1]["error"]["handoff"]
        before = "".join(map(said_by, events))
        assert left["said_characters"] == len(before), events[-1]
        assert 0 < left["said_tokens"] < 900
        rest = body | nothing | {"max_tokens": 60, "handoff": {"from": left["id"]}}
        after = "".join(map(said_by, read(one, path, rest).events))
        whole = read(one, path, body | {"max_tokens": left["said_tokens"] + 60}).events
        assert before + after == "".join(map(said_by, whole))
    two.__enter__()
    two.wait_until_ready()


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


@with_s3
@pytest.mark.chaos
def test_b_loads_from_the_archive_what_a_saved_on_a_machine_that_is_no_more(tmp_path: Path) -> None:
    with archive_server(tmp_path / "s3") as archive:
        with archiving(tmp_path / "machine", archive) as first:
            saved = saved_in_the_archive(first, archive)
            here = ask(first, "smollm2", " In the end", handoff={"from": saved["id"]})
        shutil.rmtree(tmp_path / "machine")
        with archiving(tmp_path / "machine", archive) as second:
            began = time.monotonic()
            relayed = ask(second, "smollm2", " In the end", handoff={"from": saved["id"]})
            assert time.monotonic() - began < 60
            require_loaded(relayed, saved, here)
