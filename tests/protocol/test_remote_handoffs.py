"""Handoffs reach another gateway that proves to have this one's store, and are refused everywhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake
from support.remote_gateways import complete, other_server, remote, run_near
from support.shared_stores import BINARIES, store_server

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeEngine
from baton.library.here.records import proof_of

CHALLENGE = "0123456789abcdef" * 2
CHAT = [{"role": "user", "content": "one two"}]


def far_engine() -> FakeEngine:
    return FakeEngine("far", supports_handoffs=True)


def over(store: Path, **more: Any) -> dict[str, Any]:
    """Settings of a gateway over a folder, with handoffs that are kept there."""
    engines = ({"name": "far", "model": "fake", "handoff": True},)
    return {"engines": engines, "handoffs": {"store": f"file:{store}", "auto": "off", **more}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeGateway, FakeGateway]]:
    """A gateway without engines of its own, and one that answers for it, over one folder."""
    store = tmp_path_factory.mktemp("stores") / "store"
    with run_fake(far_engine(), **over(store)) as there:
        settings = over(store)
        settings.pop("engines")
        with run_near(remote(there.url, handoff=True), **settings) as here:
            yield here, there


def test_a_handoff_is_left_and_continued_through_both_gateways(pair: tuple[FakeGateway, FakeGateway]) -> None:
    here, there = pair
    with here.client() as client, there.client() as direct:
        saved = complete(client, prompt="11 12 13", max_tokens=3, handoff={"save": True})
        told = saved.json()["handoff"]
        assert (told["state"], told["model"], told["tokens"]) == ("ready", "near", 6)
        assert saved.headers["x-handoff-id"] == told["id"]
        more = complete(client, prompt="7", max_tokens=1, handoff={"from": told["id"]})
        assert there.engine("far").bodies[-1]["prompt"] == [11, 12, 13, 11, 12, 13, 7]
        assert more.json()["handoff"]["source"]["id"] == told["id"]
        assert direct.get(f"/v1/handoffs/{told['id']}").json()["tokens"] == 6
        assert client.get(f"/v1/handoffs/{told['id']}").json()["tokens"] == 6
        assert client.delete(f"/v1/handoffs/{told['id']}").status_code == 204
        gone = complete(client, prompt="7", handoff={"from": told["id"]})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "handoff_not_found")


def test_a_stream_tells_of_its_handoff_before_it_is_done(pair: tuple[FakeGateway, FakeGateway]) -> None:
    here, _ = pair
    with here.client() as client:
        answer = complete(client, stream=True, handoff={"save": True})
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunk = json.loads(lines[-2])
    assert (chunk["choices"], chunk["handoff"]["model"]) == ([], "near")
    assert answer.headers["x-handoff-id"] == chunk["handoff"]["id"]


def test_the_header_and_all_conversations_work_too(pair: tuple[FakeGateway, FakeGateway]) -> None:
    here, _ = pair
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
        "/v1/messages": {"messages": CHAT, "max_tokens": 2},
        "/v1/responses": {"input": "one two", "max_output_tokens": 2},
    }
    with here.client(headers={"X-Baton-Handoff": "save"}) as client:
        for path, body in bodies.items():
            answer = client.post(path, json={"model": "near"} | body)
            assert answer.headers["x-handoff-id"], path
        refused = client.post("/tokenize", json={"model": "near", "prompt": "a", "handoff": {"save": True}})
        assert refused.json()["error"]["code"] == "operation_unsupported"


def test_a_context_is_computed_elsewhere_without_an_answer(pair: tuple[FakeGateway, FakeGateway]) -> None:
    here, _ = pair
    with here.client() as client:
        made = client.post("/v1/handoffs", json={"model": "near", "prompt": "11 12 13", "label": "mine"})
        assert made.status_code == 201, made.text
        told = made.json()
        assert (told["model"], told["label"]) == ("near", "mine")
        assert made.headers["location"] == f"/v1/handoffs/{told['id']}"
        assert complete(client, prompt="7", handoff={"from": told["id"]}).status_code == 200
        wrong = client.post("/v1/handoffs", json={"model": "near", "prompt": "11", "latent_steps": 3})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "latent_steps")


def refused(client: httpx.Client, **more: Any) -> str:
    """Why a handoff is refused; a request to `/v1/handoffs` must be for the same reason."""
    answer = complete(client, handoff={"save": True}, **more)
    new = client.post("/v1/handoffs", json={"model": "near", "prompt": "a"})
    assert answer.status_code == new.status_code == 400, (answer.text, new.text)
    errors = [each.json()["error"] for each in (answer, new)]
    assert {each["code"] for each in errors} == {"operation_unsupported"}
    assert errors[0]["message"] == errors[1]["message"]
    return str(errors[0]["message"])


def test_without_the_setting_no_handoff_is_sent_on(pair: tuple[FakeGateway, FakeGateway]) -> None:
    _, there = pair
    with run_near(remote(there.url)) as here, here.client() as client:
        assert "does not support handoffs" in refused(client)


@pytest.mark.fault("I9")
def test_a_server_that_is_no_gateway_gets_none(tmp_path: Path) -> None:
    with other_server() as server:
        with near_over(server.url, tmp_path / "a") as client:
            assert "it is no Baton gateway" in refused(client)
        assert not server.asked


@contextmanager
def near_over(url: str, store: Path) -> Iterator[httpx.Client]:
    """A client of a gateway over a folder, whose engine is the server at `url`."""
    settings = over(store)
    settings.pop("engines")
    with run_near(remote(url, handoff=True), **settings) as here, here.client() as client:
        yield client


@pytest.mark.fault("I6")
def test_a_gateway_over_another_store_gets_none(tmp_path: Path) -> None:
    far = far_engine()
    with run_fake(far, **over(tmp_path / "theirs")) as there:
        with near_over(there.url, tmp_path / "ours") as client:
            assert "does not use this gateway's store" in refused(client)
        assert not far.bodies


def test_a_gateway_without_handoffs_gets_none(tmp_path: Path) -> None:
    settings = over(tmp_path / "one")
    with run_fake(FakeEngine("far"), **settings) as there, near_over(there.url, tmp_path / "one") as client:
        assert "its engine has no `handoff = true`" in refused(client)


@pytest.mark.fault("I6")
def test_a_key_of_another_tenant_gets_none(tmp_path: Path) -> None:
    """The other gateway would keep the handoffs of one under the name of another."""
    file = tmp_path / "keys.json"
    keys = {tenant: create_key(file, tenant) for tenant in ("acme", "beta")}
    store, auth = tmp_path / "store", {"auth": {"keys_file": file}}
    (tmp_path / "key").write_text(keys["acme"])
    (tmp_path / "theirs").mkdir()
    far = far_engine()
    settings = over(store)
    settings.pop("engines")
    with run_fake(far, **over(store), **auth) as there:
        near = remote(
            there.url,
            tenants=True,
            handoff=True,
            remote={"key_file": tmp_path / "key", "keys_dir": tmp_path / "theirs", "probe_s": 0.1},
        )
        with run_near(near, **settings, **auth) as here:
            acme = here.client(headers={"Authorization": f"Bearer {keys['acme']}"})
            beta = here.client(headers={"Authorization": f"Bearer {keys['beta']}"})
            with acme, beta:
                saved = complete(acme, prompt="11 12", handoff={"save": True}).json()["handoff"]
                seen = len(far.bodies)
                assert "belongs to another tenant" in refused(beta)
                assert complete(beta, handoff={"from": saved["id"]}).status_code == 400
                assert len(far.bodies) == seen
                (tmp_path / "theirs" / "beta").write_text(keys["beta"])
                near._keys.refresh()
                stolen = complete(beta, handoff={"from": saved["id"]})
                assert (stolen.status_code, stolen.json()["error"]["code"]) == (404, "handoff_not_found")
                assert complete(beta, handoff={"save": True}).status_code == 200
                assert beta.get(f"/v1/handoffs/{saved['id']}").status_code == 404
                # Beta has just been trusted; with another key in its file it is not.
                (tmp_path / "theirs" / "beta").write_text(keys["acme"])
                near._keys.refresh()
                seen = len(far.bodies)
                assert "belongs to another tenant" in refused(beta)
                assert complete(beta, handoff={"from": saved["id"]}).status_code == 400
                assert len(far.bodies) == seen


@pytest.mark.fault("I6")
@pytest.mark.skipif(BINARIES["valkey"] is None, reason="no valkey-server is installed")
def test_gateways_of_two_machines_share_through_a_server(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret that both machines of the test have")
    (tmp_path / "other").write_text("a secret that only a third machine of the test has")

    def machine(name: str, url: str, **more: Any) -> dict[str, Any]:
        return over(tmp_path / name, shared=url, shared_secret_file=tmp_path / "secret", **more)

    with (
        store_server("valkey", tmp_path) as valkey,
        run_fake(far_engine(), **machine("there", valkey.url)) as there,
    ):
        settings = machine("here", valkey.url)
        settings.pop("engines")
        with run_near(remote(there.url, handoff=True), **settings) as here, here.client() as client:
            saved = complete(client, prompt="11 12", handoff={"save": True}).json()["handoff"]
            assert client.get(f"/v1/handoffs/{saved['id']}").json()["state"] == "ready"
            assert complete(client, handoff={"from": saved["id"]}).status_code == 200
        for more in (
            {"shared_pool": "another"},
            {"shared_pool": "third", "shared_secret_file": tmp_path / "other"},
        ):
            settings = machine("elsewhere" + more["shared_pool"], valkey.url)
            settings["handoffs"] |= more
            settings.pop("engines")
            with run_near(remote(there.url, handoff=True), **settings) as here, here.client() as client:
                assert "does not use this gateway's store" in refused(client)


def test_the_proof_tells_no_secret_and_is_for_one_challenge() -> None:
    proof = proof_of(b"s" * 32, b"id", CHALLENGE)
    assert len(proof) == 64
    others = [
        proof_of(b"t" * 32, b"id", CHALLENGE),
        proof_of(b"s" * 32, b"i", "d" + CHALLENGE),
        proof_of(b"s" * 32, b"id", CHALLENGE[::-1]),
    ]
    assert len({proof, *others}) == 4


def test_a_peer_is_told_its_tenant_and_a_proof(pair: tuple[FakeGateway, FakeGateway]) -> None:
    here, there = pair
    with here.client() as client, there.client() as direct:
        asked = {"challenge": CHALLENGE, "model": "far"}
        told = direct.get("/v1/peer", params=asked).json()
        assert (told["object"], told["tenant"], told["handoff"]) == ("peer", "local", True)
        assert told["store"] == client.get("/v1/peer", params=asked).json()["store"]
        assert told["store"] != direct.get("/v1/peer", params={"challenge": "0" * 32}).json()["store"]
        for wrong in ("", "0" * 31, "0" * 65, "g" * 32):
            assert direct.get("/v1/peer", params={"challenge": wrong}).status_code == 400
