"""A handoff of another model, continued by its text: what the model says if it is given that text directly."""

from __future__ import annotations

from typing import Any

import pytest
from support import image_files
from support.gateways import RealGateway
from support.relay_requests import ask, cached, ids, once_saved, told

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
LISTS = ("three birds", "four rivers")
TEXT = "You compare cities. " + " ".join(f"Rome has {number * 37 % 101} bridges." for number in range(40))


@pytest.fixture(scope="module")
def gateway(relay_gateway: RealGateway) -> RealGateway:
    return relay_gateway


def chat(gateway: RealGateway, model: str, messages: list[Any], **handoff: Any) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    with gateway.client() as client:
        response = client.post("/v1/chat/completions", json=body | ({"handoff": handoff} if handoff else {}))
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def of_chat(answer: dict[str, Any]) -> tuple[list[int], list[int]]:
    choice = answer["choices"][0]
    return choice.get("prompt_token_ids") or answer["prompt_token_ids"], choice["token_ids"]


def test_a_text_is_computed_once_and_loaded_from_then_on(gateway: RealGateway) -> None:
    left = once_saved(gateway, told(ask(gateway, "writer", TEXT, handoff={"save": True})))
    first = ask(gateway, "look", " So", handoff={"from": left["id"], "translate": True})
    assert ids(first) == ids(ask(gateway, "look", ids(first)[0]))
    source = told(first)["source"]
    assert (source["outcome"], source["from_model"], source["id"]) == ("translated", "writer", left["id"])
    again = ask(gateway, "look", " So", handoff={"from": left["id"], "translate": True})
    assert ids(again) == ids(first)
    source = told(again)["source"]
    assert (source["outcome"], source["computed_tokens"]) == ("loaded", 0)
    prompt = ids(again)[0]
    assert len(prompt) - cached(again) <= 32 + len(prompt) - source["tokens"]


def test_a_chat_is_what_the_other_model_is_given_directly(gateway: RealGateway) -> None:
    asked = {"role": "user", "content": "Name the capital of France."}
    answer = chat(gateway, "writer", [asked], save=True)
    more = {"role": "user", "content": "And of Spain?"}
    translated = chat(gateway, "look", [more], **{"from": answer["handoff"]["id"], "translate": True})
    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    assert of_chat(translated) == of_chat(chat(gateway, "look", [asked, said, more]))
    assert translated["handoff"]["source"]["outcome"] == "translated"


def test_images_go_along_to_a_model_that_takes_them_and_kv_never_does(gateway: RealGateway) -> None:
    picture = image_files.part_of(image_files.file_of(image_files.image(32, 32)))
    asked = {"role": "user", "content": [picture, {"type": "text", "text": "What colour is this?"}]}
    left = chat(gateway, "look", [asked], save=True)
    more = {"role": "user", "content": "And what shape?"}
    translated = chat(gateway, "other-look", [more], **{"from": left["handoff"]["id"]})
    said = {"role": "assistant", "content": left["choices"][0]["message"]["content"]}
    assert of_chat(translated) == of_chat(chat(gateway, "other-look", [asked, said, more]))
    source = translated["handoff"]["source"]
    assert (source["outcome"], source["from_model"]) == ("translated", "look")
    assert source["computed_tokens"] == source["tokens"], "their weights may be the same: nobody knows"
    body = {"model": "writer", "prompt": "a", "handoff": {"from": left["handoff"]["id"], "translate": True}}
    with gateway.client() as client:
        refused = client.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "handoff_incompatible")
    assert "images" in refused.json()["error"]["message"]


@pytest.mark.chaos
def test_after_a_restart_joins_and_translations_are_what_they_were(gateway: RealGateway) -> None:
    left = [
        once_saved(
            gateway, told(ask(gateway, "writer", TEXT + f" Agent {number}.\n" * 9, handoff={"save": True}))
        )
        for number in range(3)
    ]
    names = [each["id"] for each in left]
    exact = ask(gateway, "writer", " So", handoff={"from": names})
    moved = ask(gateway, "writer", " So", handoff={"from": names, "join": "moved", "save": True})
    blend = once_saved(gateway, told(moved))
    made = told(ask(gateway, "look", " So", handoff={"from": names[0], "translate": True}))["source"]
    chats = [
        chat(gateway, "writer", [{"role": "user", "content": f"Name {what}."}], save=True) for what in LISTS
    ]
    talks, last = [each["handoff"]["id"] for each in chats], [{"role": "user", "content": "Which is best?"}]
    whole = of_chat(chat(gateway, "writer", last, **{"from": talks}))
    gateway.restart()
    with gateway.client() as client:
        ahead = client.post("/v1/handoffs", json={"model": "writer", "from": talks}).raise_for_status().json()
    ahead = once_saved(gateway, ahead)
    assert of_chat(chat(gateway, "writer", last, **{"from": ahead["id"]})) == whole
    again = ask(gateway, "writer", " So", handoff={"from": names})
    assert ids(again) == ids(exact)
    assert told(again)["source"]["parts"][0]["loaded_tokens"] >= left[0]["tokens"] - 1
    with gateway.client() as client:
        assert client.get(f"/v1/handoffs/{blend['id']}").json()["exact"] is False
    heir = told(ask(gateway, "writer", " And", handoff={"from": blend["id"], "save": True}))
    assert (heir["source"]["exact"], heir["exact"]) == (False, False)
    assert ids(ask(gateway, "writer", " So", handoff={"from": names, "join": "moved"})) == ids(moved)
    source = told(ask(gateway, "look", " So", handoff={"from": names[0], "translate": True}))["source"]
    assert (source["translated_id"], source["computed_tokens"]) == (made["translated_id"], 0)
    assert source["outcome"] == "loaded"
