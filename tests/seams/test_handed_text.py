"""What B reads of A's answer is what A's client received, however the answer ended.

Property-based: A's tokens are given, and everything else is the gateway and vLLM: the prompt that reaches the engine
for B is the text of the prompt that a client without handoffs would have sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from support.scripted_engines import ScriptedGateway, run_scripted  # after the skip

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
CASES = 250
"""Of each of the four properties."""
pytestmark = [pytest.mark.timeout(600), pytest.mark.fault("D11")]


def answered(gateway: ScriptedGateway, path: str, body: dict[str, Any]) -> dict[str, str]:
    """The text of an answer as its client received it, `said`, and the id of the handoff that is `left`."""
    response = gateway.post(path, body)
    assert response.status_code < 300, response.text
    left = response.headers.get("x-handoff-id", "")
    if not body.get("stream"):
        return {"said": said_whole(path, response.json()), "left": left}
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return {"said": "".join(said_in(path, event) for event in events), "left": left}


def prompt_of(gateway: ScriptedGateway, path: str, body: dict[str, Any]) -> str:
    """The text of the prompt that the engine gets for a request."""
    answered(gateway, path, {"max_tokens": 1} | body)
    return gateway.engine.text(gateway.engine.client.prompts[-1])


def said_whole(path: str, answer: dict[str, Any]) -> str:
    if path == MESSAGES:
        return "".join(block["text"] for block in answer["content"])
    if path == RESPONSES:
        items = [item for item in answer["output"] if item["type"] == "message"]
        return "".join(part["text"] for item in items for part in item["content"])
    first = answer["choices"][0]
    return (first["message"]["content"] if path == CHAT else first["text"]) or ""


def said_in(path: str, event: dict[str, Any]) -> str:
    if path == MESSAGES:
        return (event.get("delta") or {}).get("text") or ""
    if path == RESPONSES:
        return event["delta"] if event["type"] == "response.output_text.delta" else ""
    choices = event.get("choices") or [{"text": "", "delta": {}}]
    return (choices[0]["delta"].get("content") if path == CHAT else choices[0]["text"]) or ""


@pytest.fixture(scope="module")
def gateway() -> Iterator[ScriptedGateway]:
    with run_scripted() as running:
        yield running


PIECES = [
    "Observation:",
    " 1, 2, 3, 4",
    ", 5, ",
    "\n",
    "\n\n",
    " ",
    "é",
    "日本語",
    "🙂",
    "👩‍👩‍👧",
    "the answer",
    " is",
    "x",
    "STOP",
    "</s>",
]
SPECIAL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)


@dataclass(frozen=True)
class Said:
    """What the model says, and what ends it.

    Attributes:
        text: what it would say.
        stop: stop strings.
        stopping: number of a token that is given as one that stops.
        included: whether the client receives what stopped it.
        limit: most tokens.
        special: a special token that it says in the middle, which ends nothing.
        shown: whether special tokens are shown.
        at_once: tokens that reach the detokenizer at once.
        stream: whether it is streamed.
    """

    text: str
    stop: tuple[str, ...]
    stopping: int | None
    included: bool
    limit: int
    special: str | None
    shown: bool
    at_once: int
    stream: bool


@st.composite
def answers(draw: st.DrawFn) -> Said:
    text = draw(texts)
    begin = draw(st.integers(0, len(text) - 1))
    end = draw(st.integers(begin + 1, min(len(text), begin + 12)))
    inside = text[begin:end]
    return Said(
        text,
        draw(
            st.sampled_from([(), (inside,), (inside,), ("never said", inside), ("Observation:",), (", 5",)])
        ),
        draw(st.none() | st.integers(0, 20)),
        draw(st.booleans()),
        draw(st.integers(1, 24)),
        draw(st.none() | st.none() | st.sampled_from(SPECIAL)),
        draw(st.sampled_from([False, False, True])),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
    )


def begin(gateway: ScriptedGateway, said: Said) -> dict[str, Any]:
    """Give the engine what it says next; returns what ends it, in OpenAI's terms."""
    tokens = gateway.tokens(said.text)
    if said.special is not None:
        (special,) = gateway.tokens(said.special)
        tokens.insert(len(tokens) // 2, special)
    else:
        tokens += gateway.tokens("<|im_end|>")
    gateway.engine.client.said.append(tokens)
    gateway.engine.client.tokens_a_step = said.at_once
    stopping = [tokens[said.stopping % len(tokens)]] if said.stopping is not None else []
    return {
        "stop": list(said.stop),
        "stop_token_ids": stopping,
        "include_stop_str_in_output": said.included,
        "skip_special_tokens": not said.shown,
        "ignore_eos": said.special is not None,
    }


def many(test: Any) -> Any:
    return settings(
        max_examples=CASES,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )(test)


QUESTION = [{"role": "user", "content": "Count."}]
NEXT = {"role": "user", "content": " and now?"}


@many
@given(answers(), texts, st.booleans())
def test_a_completion_goes_on_from_what_the_client_of_the_first_received(
    gateway: ScriptedGateway, said: Said, own: str, joined: bool
) -> None:
    body = begin(gateway, said) | {"prompt": "Q:", "max_tokens": said.limit, "stream": said.stream}
    first = answered(gateway, TEXT, body | {"handoff": {"save": True}})
    wanted, sources = "Q:" + first["said"], first["left"]
    if joined:
        body = begin(gateway, said) | {"prompt": "A: ", "max_tokens": said.limit}
        second = answered(gateway, TEXT, body | {"handoff": {"save": True}})
        wanted, sources = wanted + "A: " + second["said"], [first["left"], second["left"]]
    assert prompt_of(gateway, TEXT, {"prompt": own, "handoff": {"from": sources}}) == wanted + own


@many
@given(answers(), st.booleans(), st.booleans())
def test_a_chat_goes_on_as_if_its_client_had_sent_all_of_it(
    gateway: ScriptedGateway, said: Said, again: bool, joined: bool
) -> None:
    body = begin(gateway, said) | {"messages": QUESTION, "max_tokens": said.limit, "stream": said.stream}
    first = answered(gateway, CHAT, body | {"handoff": {"save": True}})
    whole, sources = [*QUESTION, {"role": "assistant", "content": first["said"]}], first["left"]
    if joined:
        more = {"role": "user", "content": "Count again."}
        body = begin(gateway, said) | {"messages": [more], "max_tokens": said.limit}
        second = answered(gateway, CHAT, body | {"handoff": {"save": True}})
        whole += [more, {"role": "assistant", "content": second["said"]}]
        sources = [first["left"], second["left"]]
    messages = [*whole, NEXT] if again else [NEXT]
    handed = prompt_of(gateway, CHAT, {"messages": messages, "handoff": {"from": sources}})
    assert handed == prompt_of(gateway, CHAT, {"messages": [*whole, NEXT]})


@many
@given(answers(), texts, st.sampled_from([MESSAGES, RESPONSES, CHAT]))
def test_a_text_goes_on_from_what_was_received_on_any_route(
    gateway: ScriptedGateway, said: Said, own: str, route: str
) -> None:
    ends = begin(gateway, said)
    body = ends | {"messages": QUESTION, "max_tokens": said.limit, "stream": said.stream}
    if route == MESSAGES:
        body = {"stop_sequences": ends["stop"]} | {
            key: body[key] for key in ("messages", "max_tokens", "stream")
        }
    elif route == RESPONSES:
        body = {"input": "Count.", "max_output_tokens": said.limit, "stream": said.stream} | {
            key: ends[key]
            for key in ("stop", "skip_special_tokens", "include_stop_str_in_output", "ignore_eos")
        }
    first = answered(gateway, route, body | {"handoff": {"save": True}})
    asked = gateway.engine.text(gateway.engine.client.prompts[-1])
    handed = prompt_of(gateway, TEXT, {"prompt": own, "handoff": {"from": first["left"]}})
    assert handed == asked + first["said"] + own
    again = {"messages": [*QUESTION, {"role": "assistant", "content": first["said"]}, NEXT]}
    if route == MESSAGES and first["said"]:
        handed = prompt_of(gateway, route, again | {"handoff": {"from": first["left"]}})
        assert handed == prompt_of(gateway, route, again)


@many
@given(answers(), texts, st.integers(2, 3), st.sampled_from([TEXT, CHAT]))
def test_of_several_answers_the_prompt_alone_goes_on(
    gateway: ScriptedGateway, said: Said, own: str, count: int, route: str
) -> None:
    asked = {"prompt": "Q:"} if route == TEXT else {"messages": QUESTION}
    body = begin(gateway, said) | asked | {"max_tokens": said.limit, "n": count, "stream": said.stream}
    first = answered(gateway, route, body | {"handoff": {"save": {"scope": "prompt"}}})
    if route == TEXT:
        assert prompt_of(gateway, route, {"prompt": own, "handoff": {"from": first["left"]}}) == "Q:" + own
        return
    handed = prompt_of(gateway, route, {"messages": [NEXT], "handoff": {"from": first["left"]}})
    assert handed == prompt_of(gateway, route, {"messages": [*QUESTION, NEXT]})
