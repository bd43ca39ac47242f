"""Latent steps through the gateway: real engines that answer ordinary requests too, and HuggingFace's model in a loop."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from latent.reference import Reference
from support.gateways import RealGateway
from support.offline_engines import prompt
from support.relay_requests import ask, cached, ids, once_saved, told
from transformers import AutoModelForCausalLM

from baton.config.settings import load_settings
from baton.models.store import ModelStore
from baton.relay.move import LONE_HEAD_TOKENS
from baton_latent import choose_placeholder

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
README = Path(__file__).parents[2] / "plugins/baton_latent/README.md"
CALM = [(37, 8, 4), (50, 3, 7), (45, 12, 7), (60, 12, 8)]
"""Lengths, steps and seeds of prompts on which rounding does not decide; see test_engine.py."""
LENGTH, STEPS, SEED = CALM[2]
RULES = prompt(LENGTH, seed=SEED)


@pytest.fixture(scope="module")
def gateway(relay_gateway: RealGateway) -> RealGateway:
    return relay_gateway


@pytest.fixture(scope="module")
def reference() -> Reference:
    model = ModelStore(load_settings().models_folder).resolve("smollm2")
    return Reference(model, choose_placeholder(model))


def test_one_vector_stands_for_another_model_s_thought(gateway: RealGateway) -> None:
    """Experimental, and exact: the vector is what torch makes of the first model's distribution."""
    thought = told(ask(gateway, "reader", "The capital of France is", handoff={"save": {"scope": "prompt"}}))
    handoff = {"from": thought["id"], "translate": {"via": "rosetta"}}
    started = ask(gateway, "slow", " of", handoff=handoff)
    source = told(started)["source"]
    assert (source["outcome"], source["exact"], source["from_model"]) == ("rosetta", False, "reader")
    assert source["dropped"] == {"latent_steps": 0, "tokens": thought["tokens"]}
    prompt_ids, said = ids(started)
    with gateway.client() as client:
        body = {"model": "reader", "prompt": "The capital of France is", "max_tokens": 1, "logprobs": 20}
        body |= {"return_tokens_as_token_ids": True, "temperature": 0}
        top = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    chances = {int(name.rpartition(":")[2]): math.exp(value) for name, value in top.items()}
    model = ModelStore(load_settings().models_folder).resolve("smollm2")
    assert said == mixed_answer(model, chances, prompt_ids[1:], len(said))
    assert ids(ask(gateway, "slow", " of"))[1] != said, "the vector is seen"
    again = ask(gateway, "slow", " of", handoff=handoff)
    assert ids(again) == ids(started)


def mixed_answer(model: str, chances: dict[int, float], tokens: list[int], count: int) -> list[int]:
    """What a model says after a mean of embeddings, as long as these are on average, and some tokens."""
    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    table = net.get_input_embeddings().weight
    with torch.inference_mode():
        vector = torch.tensor(list(chances.values())) @ table[list(chances)]
        vector *= table.norm(dim=1).mean() / vector.norm()
        found = list(tokens)
        for _ in range(count):
            inputs = torch.cat([vector[None], table[found]])[None]
            logits = net(inputs_embeds=inputs).logits[0, -1]
            logits[choose_placeholder(model)] = -torch.inf
            found.append(int(logits.argmax()))
    return found[len(tokens) :]


def test_avp_s_names_say_where_one_vector_is_the_default(gateway: RealGateway) -> None:
    """The slow engine's settings name the reader as its `avp_target_model`; its own handoffs it continues."""
    left = told(ask(gateway, "slow", "The capital of France is", handoff={"save": {"scope": "prompt"}}))["id"]
    by_name = ask(gateway, "reader", " of", handoff={"from": left})
    assert told(by_name)["source"]["outcome"] == "rosetta"
    by_request = {"from": left, "translate": {"via": "rosetta"}}
    assert ids(by_name) == ids(ask(gateway, "reader", " of", handoff=by_request))
    own = ask(gateway, "slow", " of", handoff={"from": left})
    source = told(own)["source"]
    assert source["outcome"] in {"loaded", "recomputed"}, "whatever is faster for five tokens"
    assert (source["id"], source["exact"]) == (left, True)
    assert ids(own) == ids(ask(gateway, "slow", "The capital of France is of"))


