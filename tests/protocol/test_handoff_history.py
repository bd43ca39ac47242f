"""A client that sends the whole conversation again with its new messages, as agent frameworks do.

What the handoff's context holds already is not written again: the engine is given what it would have been
given for the new messages alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake
from support.random_images import part, picture, text, user

from baton.config.groups import EngineSettings
from baton.engines.backend import ImageInput
from baton.engines.fake.answers import IMAGE, token_id, token_ids
from baton.engines.fake.engine import FakeBehaviour, FakeEngine

CHAT = "/v1/chat/completions"
Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "1"}
QUESTION: Message = {"role": "user", "content": "11"}
NEXT: Message = {"role": "user", "content": "22"}
CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": "bird"}'}}
RESULT: Message = {"role": "tool", "tool_call_id": "call-1", "content": "33"}
BIRD, FISH = picture(1, 5), picture(2, 6)
SEES = ImageInput(limit=4, tokens=frozenset({token_id(IMAGE)}), texts=(IMAGE,))


@pytest.fixture(scope="module")
def gateway() -> Iterator[FakeGateway]:
    with run_fake(FakeEngine("a", supports_handoffs=True, images=SEES)) as gateway:
        yield gateway


@pytest.fixture
def relay(gateway: FakeGateway) -> Iterator[FakeGateway]:
    yield gateway
    gateway.engine("a").behaviour = FakeBehaviour()


def post(gateway: FakeGateway, messages: list[Message], path: str = CHAT, **body: Any) -> httpx.Response:
    with gateway.client() as client:
        return client.post(path, json={"model": "a", "max_tokens": 2, "messages": messages} | body)


def ask(gateway: FakeGateway, messages: list[Message], **handoff: Any) -> dict[str, Any]:
    """An answer that leaves a handoff."""
    response = post(gateway, messages, handoff={"save": True} | handoff)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def streamed(gateway: FakeGateway, messages: list[Message], **handoff: Any) -> tuple[list[Any], str]:
    """A streamed answer's deltas, and the id of the handoff it leaves."""
    events = post(gateway, messages, stream=True, handoff={"save": True} | handoff).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return deltas, chunks[-1]["handoff"]["id"]


def said(answer: dict[str, Any]) -> Message:
    found: Message = answer["choices"][0]["message"]
    return found


def require_same_prompt(
    gateway: FakeGateway, left: str, history: list[Message], *new: Message
) -> dict[str, Any]:
    """The prompt is that of the new messages alone, whether the history comes with them or not."""
    alone = ask(gateway, list(new), **{"from": left})
    relay = gateway.engine("a").transfers[-1]
    again = ask(gateway, [*history, *new], **{"from": left})
    repeated = gateway.engine("a").transfers[-1]
    assert repeated.prompt == relay.prompt
    assert repeated.images == relay.images
    assert said(again) == said(alone)
    assert again["handoff"]["tokens"] == alone["handoff"]["tokens"]
    assert alone["handoff"]["source"]["resent_messages"] == 0
    assert again["handoff"]["source"]["resent_messages"] == len(history)
    return again


def test_a_history_that_is_sent_again_is_not_written_again(relay: FakeGateway) -> None:
    answer = ask(relay, [SYSTEM, QUESTION])
    require_same_prompt(relay, answer["handoff"]["id"], [SYSTEM, QUESTION, said(answer)], NEXT)


def test_a_chain_whose_every_request_holds_the_whole_conversation_grows_by_turns(relay: FakeGateway) -> None:
    history: list[Message] = [QUESTION]
    answer = ask(relay, history)
    for content in ("22", "33", "44"):
        history.append(said(answer))
        answer = require_same_prompt(
            relay, answer["handoff"]["id"], history, {"role": "user", "content": content}
        )
        history.append({"role": "user", "content": content})


def test_a_streamed_answer_is_recognised(relay: FakeGateway) -> None:
    deltas, left = streamed(relay, [QUESTION])
    answer = {"role": "assistant", "content": "".join(delta["content"] for delta in deltas)}
    require_same_prompt(relay, left, [QUESTION, answer], NEXT)


def test_a_stream_that_starts_from_a_history_says_what_it_recognised(relay: FakeGateway) -> None:
    answer = ask(relay, [QUESTION])
    wish = {"from": answer["handoff"]["id"]}
    events = post(relay, [QUESTION, said(answer), NEXT], stream=True, handoff=wish).text
    assert '"resent_messages": 2' in events


DUMPED: Message = {
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": None,
    "reasoning": None,
    "name": None,
}
"""What SDKs add to an answer when they send it back as `model_dump()` wrote it."""


