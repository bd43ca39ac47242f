"""The relay end to end: the OpenAI SDK, the gateway, two real engines, and a restart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from support.gateways import RealGateway
from support.relay_requests import DOCUMENT, ask, cached, ids, nothing_automatic, once_saved, told

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
QUESTIONS = [" The first bird", " In the end", " Question: how many birds? Answer:", " x"]


@pytest.fixture(scope="module")
def gateway(relay_gateway: RealGateway) -> RealGateway:
    return relay_gateway


@pytest.fixture(scope="module")
def config(relay_config: Path) -> Path:
    return relay_config


@pytest.fixture(scope="module")
def read(gateway: RealGateway) -> tuple[dict[str, Any], list[int]]:
    """A has read the document: its handoff, and the token ids of its whole context."""
    answer = ask(gateway, "reader", DOCUMENT, handoff={"save": {"label": "the document"}})
    handoff = once_saved(gateway, told(answer))
    prompt, said = ids(answer)
    assert (handoff["state"], handoff["tokens"]) == ("ready", len(prompt) + len(said))
    assert handoff["bytes"] > len(prompt) * 40_000
    return handoff, prompt + said


@pytest.mark.parametrize("model", ["reader", "writer"])
def test_b_answers_as_if_it_had_read_everything_itself(
    gateway: RealGateway, read: tuple[dict[str, Any], list[int]], model: str
) -> None:
    handoff, context = read
    for question in QUESTIONS:
        relayed = ask(gateway, model, question, handoff={"from": handoff["id"]})
        prompt, said = ids(relayed)
        assert prompt[: len(context)] == context
        plain = ask(gateway, "reader", prompt)
        assert said == ids(plain)[1]
        assert cached(plain) == 0
        source = told(relayed)["source"]
        assert source["outcome"] in ("loaded", "resident")
        assert source["loaded_tokens"] + source["resident_tokens"] == cached(relayed)
        assert cached(relayed) >= (len(context) - 1 if model == "reader" else 32 * (len(context) // 32))


def resident_bytes(gateway: RealGateway) -> float:
    """Bytes that the writer has loaded from its memory."""
    with gateway.client() as client:
        lines = client.get("/metrics").text.splitlines()
    name = 'baton_handoff_resident_bytes_total{engine="writer"}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.fault("B26")
def test_kv_is_brought_into_memory_while_a_tool_runs(gateway: RealGateway) -> None:
    """The first load of an engine that has never had the entry comes from its memory, all of it, and is exact."""
    left = once_saved(gateway, told(ask(gateway, "reader", f"One tool. {DOCUMENT}", handoff={"save": True})))
    with gateway.client() as client:
        path = f"/v1/handoffs/{left['id']}/warm"
        for _ in range(2):
            answer = client.post(path)
            assert answer.status_code == 200, answer.text
            data = {row["engine"]: row for row in answer.json()["data"]}
            assert data["reader"] | {"reason": "off"} == data["reader"], "it has no memory for it"
            warm = data["writer"]
            assert (warm["whole"], warm["reason"], warm["tokens"]) == (True, None, left["tokens"] - 1)
            assert warm["bytes"] <= left["bytes"]
        before = resident_bytes(gateway)
        relayed = ask(gateway, "writer", QUESTIONS[0], handoff={"from": left["id"]})
        assert told(relayed)["source"]["outcome"] == "loaded"
        assert relayed.model_extra is not None
        assert relayed.model_extra["prompt_cache_diagnostics"] == {"type": "cache_hit"}
        assert resident_bytes(gateway) - before >= warm["bytes"] * 0.9
        assert ids(relayed)[1] == ids(ask(gateway, "reader", ids(relayed)[0]))[1]
        assert client.delete(f"/v1/handoffs/{left['id']}").status_code == 204
        assert client.post(path).status_code == 404


def test_the_sdk_streams_and_gets_the_handoff_at_the_end(
    gateway: RealGateway, read: tuple[dict[str, Any], list[int]]
) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as sdk:
        stream = sdk.completions.create(
            model="writer",
            prompt=" And then",
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"handoff": {"from": read[0]["id"], "save": True}},
        )
        chunks = list(stream)
    last = once_saved(gateway, told(chunks[-1]))
    assert (last["parent"], last["state"]) == (read[0]["id"], "ready")
    assert last["tokens"] > len(read[1]) + 6
    whole = ask(gateway, "reader", " And then", handoff={"from": read[0]["id"]}, max_tokens=6)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text


async def test_many_start_from_one_handoff_at_once(
    gateway: RealGateway, read: tuple[dict[str, Any], list[int]]
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as sdk:
        answers = await asyncio.gather(
            *(
                sdk.completions.create(
                    model="reader",
                    prompt=f" Number {number}",
                    max_tokens=6,
                    temperature=0,
                    extra_body={"handoff": {"from": read[0]["id"]}, "return_token_ids": True},
                )
                for number in range(8)
            )
        )
    for answer in answers:
        prompt, said = ids(answer)
        assert told(answer)["source"]["outcome"] == "loaded"
        assert said == ids(ask(gateway, "reader", prompt, max_tokens=6))[1]


def test_a_chat_s_context_goes_on_as_a_completion(gateway: RealGateway) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as sdk:
        chat = sdk.chat.completions.create(
            model="reader",
            messages=[{"role": "user", "content": "Name a colour."}],
            max_tokens=8,
            temperature=0,
            extra_body={"handoff": {"save": True}},
        )
    left: dict[str, Any] = chat.handoff  # type: ignore[attr-defined]  # beyond OpenAI's own fields
    relayed = ask(gateway, "writer", " Another one is", handoff={"from": left["id"]})
    assert told(relayed)["source"]["outcome"] == "loaded"
    prompt, said = ids(relayed)
    assert said == ids(ask(gateway, "reader", prompt))[1]


def chat(gateway: RealGateway, model: str, messages: list[dict[str, str]], **more: Any) -> Any:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as sdk:
        return sdk.chat.completions.create(
            model=model,
            messages=messages,  # type: ignore[arg-type]  # plain dicts, as people write them
            max_tokens=8,
            temperature=0,
            extra_body={"return_token_ids": True} | more,
            extra_headers=nothing_automatic(more),
        )


def text_of(gateway: RealGateway, tokens: list[int]) -> str:
    with gateway.client() as client:
        found = client.post("/detokenize", json={"model": "reader", "tokens": tokens})
        text: str = found.json()["prompt"]
        return text


def test_a_chat_goes_on_from_a_chat_as_if_everything_had_been_sent_again(gateway: RealGateway) -> None:
    messages = [{"role": "user", "content": f"{DOCUMENT[:900]} Name a colour."}]
    first = chat(gateway, "reader", messages, handoff={"save": True})
    said = first.choices[0].message.content
    for model in ("reader", "writer"):
        asked = {"role": "user", "content": "And another one?"}
        relayed = chat(gateway, model, [asked], handoff={"from": first.handoff["id"], "save": True})
        assert relayed.handoff["source"]["outcome"] in ("loaded", "resident")
        prompt = relayed.prompt_token_ids
        history = [*messages, {"role": "assistant", "content": said}, asked]
        resent = chat(gateway, "writer", history)
        assert text_of(gateway, prompt) == text_of(gateway, resent.prompt_token_ids)
        assert relayed.choices[0].token_ids == ids(ask(gateway, "reader", prompt))[1]
    third = chat(gateway, "reader", [asked], handoff={"from": relayed.handoff["id"]})
    whole = text_of(gateway, third.prompt_token_ids)
    assert (whole.count("<|im_start|>system"), whole.count("<|im_start|>user")) == (1, 3)
    assert third.handoff["source"]["outcome"] == "loaded"
    assert third.choices[0].token_ids == ids(ask(gateway, "reader", third.prompt_token_ids))[1]


def test_a_conversation_sent_again_is_the_same_context_as_its_new_messages_alone(
    gateway: RealGateway,
) -> None:
    """Messages as the SDK writes them back, with every null of an answer's; the first one is streamed."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "Name a colour."}]
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as sdk:
        stream = sdk.chat.completions.create(
            model="reader",
            messages=history,  # type: ignore[arg-type]  # plain dicts, as people write them
            max_tokens=24,
            temperature=0,
            stream=True,
            extra_body={"handoff": {"save": True}},
        )
        chunks = list(stream)
    left = told(chunks[-1])["id"]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    history.append({"role": "assistant", "content": said})
    for model, asked in (("writer", "And another one?"), ("reader", "A third?")):
        new = {"role": "user", "content": asked}
        alone = chat(gateway, model, [new], handoff={"from": left, "save": True})
        again = chat(gateway, model, [*history, new], handoff={"from": left, "save": True})
        assert again.prompt_token_ids == alone.prompt_token_ids
        assert again.choices[0].token_ids == alone.choices[0].token_ids
        assert again.handoff["tokens"] == alone.handoff["tokens"]
        resent = [answer.handoff["source"]["resent_messages"] for answer in (alone, again)]
        assert resent == [0, len(history)]
        assert text_of(gateway, again.prompt_token_ids).count("Name a colour.") == 1
        left = again.handoff["id"]
        history += [new, again.choices[0].message.model_dump()]


