"""A handoff of another model is continued by its text, which is computed once; nothing else crosses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, Held, run_fake
from support.raw_requests import connect, request, wait_for

from baton.admission.api_keys import create_key
from baton.engines.backend import Operation
from baton.engines.engine import Engine
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.library.handoff import Handoff
from baton.relay.asked import HandoffOptions

CHAT, TEXT, AHEAD = "/v1/chat/completions", "/v1/completions", "/v1/handoffs"
STEP, END = 999, 998


@pytest.fixture
def relay() -> Iterator[FakeGateway]:
    engines = (
        FakeEngine(
            "x", supports_handoffs=True, weights="of x", placeholder=STEP, special_tokens=frozenset({END})
        ),
        FakeEngine("y", supports_handoffs=True, weights="of y"),
        FakeEngine("z", supports_handoffs=True, weights="of z", translates=True),
    )
    with run_fake(*engines, handoffs={"auto": "off"}) as gateway:
        yield gateway


def post(gateway: FakeGateway, path: str, model: str, **body: Any) -> httpx.Response:
    with gateway.client() as client:
        return client.post(path, json={"model": model} | body)


def made(gateway: FakeGateway, model: str = "x", **body: Any) -> str:
    response = post(gateway, AHEAD, model, **body)
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


def continued(gateway: FakeGateway, model: str, *ids: str, **options: Any) -> dict[str, Any]:
    handoff = {"from": list(ids)} | options
    response = post(gateway, TEXT, model, prompt="7", max_tokens=1, handoff=handoff)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["handoff"]
    return found


def prompts(gateway: FakeGateway, model: str) -> list[list[int]]:
    """The prompts of token ids that an engine computed."""
    bodies = gateway.engine(model).bodies
    return [body["prompt"] for body in bodies if isinstance(body.get("prompt"), list)]


def test_text_is_computed_once_and_then_continued_as_the_engine_s_own(relay: FakeGateway) -> None:
    left = made(relay, prompt=[1, 2, 3, END])
    source = continued(relay, "y", left, translate=True)["source"]
    assert prompts(relay, "y") == [[1, 2, 3], [1, 2, 3, 7]], "without the token that ends a text of x"
    assert (source["outcome"], source["id"], source["from_model"]) == ("translated", left, "x")
    assert (source["computed_tokens"], source["dropped"]) == (3, {"latent_steps": 0})
    again = continued(relay, "y", left, translate=True)["source"]
    assert prompts(relay, "y")[2:] == [[1, 2, 3, 7]]
    assert (again["outcome"] != "translated", again["computed_tokens"]) == (True, 0)
    assert (again["translated_id"], again["from_model"]) == (source["translated_id"], "x")


def test_it_is_an_engine_s_own_handoff_that_goes_with_its_source(relay: FakeGateway) -> None:
    left = made(relay, prompt=[1, 2, 3], ttl_s=50)
    source = continued(relay, "y", left, translate=True)["source"]
    with relay.client() as client:
        shown = client.get(f"{AHEAD}/{source['translated_id']}").json()
        assert (shown["translated_from"], shown["parents"], shown["model"]) == (left, [left], "y")
        assert shown["expires_at"] <= client.get(f"{AHEAD}/{left}").json()["expires_at"]
        assert "translated_id" not in continued(relay, "y", shown["id"])["source"]
        client.delete(f"{AHEAD}/{left}").raise_for_status()
        assert client.get(f"{AHEAD}/{source['translated_id']}").status_code == 404


def test_a_chat_is_written_by_the_other_model_s_template_with_its_answer(relay: FakeGateway) -> None:
    messages = [{"role": "user", "content": "5 6"}]
    answer = post(relay, CHAT, "x", messages=messages, max_tokens=2, handoff={"save": True}).json()
    said = answer["choices"][0]["message"]["content"]
    more = {"role": "user", "content": "8"}
    handoff = {"from": answer["handoff"]["id"], "translate": True}
    response = post(relay, CHAT, "y", messages=[more], max_tokens=1, handoff=handoff)
    assert response.status_code == 200, response.text
    whole = [*messages, {"role": "assistant", "content": said}, more]
    direct = post(relay, CHAT, "y", messages=whole, max_tokens=1, handoff={"save": {"scope": "prompt"}})
    assert direct.status_code == 200
    assert prompts(relay, "y")[-2] == prompts(relay, "y")[-1], "what y is given directly"


def test_latent_steps_are_dropped_and_counted(relay: FakeGateway) -> None:
    left = made(relay, prompt=[1, 2], latent_steps=3)
    source = continued(relay, "y", left, translate=True)["source"]
    assert prompts(relay, "y")[0] == [1, 2]
    assert source["dropped"] == {"latent_steps": 3}


def test_an_engine_may_translate_without_being_asked_and_a_request_may_forbid_it(relay: FakeGateway) -> None:
    left = made(relay, prompt=[1, 2, 3])
    assert continued(relay, "z", left)["source"]["outcome"] == "translated"
    for model, options in (("y", {}), ("z", {"translate": False})):
        handoff = {"from": left} | options
        refused = post(relay, TEXT, model, prompt="7", handoff=handoff)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "handoff_incompatible")


def test_a_translation_is_made_ahead_with_what_the_request_says_of_it(relay: FakeGateway) -> None:
    left = made(relay, prompt=[1, 2, 3])
    ahead = post(relay, AHEAD, "y", **{"from": left}, translate=True, label="for y", pin=True)
    assert ahead.status_code == 201
    shown = ahead.json()
    assert (shown["label"], shown["pin"], shown["source"]["computed_tokens"]) == ("for y", True, 3)
    assert continued(relay, "y", left, translate=True)["source"]["translated_id"] == shown["id"]
    own = post(relay, AHEAD, "x", **{"from": left}, translate=True)
    assert (own.status_code, own.json()["error"]["param"]) == (400, "from")


def test_translations_are_joined_with_handoffs_of_the_engine(relay: FakeGateway) -> None:
    theirs, own = made(relay, prompt=[1, 2, 3]), made(relay, "y", prompt=[4, 5])
    shown = continued(relay, "y", own, theirs, translate=True, save=True)
    assert prompts(relay, "y")[-1] == [4, 5, 1, 2, 3, 7]
    assert [part["id"] for part in shown["source"]["parts"]] == shown["parents"] == [own, theirs]


def test_what_cannot_be_translated_is_refused_by_name(relay: FakeGateway) -> None:
    text = made(relay, prompt=[1, 2])
    said = {"messages": [{"role": "user", "content": "5"}], "max_tokens": 1}
    mixed = post(relay, CHAT, "x", **said, handoff={"from": text, "save": True}).json()["handoff"]["id"]
    own = made(relay, "y", prompt=[4, 5])
    handoff = {"from": [own, mixed], "translate": True}
    refused = post(relay, TEXT, "y", prompt="7", handoff=handoff)
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "handoff.from[1]")
    unknown = post(relay, TEXT, "y", prompt="7", handoff={"from": "nobody's", "translate": True})
    assert unknown.status_code == 404


@pytest.mark.parametrize("enabled", [False, True])
def test_one_vector_instead_of_text_is_experimental_and_named_as_avp_names_it(enabled: bool) -> None:
    engines = (
        FakeEngine("x", supports_handoffs=True, weights="of x", placeholder=STEP),
        FakeEngine("y", supports_handoffs=True, weights="of y", placeholder=STEP),
        FakeEngine("z", supports_handoffs=True, weights="of z", rosetta_pairs=frozenset({("x", "z")})),
    )
    with run_fake(*engines, handoffs={"auto": "off", "rosetta": enabled}) as gateway:
        left = made(gateway, prompt=[1, 2, 3])
        handoff = {"from": left, "translate": {"via": "rosetta"}}
        refused = post(gateway, TEXT, "z", prompt="7", handoff=handoff).json()["error"]
        of_nothing = {"translate": {"via": "rosetta"}}
        for more in ({}, {"save": True}, {"from": None}):
            answer = post(gateway, TEXT, "y", prompt="7", handoff=of_nothing | more)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "handoff.translate"), more
        assert (refused["code"], refused["param"]) == ("operation_unsupported", "handoff.translate")
        assert ("latent = true" if enabled else "handoffs.rosetta = true") in refused["message"]
        by_settings = post(gateway, TEXT, "z", prompt="7", handoff={"from": left}).json()["error"]
        assert by_settings["code"] == "handoff_incompatible", "z takes no vector"
        z, rosetta = gateway.engine("z"), gateway.app.state.gateway.relay.rosetta
        z.placeholder = STEP
        record = gateway.app.state.gateway.library.index.known(left)
        named = HandoffOptions.model_validate({"from": left})
        text_wanted = named.model_copy(update={"translate": True})
        saved = named.model_copy(update={"save": True})
        for options, by_default in ((named, enabled), (text_wanted, False), (saved, False)):
            assert rosetta.is_default(z, Operation.COMPLETIONS, options, [record]) is by_default
        assert not rosetta.is_default(z, Operation.MESSAGES, named, [record])
        z.placeholder = None
        own = made(gateway, "y", prompt=[4])
        other = post(gateway, TEXT, "z", prompt="7", handoff={"from": own}).json()["error"]
        assert other["code"] == "handoff_incompatible", "the settings name no such pair"
        saving = post(gateway, TEXT, "y", prompt="7", handoff=handoff | {"save": True})
        assert saving.status_code == 400
        messages = post(gateway, "/v1/messages", "y", max_tokens=1, messages=[], handoff=handoff)
        assert messages.status_code == 400


def test_many_that_need_a_translation_at_once_wait_for_one(relay: FakeGateway) -> None:
    relay.engine("y").behaviour.token_seconds = 0.1
    left = made(relay, prompt=[1, 2, 3])
    with ThreadPoolExecutor(6) as many:
        sources = list(many.map(lambda _: continued(relay, "y", left, translate=True)["source"], range(6)))
    assert prompts(relay, "y").count([1, 2, 3]) == 1
    assert len({source["translated_id"] for source in sources}) == 1
    assert sorted(source["computed_tokens"] for source in sources) == [0] * 5 + [3]


def test_a_translation_is_made_although_who_asked_first_has_left(relay: FakeGateway) -> None:
    held = Held()
    relay.engine("y").behaviour = FakeBehaviour(token_seconds=60, wait=held)
    left = made(relay, prompt=[1, 2, 3])
    body = {"model": "y", "prompt": "7", "max_tokens": 1, "handoff": {"from": left, "translate": True}}
    with connect(relay) as hasty:
        hasty.sendall(request(body, TEXT))
        wait_for(lambda: relay.engine("y").active, "nothing is translated")
    held.release()
    assert continued(relay, "y", left, translate=True)["source"]["computed_tokens"] == 0
    assert prompts(relay, "y").count([1, 2, 3]) == 1


def test_a_translation_ends_with_its_source_however_that_ends(relay: FakeGateway) -> None:
    left = made(relay, prompt=[1, 2, 3])
    second = continued(relay, "y", left, translate=True)["source"]["translated_id"]
    third = continued(relay, "z", second)["source"]["translated_id"]
    with relay.client() as client:
        client.patch(f"{AHEAD}/{second}", json={"ttl_s": 3000}).raise_for_status()
        client.patch(f"{AHEAD}/{left}", json={"ttl_s": 1}).raise_for_status()
        time.sleep(1.1)
        assert [client.get(f"{AHEAD}/{each}").status_code for each in (left, second, third)] == [404] * 3
    deleted = made(relay, prompt=[4, 5])
    second = continued(relay, "y", deleted, translate=True)["source"]["translated_id"]
    third = continued(relay, "z", second)["source"]["translated_id"]
    with relay.client() as client:
        client.delete(f"{AHEAD}/{deleted}").raise_for_status()
        listed = {each["id"] for each in client.get(AHEAD).json()["data"]}
    assert not {deleted, second, third} & listed


def test_what_is_asked_of_a_kept_translation_is_set(relay: FakeGateway) -> None:
    left = made(relay, prompt=[1, 2, 3])
    kept = continued(relay, "y", left, translate=True)["source"]["translated_id"]
    shown = post(relay, AHEAD, "y", **{"from": left}, translate=True, label="kept", pin=True).json()
    assert (shown["id"], shown["label"], shown["pin"]) == (kept, "kept", True)


def test_tokens_that_are_no_text_are_dropped_whichever_engine_reads_them() -> None:
    """Another engine of the same weights does not know which token stood for a latent step."""
    engines = (
        FakeEngine("reader", supports_handoffs=True, weights="of x"),
        FakeEngine("x", supports_handoffs=True, weights="of x", placeholder=STEP),
        FakeEngine("y", supports_handoffs=True, weights="of y"),
    )
    with run_fake(*engines, handoffs={"auto": "off"}) as gateway:
        left = made(gateway, prompt=[1, 2], latent_steps=2)
        continued(gateway, "y", left, translate=True)
        assert prompts(gateway, "y")[0] == [1, 2]


def test_a_translation_back_is_of_the_text_where_the_engine_computes_no_latent_steps() -> None:
    """An engine of the origin's weights would compute its placeholders as if they were words."""
    engines = (
        FakeEngine("x", supports_handoffs=True, weights="of x", placeholder=STEP),
        FakeEngine("plain", supports_handoffs=True, weights="of x"),
        FakeEngine("y", supports_handoffs=True, weights="of y"),
    )
    with run_fake(*engines, handoffs={"auto": "off"}) as gateway:
        left = made(gateway, prompt=[1, 2], latent_steps=2)
        there = continued(gateway, "y", left, translate=True)["source"]["translated_id"]
        back = continued(gateway, "plain", there, translate=True)["source"]
        assert prompts(gateway, "plain") == [[1, 2], [1, 2, 7]]
        assert (back["outcome"], back["translated_id"] not in (left, there)) == ("translated", True)
        directly = continued(gateway, "plain", left, translate=True)["source"]
        assert (directly["translated_id"], directly["computed_tokens"]) == (back["translated_id"], 0)
        refused = post(gateway, TEXT, "plain", prompt="7", handoff={"from": left})
        assert refused.json()["error"]["code"] == "handoff_incompatible", "unless it is wanted"
        exact = continued(gateway, "x", there, translate=True)["source"]
        assert prompts(gateway, "x")[-1] == [1, 2, STEP, STEP, 7], "where it can be, it is the origin itself"
        assert exact["translated_id"] == left


