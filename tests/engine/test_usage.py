"""Usage on real engines is what vLLM's answers say, of every operation; and settings that are read again start one."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import RealGateway
from support.raw_requests import wait_for

from baton.admission.api_keys import create_key, read_keys, revoke_key

pytestmark = pytest.mark.engine

WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TEXT: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 1.0, "seed": 3}
ASKS = [{"role": "user", "content": "Name a city."}]
CHAT: dict[str, Any] = {"messages": ASKS, "max_tokens": 6}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1]}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, TEXT),
    (COMPLETIONS, TEXT | WITH_USAGE),
    (COMPLETIONS, TEXT | {"n": 3}),
    (COMPLETIONS, TEXT | {"n": 3} | WITH_USAGE),
    (COMPLETIONS, TEXT | {"prompt": ["one", "two three", "four"], "n": 2}),
    (COMPLETIONS, TEXT | {"prompt": [[5, 6, 7], [8]], "n": 2} | WITH_USAGE),
    (COMPLETIONS, TEXT | {"echo": True}),
    (COMPLETIONS, TEXT | {"echo": True, "n": 2} | WITH_USAGE),
    (COMPLETIONS, TEXT | {"echo": True, "max_tokens": 0}),
    (COMPLETIONS, TEXT | {"echo": True, "max_tokens": 0, "logprobs": 1}),
    (COMPLETIONS, TEXT | {"echo": True, "max_tokens": 0} | WITH_USAGE),
    (COMPLETIONS, TEXT | {"stop": [" ", "e"], "max_tokens": 40}),
    (COMPLETIONS, TEXT | {"stop": [" ", "e"], "max_tokens": 40} | WITH_USAGE),
    (COMPLETIONS, TEXT | {"logprobs": 2, "prompt_logprobs": 1}),
    (COMPLETIONS, TEXT | {"use_beam_search": True, "n": 2, "seed": None}),
    (COMPLETIONS, TEXT | {"truncate_prompt_tokens": 2}),
    (COMPLETIONS, TEXT | {"handoff": {"save": True}}),
    (CHATS, CHAT),
    (CHATS, CHAT | {"n": 2}),
    (CHATS, CHAT | {"n": 2} | WITH_USAGE),
    (CHATS, CHAT | {"response_format": FORMAT, "max_tokens": 30}),
    (CHATS, CHAT | {"use_beam_search": True, "n": 2}),
    (CHATS, CHAT | {"handoff": {"save": True}} | WITH_USAGE),
    ("/v1/responses", {"input": "Name a city.", "max_output_tokens": 6}),
    ("/v1/responses", {"input": "Name a city.", "max_output_tokens": 6, "stream": True}),
    ("/v1/messages", {"messages": ASKS, "max_tokens": 6}),
    ("/v1/messages", {"messages": ASKS, "max_tokens": 6, "stream": True}),
    ("/v1/messages/count_tokens", {"messages": ASKS}),
    ("/tokenize", {"prompt": "one two"}),
    ("/v1/embeddings", {"input": ["one two", "three"]}),
    ("/v1/embeddings", {"input": "one two", "encoding_format": "base64"}),
    ("/pooling", {"input": ["one two", "three four five"]}),
    ("/v1/score", {"queries": "one", "documents": ["two", "three four"]}),
    ("/v1/rerank", {"query": "one", "documents": ["two", "three four"]}),
)
POOL = ("/v1/embeddings", "/pooling", "/v1/score", "/v1/rerank")


def tokens_of(usage: dict[str, Any]) -> Counter[str]:
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    return Counter(
        prompt=prompt, completion=usage.get("completion_tokens", usage.get("output_tokens", 0)) or 0
    )


def usage_of(answer: httpx.Response) -> Counter[str]:
    if "event-stream" not in answer.headers["content-type"]:
        return tokens_of(answer.json().get("usage") or {})
    said: Counter[str] = Counter()
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            for place in (event, event.get("response") or {}, event.get("message") or {}):
                said |= tokens_of(place.get("usage") or {})
    return said


def counted(client: httpx.Client) -> Counter[str]:
    total = client.get("/v1/usage").json()["total"]
    return Counter(prompt=total["prompt_tokens"], completion=total["completion_tokens"])


@pytest.mark.fault("G18")
def test_usage_of_every_operation_is_what_its_answer_says(tiny_gateway: RealGateway) -> None:
    differing, tokens = [], 0
    with tiny_gateway.client("acme") as client:
        for path, body in ASKED:
            before = counted(client)
            answer = client.post(path, json=body | {"model": "embed" if path in POOL else "tiny"})
            assert answer.status_code == 200, (path, body, answer.text)
            said = usage_of(answer)
            found = counted(client)
            found.subtract(before)
            if +found != +said:
                differing.append((path, body, dict(said), dict(found)))
            tokens += said.total()
    print(
        f"G18: {len(ASKED)} kinds of requests, {tokens} tokens, {len(differing)} counted otherwise than answered"
    )
    assert differing == []


def test_a_hang_up_starts_another_engine_on_real_weights_and_removes_it_again(
    tiny_gateway: RealGateway,
) -> None:
    """What runs goes on: the engine that was there is the same, by its start."""
    config = Path(tiny_gateway._arguments[-1])
    before = config.read_text()
    folder = config.parent
    more = f'\n[[engines]]\nname = "second"\nmodel = "{folder}/model"\nkv_cache_memory = "64MiB"\n'
    more += "args = { max_model_len = 256 }\n"
    with tiny_gateway.client("acme") as client:

        def row(name: str) -> dict[str, Any] | None:
            rows = client.get("/v1/engines").json()["data"]
            return next((each for each in rows if each["name"] == name), None)

        def state(name: str) -> str | None:
            return None if (found := row(name)) is None else found["state"]

        was = row("tiny")
        try:
            config.write_text(before.replace('name = "tiny"', 'name = "tiny"\naliases = ["nick"]') + more)
            tiny_gateway.process.send_signal(signal.SIGHUP)
            wait_for(lambda: state("second") == "ready", "it does not start", 120)
            for name in ("second", "nick", "tiny"):
                answer = client.post(COMPLETIONS, json=TEXT | {"model": name})
                assert (answer.status_code, answer.json()["model"]) == (200, name)
            listed = [card["id"] for card in client.get("/v1/models").json()["data"]]
            assert listed == ["tiny", "nick", "embed", "second"]
            config.write_text(before.replace("max_model_len = 256,", "max_model_lenn = 256,"))
            key = create_key(folder / "keys.json", "ops", operator=True)
            operators = {"Authorization": f"Bearer {key}"}
            wait_for(
                lambda: client.get("/v1/models", headers=operators).status_code == 200, "the key is unknown"
            )
            refused = client.post("/v1/settings/reload", headers=operators)
            assert refused.status_code == 422
            assert "max_model_lenn" in refused.json()["error"]["message"]
            assert state("second") == "ready"
        finally:
            config.write_text(before)
        answer = client.post("/v1/settings/reload", headers=operators)
        revoke_key(folder / "keys.json", read_keys(folder / "keys.json")[-1].id)
        told = {each["setting"]: each["change"] for each in answer.json()["changed"]}
        assert told == {"engines.tiny": "renamed", "engines.second": "removed"}
        assert client.post(COMPLETIONS, json=TEXT | {"model": "nick"}).status_code == 404
        now = row("tiny")
        assert was is not None
        assert now is not None
        assert (now["started_at"], now["models"]) == (was["started_at"], was["models"])