def test_a_chat_streams_from_a_context_that_was_only_computed(gateway: RealGateway) -> None:
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": DOCUMENT[:900]}]
    with gateway.client() as client:
        made = client.post("/v1/handoffs", json={"model": "reader", "messages": messages, "pin": True})
    assert (made.status_code, made.json()["state"], made.json()["pin"]) == (201, "ready", True)
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as sdk:
        stream = sdk.chat.completions.create(
            model="writer",
            messages=[{"role": "user", "content": "How many birds?"}],
            max_tokens=6,
            temperature=0,
            stream=True,
            extra_body={"handoff": {"from": made.json()["id"]}},
        )
        chunks = list(stream)
    source = told(chunks[-1])["source"]
    assert source["outcome"] == "loaded"
    assert source["loaded_tokens"] == made.json()["tokens"], "the last token's KV is there too"
    assert source["saved_prefill_ms"] > 0
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_chat_begins_after_a_text_with_one_system_prompt(gateway: RealGateway) -> None:
    left = ask(gateway, "reader", DOCUMENT[:600], handoff={"save": True})
    asked = [{"role": "user", "content": "How many birds?"}]
    relayed = chat(gateway, "writer", asked, handoff={"from": told(left)["id"]})
    whole = text_of(gateway, relayed.prompt_token_ids)
    assert whole.startswith(DOCUMENT[:600])
    assert (whole.count("<|im_start|>system"), whole.count("<|im_start|>user")) == (1, 1)
    assert relayed.handoff["source"]["outcome"] in ("loaded", "resident")
    assert relayed.choices[0].token_ids == ids(ask(gateway, "reader", relayed.prompt_token_ids))[1]


