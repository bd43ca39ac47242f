"""Joined handoffs on real weights say what the same prompt says without any; the first one's KV is loaded."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from support.gateways import RealGateway
from support.relay_requests import ask, cached, ids, nothing_automatic, once_saved, told

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
RULES = "You compare cities. Be brief.\n"
CITIES = ("Rome", "Madrid", "Paris", "Vienna", "Athens", "Lisbon", "Prague", "Dublin")


def left(gateway: RealGateway, city: str, words: int) -> dict[str, Any]:
    """What an agent leaves that read of a city, behind rules that all of them have."""
    text = RULES + " ".join(f"{city} has {number * 37 % 101} bridges." for number in range(words))
    return once_saved(gateway, told(ask(gateway, "reader", text, handoff={"save": True})))


@pytest.mark.parametrize("engine", ["reader", "writer"])
@pytest.mark.parametrize("count", [3, *(pytest.param(count, marks=pytest.mark.chaos) for count in (2, 8))])
def test_several_texts_say_what_the_whole_prompt_says(
    relay_gateway: RealGateway, count: int, engine: str
) -> None:
    """Of lengths that end blocks and that do not, on the engine that saved them and on another one."""
    parts = [left(relay_gateway, city, 7 + 5 * number) for number, city in enumerate(CITIES[:count])]
    names = [part["id"] for part in parts]
    joined = ask(relay_gateway, engine, " So", handoff={"from": names})
    prompt, said = ids(joined)
    assert (prompt, said) == ids(ask(relay_gateway, engine, prompt))
    source = told(joined)["source"]
    begin = len(prompt) - sum(part["tokens"] for part in source["parts"])
    assert begin == 1, "nothing but the parts and B's own"
    with relay_gateway.client() as client:
        text = client.post("/detokenize", json={"model": engine, "tokens": prompt}).json()["prompt"]
    assert [text.count(RULES), *(text.count(f"{city} has 0 bridges") for city in CITIES[:count])] == [
        1,
        *[1] * count,
    ]
    first = source["parts"][0]
    assert first["loaded_tokens"] + source["resident_tokens"] >= first["tokens"] - 1
    assert all(part["loaded_tokens"] == 0 for part in source["parts"][1:])


def test_what_is_joined_ahead_is_loaded_whole(relay_gateway: RealGateway) -> None:
    names = [left(relay_gateway, city, 12)["id"] for city in CITIES[:3]]
    with relay_gateway.client() as client:
        ahead = client.post("/v1/handoffs", json={"model": "reader", "from": names}).raise_for_status().json()
    ahead = once_saved(relay_gateway, ahead)
    assert ahead["parents"] == names
    answer = ask(relay_gateway, "reader", " So", handoff={"from": ahead["id"]})
    direct = ask(relay_gateway, "reader", " So", handoff={"from": names})
    assert ids(answer) == ids(direct)
    assert cached(answer) == ahead["tokens"]


RULE = {"role": "system", "content": "You are a helpful assistant."}
ASKED = [{"role": "user", "content": f"What is the capital of {land}?"} for land in ("Italy", "Spain")]
LAST = {"role": "user", "content": "Which of both is larger?"}


def chat(gateway: RealGateway, model: str, messages: list[Any], **handoff: Any) -> Any:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as sdk:
        return sdk.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=12,
            temperature=0,
            extra_body={"return_token_ids": True} | ({"handoff": handoff} if handoff else {}),
            extra_headers=nothing_automatic({"handoff": handoff} if handoff else {}),
        )


def test_chats_are_joined_as_the_model_s_template_writes_them(relay_gateway: RealGateway) -> None:
    first, second = (chat(relay_gateway, "reader", [RULE, question], save=True) for question in ASKED)
    joined = chat(relay_gateway, "reader", [LAST], **{"from": [first.handoff["id"], second.handoff["id"]]})
    answers = [
        {"role": "assistant", "content": answer.choices[0].message.content} for answer in (first, second)
    ]
    whole = chat(relay_gateway, "reader", [RULE, ASKED[0], answers[0], ASKED[1], answers[1], LAST])
    assert joined.prompt_token_ids == whole.prompt_token_ids
    assert joined.choices[0].token_ids == whole.choices[0].token_ids


def test_chats_that_were_joined_ahead_are_loaded_whole_by_another_engine(relay_gateway: RealGateway) -> None:
    saved = [chat(relay_gateway, "reader", [RULE, question], save=True).handoff for question in ASKED]
    names = [once_saved(relay_gateway, each)["id"] for each in saved]
    with relay_gateway.client() as client:
        ahead = client.post("/v1/handoffs", json={"model": "reader", "from": names}).raise_for_status().json()
    ahead = once_saved(relay_gateway, ahead)
    loaded = chat(relay_gateway, "writer", [LAST], **{"from": ahead["id"]})
    direct = chat(relay_gateway, "reader", [LAST], **{"from": names})
    assert loaded.prompt_token_ids == direct.prompt_token_ids
    assert loaded.choices[0].token_ids == direct.choices[0].token_ids
    source = loaded.handoff["source"]
    assert source["loaded_tokens"] + source["resident_tokens"] >= source["shared_tokens"] - 1
    assert source["shared_tokens"] >= ahead["tokens"] - 1, "but for the token that ended the last answer"