def test_a_thought_of_another_model_is_refused_where_it_cannot_be_had(gateway: RealGateway) -> None:
    left = told(ask(gateway, "reader", "One two", handoff={"save": True}))["id"]
    wrong: list[dict[str, Any]] = [{"save": True}, {"from": [left, left[::-1]]}]
    with gateway.client() as client:
        for more in wrong:
            handoff = {"from": left, "translate": {"via": "rosetta"}} | more
            answer = client.post("/v1/completions", json={"model": "slow", "prompt": "a", "handoff": handoff})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "handoff.translate")


def steps_counted(gateway: RealGateway, engine: str) -> tuple[int, float]:
    with gateway.client() as client:
        page = client.get("/metrics").text
    found = [
        float(match[1]) if (match := re.search(rf'{name}{{engine="{engine}"}} (\S+)', page)) else 0.0
        for name in ("baton_latent_steps_total", "baton_latent_seconds_total")
    ]
    return int(found[0]), found[1]


def test_a_thinks_and_b_goes_on_from_it_on_another_engine(gateway: RealGateway, reference: Reference) -> None:
    before = steps_counted(gateway, "reader")
    for length, steps, seed in CALM[:2]:
        asked = prompt(length, seed=seed)
        answer = ask(gateway, "reader", asked, handoff={"save": {"latent_steps": steps}})
        context, said = ids(answer)
        assert context == [*asked, *[reference.placeholder] * steps]
        assert said == reference.think(context, 8).tokens
        assert (told(answer)["latent_steps"], told(answer)["tokens"]) == (steps, len(context) + 8)
        own = prompt(5, seed=3)
        relayed = ask(gateway, "slow", own, handoff={"from": told(answer)["id"]})
        assert told(relayed)["source"]["outcome"] == "loaded"
        assert cached(relayed) == len(context) + 7
        assert ids(relayed)[0] == [*context, *said, *own]
        assert ids(relayed)[1] == reference.think([*context, *said, *own], 8).tokens
        here = ask(gateway, "reader", own, handoff={"from": told(answer)["id"]})
        assert ids(here)[1] == ids(relayed)[1]
    counted, seconds = steps_counted(gateway, "reader")
    thought = sum(steps for _, steps, _ in CALM[:2])
    assert counted - before[0] == thought
    assert 0 < seconds - before[1] < 10
    print(f"{1000 * (seconds - before[1]) / thought:.1f} ms a latent step")


def test_thinking_without_an_answer_goes_on_without_a_word(
    gateway: RealGateway, reference: Reference
) -> None:
    """B's prompt ends within the thought: what its last step starts from was loaded."""
    length, steps, seed = CALM[2]
    asked = prompt(length, seed=seed)
    with gateway.client() as client:
        made = client.post("/v1/handoffs", json={"model": "reader", "prompt": asked, "latent_steps": steps})
    assert (made.status_code, made.json()["latent_steps"], made.json()["tokens"]) == (
        201,
        steps,
        length + steps,
    )
    context = [*asked, *[reference.placeholder] * steps]
    for model in ("slow", "reader"):
        relayed = ask(gateway, model, "", handoff={"from": made.json()["id"]})
        assert ids(relayed) == (context, reference.think(context, 8).tokens)
        assert cached(relayed) == len(context) - 1
    chained = ask(gateway, "slow", "", handoff={"from": made.json()["id"], "save": {"latent_steps": 2}})
    longer = [*context, *[reference.placeholder] * 2]
    assert ids(chained) == (longer, reference.think(longer, 8).tokens)
    assert told(chained)["latent_steps"] == steps + 2


def test_many_think_at_once_each_as_often_as_it_asked(gateway: RealGateway, reference: Reference) -> None:
    def one(case: tuple[int, int, int]) -> tuple[list[int], list[int]]:
        length, steps, seed = case
        wish = {"save": {"latent_steps": steps}} if steps else None
        return ids(ask(gateway, "slow", prompt(length, seed=seed), **({"handoff": wish} if wish else {})))

    with ThreadPoolExecutor(8) as pool:
        for context, said in pool.map(one, [*CALM, (80, 0, 5), (33, 0, 6)]):
            assert said == reference.think(context, 8).tokens