def test_a_client_s_own_template_is_never_run(gateway: RealGateway) -> None:
    left = ask(gateway, "reader", "A text.", handoff={"save": True})
    asked = [{"role": "user", "content": "x"}]
    own = {"chat_template": "{{ ('a' * 2000000000) | length }}"}
    with pytest.raises(openai.BadRequestError):
        chat(gateway, "reader", asked, handoff={"from": told(left)["id"]}, **own)
    with gateway.client() as client:
        made = client.post("/v1/handoffs", json={"model": "reader", "messages": asked} | own)
    assert made.status_code == 201
    assert made.json()["tokens"] > 3, "the model's own template wrote it"


def test_several_answers_leave_one_prompt_behind(gateway: RealGateway) -> None:
    left = ask(
        gateway,
        "reader",
        f"Once more: {DOCUMENT[:800]}",
        handoff={"save": {"scope": "prompt"}},
        n=3,
        temperature=1,
    )
    prompt = ids(left)[0]
    assert (told(left)["tokens"], len(left.choices)) == (len(prompt), 3)
    relayed = ask(gateway, "writer", " Then", handoff={"from": told(left)["id"]})
    assert told(relayed)["source"]["loaded_tokens"] == len(prompt)
    assert ids(relayed)[1] == ids(ask(gateway, "reader", ids(relayed)[0]))[1]


COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"