@pytest.mark.parametrize(
    "change",
    [
        DUMPED,
        {"annotations": [], "tool_calls": [], "parsed": {"a": 1}},
        {"content": "  11 11\n"},
        {"content": [{"type": "text", "text": "11 11"}]},
        {"reasoning_content": "a thought", "reasoning": "a thought"},
        {"name": "specialist"},
    ],
    ids=lambda change: "-".join(change)[:40],
)
def test_an_answer_is_recognised_however_it_is_written(relay: FakeGateway, change: Message) -> None:
    answer = ask(relay, [QUESTION])
    assert said(answer) == {"role": "assistant", "content": "11 11"}
    require_same_prompt(relay, answer["handoff"]["id"], [QUESTION, said(answer) | change], NEXT)


def test_a_message_in_one_text_part_is_its_text(relay: FakeGateway) -> None:
    answer = ask(relay, [QUESTION])
    parts = QUESTION | {"content": [text("11")], "name": None}
    require_same_prompt(relay, answer["handoff"]["id"], [parts, said(answer)], NEXT)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_is_recognised_though_its_tokens_read_otherwise(
    relay: FakeGateway, stream: bool
) -> None:
    """The context holds what the model wrote, the client what a parser made of it."""
    relay.engine("a").behaviour.parsed = {"content": None, "reasoning": "a thought", "tool_calls": [CALL]}
    left = streamed(relay, [QUESTION])[1] if stream else ask(relay, [QUESTION])["handoff"]["id"]
    relay.engine("a").behaviour.parsed = None
    arguments = CALL["function"] | {"arguments": '{"at":"bird"}'}  # type: ignore[operator]  # it is a dict
    for called in (CALL, CALL | {"function": arguments, "index": 0}):
        answer = {"role": "assistant", "content": "", "tool_calls": [called]}
        require_same_prompt(relay, left, [QUESTION, answer], RESULT)
    third = ask(relay, [QUESTION, answer, RESULT], **{"from": left})
    history = [QUESTION, answer, RESULT, said(third)]
    require_same_prompt(relay, third["handoff"]["id"], history, NEXT)


def test_images_that_are_sent_again_are_seen_once(relay: FakeGateway) -> None:
    asked = user(part(BIRD), "11")
    answer = ask(relay, [asked])
    again = require_same_prompt(relay, answer["handoff"]["id"], [asked, said(answer)], user("22", part(FISH)))
    assert again["handoff"]["images"] == 2
    other = ask(relay, [user(part(FISH), "11"), said(answer), NEXT], **{"from": answer["handoff"]["id"]})
    assert (other["handoff"]["images"], other["handoff"]["source"]["resent_messages"]) == (1, 0)


def test_a_context_without_an_answer_is_recognised(relay: FakeGateway) -> None:
    left = post(relay, [SYSTEM, QUESTION], "/v1/handoffs").json()["id"]
    answer: Message = {"role": "assistant", "content": "12"}
    require_same_prompt(relay, left, [SYSTEM, QUESTION], answer, NEXT)
    ask(relay, [SYSTEM, QUESTION], **{"from": left})
    prompt = relay.engine("a").transfers[-1].prompt
    assert prompt is not None
    assert prompt[-1] == token_id("<assistant>")
    assert prompt.count(token_id("<user>")) == 1, "nothing is new but that it is to be answered"


def test_a_context_is_computed_from_a_whole_conversation(relay: FakeGateway) -> None:
    answer = ask(relay, [QUESTION])
    left = answer["handoff"]["id"]
    told = []
    for messages in ([NEXT], [QUESTION, said(answer), NEXT]):
        made = post(relay, messages, "/v1/handoffs", **{"from": left}).json()
        told.append((made["tokens"], relay.engine("a").transfers[-1].prompt))
    assert told[0] == told[1]
    assert made["source"]["resent_messages"] == 2


def test_an_answer_that_is_not_left_behind_is_written_after_the_prompt(relay: FakeGateway) -> None:
    answer = ask(relay, [QUESTION], save={"scope": "prompt"})
    require_same_prompt(relay, answer["handoff"]["id"], [QUESTION], said(answer), NEXT)


def test_what_a_completion_added_to_an_answer_belongs_to_it(relay: FakeGateway) -> None:
    first = ask(relay, [QUESTION])
    with relay.client() as client:
        body = {"model": "a", "prompt": "5", "max_tokens": 1, "handoff": {"from": first["handoff"]["id"]}}
        body["handoff"]["save"] = True  # type: ignore[index]  # it is a dict
        left = client.post("/v1/completions", json=body).json()["handoff"]["id"]
    whole: Message = {"role": "assistant", "content": "11 11 5 11"}
    require_same_prompt(relay, left, [QUESTION, whole], NEXT)
    changed = ask(relay, [QUESTION, said(first), NEXT], **{"from": left})
    assert changed["handoff"]["source"]["resent_messages"] == 1