def wait_for_audits(gateway: RealGateway, handoff_id: str) -> None:
    """Load a handoff on the reader, and wait for its audit: the audits before it are done by then, as they are taken in turn."""
    ask(gateway, "reader", "", handoff={"from": handoff_id})
    deadline = time.monotonic() + 60
    with gateway.client() as client:
        while client.get(f"/v1/handoffs/{handoff_id}").json()["audit"] is None:
            assert time.monotonic() < deadline, "it was not audited"
            time.sleep(0.1)


def test_what_was_thought_does_not_count_as_time_to_prefill(gateway: RealGateway) -> None:
    """The planner knows an engine's pace by its last five prefills; thoughts, which are slower, are none of them."""
    left = told(ask(gateway, "reader", prompt(70, seed=900), handoff={"save": True}))["id"]
    wait_for_audits(gateway, left)

    def estimated_ms() -> float:
        wish = {"from": left, "save": {"latent_steps": 1}}  # which is not audited: nothing else is computed
        found: float = told(ask(gateway, "reader", "", handoff=wish))["source"]["estimated_prefill_ms"]
        return found

    before = estimated_ms()
    with gateway.client() as client:
        for seed in range(901, 906):
            sent = {"model": "reader", "prompt": prompt(70, seed=seed), "latent_steps": 16}
            assert client.post("/v1/handoffs", json=sent).status_code == 201
    assert estimated_ms() == before


def test_a_chat_thinks_before_it_answers_and_goes_on(gateway: RealGateway) -> None:
    chat: dict[str, Any] = {"model": "reader", "temperature": 0, "max_tokens": 8}
    first = {
        "messages": [{"role": "user", "content": "Name a colour."}],
        "handoff": {"save": {"latent_steps": 2}},
    }
    with gateway.client() as client:
        answer = client.post("/v1/chat/completions", json=chat | first).json()
        assert answer["handoff"]["latent_steps"] == 2
        more = {
            "messages": [{"role": "user", "content": "Another."}],
            "handoff": {"from": answer["handoff"]["id"]},
        }
        going_on = client.post("/v1/chat/completions", json=chat | more)
    assert going_on.status_code == 200, going_on.text
    assert going_on.json()["handoff"]["source"]["outcome"] == "loaded"


def thought(gateway: RealGateway) -> dict[str, Any]:
    """A handoff that ends with latent steps."""
    with gateway.client() as client:
        sent = {"model": "reader", "prompt": RULES, "latent_steps": STEPS}
        made = client.post("/v1/handoffs", json=sent)
    assert made.status_code == 201, made.text
    return once_saved(gateway, made.json())


def read(gateway: RealGateway, asked: list[int]) -> tuple[dict[str, Any], list[int]]:
    """A handoff without latent steps, and its context."""
    answer = ask(gateway, "slow", asked, handoff={"save": True})
    before, said = ids(answer)
    return once_saved(gateway, told(answer)), [*before, *said]


@pytest.mark.parametrize("engine", ["reader", "slow"])
def test_a_thought_is_joined_exactly_with_what_others_read(
    gateway: RealGateway, reference: Reference, engine: str
) -> None:
    first = thought(gateway)
    second, context = read(gateway, prompt(30, seed=21))
    own = prompt(5, seed=3)
    joined = ask(gateway, engine, own, handoff={"from": [first["id"], second["id"]]})
    whole = [*RULES, *[reference.placeholder] * STEPS, *context, *own]
    assert ids(joined) == (whole, reference.think(whole, 8).tokens)
    source = told(joined)["source"]
    assert (source["outcome"], source["exact"]) == ("loaded", True)
    assert source["loaded_tokens"] + source["resident_tokens"] == LENGTH + STEPS


def test_a_thought_behind_another_context_is_refused(gateway: RealGateway) -> None:
    first, (second, _) = thought(gateway), read(gateway, prompt(30, seed=21))
    for join in ("exact", "moved"):
        handoff = {"from": [second["id"], first["id"]], "join": join}
        with gateway.client() as client:
            body = {"model": "slow", "prompt": "a", "handoff": handoff}
            refused = client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "handoff.from[1]")
        assert "latent steps" in refused.json()["error"]["message"]