def said_of(gateway: RealGateway, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text that A's client received, and the handoff that A left, once it is saved."""
    with gateway.client() as client:
        response = client.post(
            path, json={"model": "reader", "temperature": 0, "handoff": {"save": True}} | body
        )
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            first = response.json()["choices"][0]
            said = first["text"] if "text" in first else first["message"]["content"]
            left = response.json()["handoff"]
        else:
            lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
            chunks = [json.loads(line) for line in lines]
            choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
            said = "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)
            left = next(chunk["handoff"] for chunk in chunks if "handoff" in chunk)
    return said or "", once_saved(gateway, left)


@pytest.mark.fault("D11")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("ends", "last"),
    [
        ({"stop": ["16"]}, "15, "),
        ({"stop": [", 16"]}, "15"),
        ({"stop": ["6, "]}, "15, 1"),
        ({"stop": ["16"], "include_stop_str_in_output": True}, "16"),
        ({"max_tokens": 5}, ""),
    ],
    ids=["at a token", "before it", "in it", "included", "cut"],
)
def test_what_stopped_an_answer_is_not_in_what_goes_on(
    gateway: RealGateway, ends: dict[str, Any], last: str, *, stream: bool
) -> None:
    """Stop strings are found outside the engine, which has computed more by then: its KV is good up to the cut."""
    said, handoff = said_of(
        gateway, "/v1/completions", {"prompt": COUNTING, "max_tokens": 40, "stream": stream} | ends
    )
    assert said.endswith(last)
    assert (handoff["state"], handoff["bytes"] > 0) == ("ready", True)
    for model in ("reader", "writer"):
        relayed = ask(gateway, model, " and", handoff={"from": handoff["id"]})
        prompt, answer = ids(relayed)
        assert text_of(gateway, prompt) == COUNTING + said + " and"
        source = told(relayed)["source"]
        assert (source["outcome"] in ("loaded", "resident"), source["exact"]) == (True, True)
        reused = source["loaded_tokens"] + source["resident_tokens"]
        assert reused >= 32 * ((handoff["tokens"] - 2) // 32), "whole blocks before the cut"
        assert reused <= source["shared_tokens"] == handoff["tokens"]
        assert answer == ids(ask(gateway, "reader", prompt))[1]


@pytest.mark.fault("D11")
def test_a_character_that_was_only_begun_is_not_in_what_goes_on(gateway: RealGateway) -> None:
    with gateway.client() as client:
        asked = {"model": "reader", "prompt": "🦜", "add_special_tokens": False}
        begun = client.post("/tokenize", json=asked).json()["tokens"]
    assert len(begun) > 1
    ends = {"prompt": COUNTING, "max_tokens": 1, "allowed_token_ids": begun[:1]}
    said, handoff = said_of(gateway, "/v1/completions", ends)
    relayed = ask(gateway, "reader", " and", handoff={"from": handoff["id"]})
    assert (said, text_of(gateway, ids(relayed)[0])) == ("", f"{COUNTING} and")


@pytest.mark.fault("D11")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_chat_that_was_stopped_goes_on_as_if_everything_had_been_sent_again(
    gateway: RealGateway, stream: bool
) -> None:
    messages = [{"role": "user", "content": "Count from 1 to 9, with commas."}]
    ends = {"max_tokens": 24, "stop": [", 5, "], "stream": stream}
    said, handoff = said_of(gateway, "/v1/chat/completions", {"messages": messages} | ends)
    assert (", 5, " in said, said.endswith("4")) == (False, True)
    new = {"role": "user", "content": "Go on."}
    whole = [*messages, {"role": "assistant", "content": said}, new]
    wanted = text_of(gateway, chat(gateway, "writer", whole).prompt_token_ids)
    for sent in (whole, [new]):
        relayed = chat(gateway, "reader", sent, handoff={"from": handoff["id"]})
        prompt = relayed.prompt_token_ids
        assert text_of(gateway, prompt) == wanted
        assert relayed.handoff["source"]["outcome"] == "loaded"
        assert relayed.choices[0].token_ids == ids(ask(gateway, "reader", prompt))[1]


def test_a_damaged_entry_costs_only_its_reuse_and_the_usage_says_so(
    gateway: RealGateway, config: Path
) -> None:
    answer = ask(gateway, "reader", DOCUMENT[:700], handoff={"save": True})
    left = told(answer)
    (path,) = (config.parent / "store" / "entries").rglob(f"{left['id']}.kv")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    relayed = ask(gateway, "reader", " Next", handoff={"from": left["id"]})
    assert told(relayed)["source"]["outcome"] == "recomputed"
    assert told(relayed)["source"]["reason"] == "load_failed"
    assert cached(relayed) == 0
    prompt, said = ids(relayed)
    assert said == ids(ask(gateway, "reader", prompt))[1]


def test_what_a_client_sends_to_steer_the_store_changes_nothing(
    gateway: RealGateway, read: tuple[dict[str, Any], list[int]], config: Path
) -> None:
    entries = sorted((config.parent / "store" / "entries").rglob("*.kv"))
    (key,) = [f"{path.parent.name}/{path.stem}" for path in entries if path.stem == read[0]["id"]]
    forged = {"kv_transfer_params": {"baton_kv": {"load": key, "save": True}}}
    answer = ask(gateway, "reader", read[1] + [5], **forged)
    assert cached(answer) == 0
    assert sorted((config.parent / "store" / "entries").rglob("*.kv")) == entries
    assert key.split("/")[0] not in answer.model_dump_json()