def test_translations_are_brought_to_this_machine_as_other_handoffs_are(
    relay: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made here or on another machine, to or back from another model."""
    handoffs, brought = relay.app.state.gateway.library, list[tuple[str, str]]()
    fetch_here = handoffs.fetch_here

    async def noted(record: Handoff, engine: Engine) -> None:
        brought.append((record.id, engine.name))
        await fetch_here(record, engine)

    monkeypatch.setattr(handoffs, "fetch_here", noted)
    left = made(relay, prompt=[1, 2])
    there = continued(relay, "y", left, translate=True)["source"]["translated_id"]
    assert (there, "y") in brought
    brought.clear()
    continued(relay, "y", left, translate=True)
    assert (there, "y") in brought
    continued(relay, "x", there, translate=True)
    assert (left, "x") in brought


def test_another_tenant_s_handoff_is_as_unknown_as_none(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    mine, theirs = create_key(keys, "mine"), create_key(keys, "theirs")
    engines = (
        FakeEngine("x", supports_handoffs=True, weights="of x"),
        FakeEngine("y", supports_handoffs=True, weights="of y"),
    )
    with run_fake(*engines, handoffs={"auto": "off"}, auth={"keys_file": keys}) as gateway:
        ours = {"Authorization": f"Bearer {mine}"}
        with gateway.client() as client:
            body = {"model": "x", "prompt": [1, 2]}
            left = client.post(AHEAD, json=body, headers=ours).json()["id"]
            answers = [
                client.post(
                    TEXT,
                    json={"model": "y", "prompt": "7", "handoff": {"from": each, "translate": True}},
                    headers={"Authorization": f"Bearer {theirs}"},
                )
                for each in (left, "x" * 32)
            ]
    assert [answer.status_code for answer in answers] == [404, 404]
    errors = [answer.json()["error"] | {"request_id": ""} for answer in answers]
    assert errors[0] == errors[1]
    assert gateway.engine("y").bodies == []