def test_kv_is_moved_behind_a_thought(gateway: RealGateway, reference: Reference) -> None:
    first = thought(gateway)
    second, context = read(gateway, prompt(600, seed=21))
    own = prompt(5, seed=3)
    handoff = {"from": [first["id"], second["id"]], "join": "moved"}
    moved = ask(gateway, "reader", own, handoff=handoff)
    whole = [*RULES, *[reference.placeholder] * STEPS, *context, *own]
    assert ids(moved)[0] == whole
    source = told(moved)["source"]
    assert (source["outcome"], source["exact"]) == ("blended", False)
    assert source["parts"][1]["moved_tokens"] == len(context) - LONE_HEAD_TOKENS - 1
    exact = ask(gateway, "reader", own, handoff=handoff | {"join": "exact"})
    assert ids(exact) == (whole, reference.think(whole, 8).tokens), "the moved KV is not met again"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "one <empty_output> two"}),
        ("/v1/completions", {"prompt": [100, 16, 101]}),
        ("/v1/completions", {"prompt": [100, 101, 16], "handoff": {"save": {"latent_steps": 2}}}),
        ("/v1/completions", {"prompt": ["one", "two <empty_output>"]}),
        ("/v1/completions", {"prompt": [[100, 101], [100, 16]]}),
        ("/v1/completions", {"prompt": "one <empty_output>", "add_special_tokens": False}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one <empty_output> two"}]}),
        ("/v1/handoffs", {"prompt": "one <empty_output> two"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "<empty_output>"}]}),
        ("/v1/responses", {"input": "one <empty_output>"}),
    ],
)
def test_a_client_s_own_placeholder_is_refused(gateway: RealGateway, path: str, body: dict[str, Any]) -> None:
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    with gateway.client() as client:
        for stream in (False, True):
            more = {} if path == "/v1/handoffs" else {"stream": stream, limit: 4}
            answer = client.post(path, json={"model": "reader", **more, **body})
            assert (answer.status_code, "latent" in answer.text) == (400, True), answer.text
    assert "Traceback" not in gateway.log


@pytest.mark.parametrize("own", ["<empty_output> two", [16, 100]])
def test_nor_may_it_follow_what_was_thought(gateway: RealGateway, own: Any) -> None:
    left = told(ask(gateway, "reader", prompt(20, seed=3), handoff={"save": {"latent_steps": 2}}))
    with gateway.client() as client:
        body = {"model": "reader", "prompt": own, "max_tokens": 2, "handoff": {"from": left["id"]}}
        answer = client.post("/v1/completions", json=body)
    assert (answer.status_code, "latent" in answer.text) == (400, True), answer.text


def test_the_log_says_what_is_on(gateway: RealGateway) -> None:
    lines = [
        json.loads(line)
        for line in gateway.log.splitlines()
        if line.startswith('{"') and "latent_steps" in line
    ]
    by_event = {line["event"]: line for line in lines}
    allowed, ready = by_event["latent_steps_allowed"], by_event["latent_steps_ready"]
    assert ("reader" in str(allowed["engines"]), allowed["most"]) == (True, 64)
    assert (ready["architecture"], ready["placeholder"]) == ("BatonLatentLlamaForCausalLM", 16)


def test_the_readme_s_example_runs(gateway: RealGateway) -> None:
    (shown, _) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    code = shown.replace("http://127.0.0.1:8000", gateway.url).replace('"thinker"', '"reader"')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 "), done.stdout


def test_avp_s_quick_start_translated(gateway: RealGateway) -> None:
    """The README's curl line: the context is left behind with AVP's twenty steps in it."""
    (line,) = re.findall(r"(/v1/completions) .* -d '(.*?)'\n", README.read_text(), re.DOTALL)
    path, body = line
    with gateway.client() as client:
        answer = (
            client.post(path, json=json.loads(body) | {"model": "reader", "max_tokens": 8})
            .raise_for_status()
            .json()
        )
        left = client.get(f"/v1/handoffs/{answer['handoff']['id']}").json()
    assert (answer["handoff"]["latent_steps"], left["latent_steps"]) == (20, 20)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {"16": 100}},
        {"allowed_token_ids": [16]},
        {"structured_outputs": {"choice": ["<empty_output>"]}},
        {"temperature": 2, "top_p": 1, "seed": 5},
    ],
)
def test_the_placeholder_is_never_said(
    gateway: RealGateway, reference: Reference, options: dict[str, Any]
) -> None:
    assert reference.placeholder == 16
    answer = ask(gateway, "reader", prompt(20, seed=1), **options)
    assert reference.placeholder not in ids(answer)[1]