def test_another_gateway_recognises_a_history(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "handoffs": {"store": f"file:{tmp_path / 'store'}"},
        "engines": (EngineSettings(name="a", model="fake", handoff=True),),
    }
    with run_fake(FakeEngine("a", supports_handoffs=True), **settings) as first:
        first.engine("a").behaviour.parsed = {"content": None, "tool_calls": [CALL]}
        answer = ask(first, [QUESTION])
    with run_fake(FakeEngine("a", supports_handoffs=True), **settings) as second:
        require_same_prompt(second, answer["handoff"]["id"], [QUESTION, said(answer)], RESULT)


def refused(gateway: FakeGateway, left: str, messages: list[Message]) -> str:
    """The message of the refusal; nothing is computed."""
    asked = len(gateway.engine("a").transfers)
    response = post(gateway, messages, handoff={"from": left, "save": True})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "messages")
    assert len(gateway.engine("a").transfers) == asked
    found: str = error["message"]
    return found


A1: Message = {"role": "assistant", "content": "1 11"}
A2: Message = {"role": "assistant", "content": "1 11"}


def two_turns(gateway: FakeGateway) -> str:
    """A handoff of the messages SYSTEM, QUESTION, A1, NEXT and A2."""
    answer = ask(gateway, [SYSTEM, QUESTION])
    answer = ask(gateway, [NEXT], **{"from": answer["handoff"]["id"]})
    assert said(answer)["content"] == A2["content"]
    left: str = answer["handoff"]["id"]
    return left


@pytest.mark.parametrize(
    ("messages", "same"),
    [
        ([SYSTEM, QUESTION, A1 | {"content": "12"}, NEXT], 2),
        ([SYSTEM, QUESTION, NEXT], 2),
        ([SYSTEM, QUESTION, A1, NEXT | {"content": "23"}, A2, NEXT], 3),
        ([SYSTEM | {"content": "2"}, QUESTION, A1, NEXT, A2, NEXT], 0),
        ([QUESTION, A1, NEXT, A2, NEXT], 0),
        ([SYSTEM, QUESTION, A1, NEXT], 4),
        ([SYSTEM, QUESTION | {"content": "12"}, A1, NEXT, A2, NEXT], 1),
    ],
    ids=[
        "another answer",
        "no answer",
        "an earlier message",
        "another system message",
        "no system message",
        "without the last answer",
        "another first message",
    ],
)
def test_a_changed_history_is_a_whole_conversation(
    relay: FakeGateway, messages: list[Message], same: int
) -> None:
    """The prompt is what its messages say, once; KV is of use for what it shares with the handoff."""
    left = two_turns(relay)
    changed = ask(relay, messages, **{"from": left})
    transfer = relay.engine("a").transfers[-1]
    assert transfer.prompt == whole_prompt(messages)
    source = changed["handoff"]["source"]
    assert (source["id"], source["resent_messages"]) == (left, same)
    assert source["shared_tokens"] <= len(transfer.prompt or ())
    later = ask(relay, [*messages, said(changed), NEXT], **{"from": changed["handoff"]["id"]})
    assert later["handoff"]["source"]["resent_messages"] == len(messages) + 1


def whole_prompt(messages: list[Message]) -> list[int]:
    lines = [f"<{message['role']}> {message['content']} <end>" for message in messages]
    if messages[0]["role"] != "system":
        lines.insert(0, "<system> be kind <end>")
    return token_ids(" ".join([*lines, "<assistant>"]))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "0"}, NEXT, A2, {"role": "user", "content": "33"}],
        [A2, {"role": "user", "content": "33"}],
    ],
    ids=["an exchange behind another message", "its last answer only"],
)
def test_a_part_from_the_end_of_a_history_is_refused(relay: FakeGateway, messages: list[Message]) -> None:
    message = refused(relay, two_turns(relay), messages)
    assert "send only the new messages, or all 5 messages" in message
    assert "messages[0]" in message


@pytest.mark.parametrize(
    "messages",
    [
        [QUESTION],
        [SYSTEM, QUESTION],
        [SYSTEM, NEXT],
        [SYSTEM | {"content": "2"}, QUESTION],
        [NEXT, QUESTION],
        [NEXT, {"role": "assistant", "content": "12"}, QUESTION],
    ],
    ids=["the same question", "and system", "system", "another system", "later", "an example"],
)
def test_messages_that_are_no_history_are_new(relay: FakeGateway, messages: list[Message]) -> None:
    answer = ask(relay, [SYSTEM, QUESTION])
    later = ask(relay, messages, **{"from": answer["handoff"]["id"]})
    prompt = relay.engine("a").transfers[-1].prompt
    assert prompt is not None
    questions = sum(message["role"] == "user" for message in messages)
    assert prompt.count(token_id("<user>")) == questions, "the engine itself wrote the first one, as '1 11'"
    assert later["handoff"]["source"]["resent_messages"] == 0
