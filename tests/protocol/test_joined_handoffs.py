"""Several handoffs are continued as one context: the prompt is what all say, one after another, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, Held, run_fake

from baton.admission.api_keys import create_key
from baton.engines.fake.answers import token_ids
from baton.engines.fake.engine import FakeBehaviour, FakeEngine

CHAT, TEXT, AHEAD = "/v1/chat/completions", "/v1/completions", "/v1/handoffs"
STEP = 999


@pytest.fixture
def relay() -> Iterator[FakeGateway]:
    engines = (
        FakeEngine("a", supports_handoffs=True, placeholder=STEP),
        FakeEngine("other", supports_handoffs=True, weights="others"),
    )
    with run_fake(*engines, handoffs={"auto": "off"}) as gateway:
        yield gateway


def post(gateway: FakeGateway, body: dict[str, Any], path: str) -> httpx.Response:
    with gateway.client() as client:
        return client.post(path, json={"model": "a"} | body)


def text(gateway: FakeGateway, prompt: str, **save: Any) -> str:
    """The id of what a completion leaves: its prompt, and the prompt's first word again."""
    body = {"prompt": prompt, "max_tokens": 1, "handoff": {"save": save or True}}
    response = post(gateway, body, TEXT)
    assert response.status_code == 200, response.text
    return str(response.json()["handoff"]["id"])


def chat(gateway: FakeGateway, *said: str, system: str | None = None, **more: Any) -> str:
    """The id of what a chat leaves; the fake writes its prompt without a template, and repeats its words."""
    messages = [{"role": "user", "content": words} for words in said]
    messages[:0] = [{"role": "system", "content": system}] if system is not None else []
    response = post(gateway, {"messages": messages, "max_tokens": 2, "handoff": {"save": True}} | more, CHAT)
    assert response.status_code == 200, response.text
    return str(response.json()["handoff"]["id"])


def prompt_of(gateway: FakeGateway) -> list[int]:
    """The token ids that the engine was given last."""
    found: list[int] = next(
        body["prompt"] for body in gateway.engine("a").bodies[::-1] if isinstance(body.get("prompt"), list)
    )
    return found


def completed(gateway: FakeGateway, *ids: str, **options: Any) -> dict[str, Any]:
    body = {"prompt": "7", "max_tokens": 1, "handoff": {"from": list(ids)} | options}
    response = post(gateway, body, TEXT)
    assert response.status_code == 200, response.text
    shown: dict[str, Any] = response.json()["handoff"]
    return shown


QUESTION = [{"role": "user", "content": "22"}]
ASKED = token_ids("<end> <user> 22 <end> <assistant>")


def asked(gateway: FakeGateway, *ids: str, **options: Any) -> httpx.Response:
    return post(
        gateway, {"messages": QUESTION, "max_tokens": 2, "handoff": {"from": list(ids)} | options}, CHAT
    )


def test_texts_are_joined_behind_the_whole_context_that_all_begin_with(relay: FakeGateway) -> None:
    document = post(relay, {"prompt": "1 2"}, AHEAD).json()["id"]
    parts = document, text(relay, "1 2 9 8"), text(relay, "1 2 3 5")
    shown = completed(relay, *parts)
    assert prompt_of(relay) == [1, 2, *[9, 8, 1], *[3, 5, 1], 7]
    assert [(part["id"], part["tokens"]) for part in shown["source"]["parts"]] == list(
        zip(parts, (2, 3, 3), strict=True)
    )
    assert shown["source"]["id"] == parts[0]


def test_texts_are_not_cut_within_a_line(relay: FakeGateway) -> None:
    """Nor within a character, or between an image and what announces it."""
    completed(relay, text(relay, "1 2 3"), text(relay, "1 2 9"))
    assert prompt_of(relay) == [1, 2, 3, 1, 1, 2, 9, 1, 7]


def test_texts_that_share_nothing_follow_one_another(relay: FakeGateway) -> None:
    completed(relay, text(relay, "1 2"), text(relay, "3 4"))
    assert prompt_of(relay) == [1, 2, 1, 3, 4, 3, 7]


def test_one_handoff_in_a_list_is_one_handoff(relay: FakeGateway) -> None:
    shown = completed(relay, text(relay, "1 2"))
    assert prompt_of(relay) == [1, 2, 1, 7]
    assert "parts" not in shown["source"]


def test_in_any_order_the_longest_comes_first_and_the_others_as_given(relay: FakeGateway) -> None:
    parts = text(relay, "1 2"), text(relay, "3 4"), text(relay, "5 6 7 8")
    shown = completed(relay, *parts, order="any")
    assert prompt_of(relay) == [*[5, 6, 7, 8, 5], *[1, 2, 1], *[3, 4, 3], 7]
    assert shown["source"]["id"] == parts[2]


def test_what_is_saved_of_joined_contexts_names_them_all(relay: FakeGateway) -> None:
    parts = [text(relay, "1 2"), text(relay, "3 4")]
    shown = completed(relay, *parts, save=True)
    assert (shown["parent"], shown["parents"], shown["tokens"]) == (parts[0], parts, 8)
    with relay.client() as client:
        assert client.get(f"/v1/handoffs/{shown['id']}").json()["parents"] == parts


def test_chats_are_joined_turn_by_turn_with_their_answers(relay: FakeGateway) -> None:
    assert asked(relay, chat(relay, "11"), chat(relay, "33"), chat(relay, "44")).status_code == 200
    turns = [token_ids(f"<end> <user> {word} <end> <assistant> {word} {word}") for word in ("33", "44")]
    assert prompt_of(relay) == [11, 11, 11, *turns[0], *turns[1], *ASKED]


def test_messages_that_all_chats_begin_with_are_written_once(relay: FakeGateway) -> None:
    parts = [chat(relay, "11", words, system="5") for words in ("33", "44")]
    assert asked(relay, *parts).status_code == 200
    first = [5, 11, 33, 5, 11]  # as the engine wrote and answered it
    assert prompt_of(relay) == [*first, *token_ids("<end> <user> 44 <end> <assistant> 5 11"), *ASKED]


def test_several_answers_to_one_question_follow_one_another(relay: FakeGateway) -> None:
    assert asked(relay, chat(relay, "11"), chat(relay, "11", max_tokens=1)).status_code == 200
    assert prompt_of(relay) == [11, 11, 11, *token_ids("<end> <assistant> 11"), *ASKED]


def test_a_joined_chat_goes_on_as_a_chat(relay: FakeGateway) -> None:
    """Also if its client sends all of it again."""
    second = asked(relay, chat(relay, "11"), chat(relay, "33"), save=True).json()["handoff"]
    before = prompt_of(relay)
    more = {"role": "user", "content": "66"}
    again = [
        {"role": role, "content": content}
        for role, content in (
            ("user", "11"),
            ("assistant", "11 11"),
            ("user", "33"),
            ("assistant", "33 33"),
            ("user", "22"),
            ("assistant", "11 11"),
        )
    ]
    expected = [*before, *[11, 11], *token_ids("<end> <user> 66 <end> <assistant>")]
    for messages in ([more], [*again, more]):
        body = {"messages": messages, "max_tokens": 1, "handoff": {"from": second["id"]}}
        assert post(relay, body, CHAT).status_code == 200
        assert prompt_of(relay) == expected


def test_an_answer_that_ended_is_ended_once(relay: FakeGateway) -> None:
    """The template writes the end of a turn itself; the token that ended the answer gives way to it."""
    relay.engine("a").behaviour.ends_answers = True
    second = asked(relay, chat(relay, "11"), chat(relay, "33"), save=True).json()["handoff"]
    turns = [token_ids(f"<end> <user> {word} <end> <assistant>") for word in ("33", "22", "66")]
    assert prompt_of(relay) == [11, 11, *turns[0], 33, *turns[1]]
    assert asked(relay, second["id"]).status_code == 200
    ahead = post(relay, {"from": [chat(relay, "11"), chat(relay, "33")]}, AHEAD).json()["id"]
    assert asked(relay, ahead).status_code == 200
    assert prompt_of(relay) == [11, 11, *turns[0], 33, *turns[1]]


def test_the_parts_of_a_joined_chat_may_be_continued_as_their_client_received_them(
    relay: FakeGateway,
) -> None:
    """Fingerprints of the answers move with their messages."""
    first, second = chat(relay, "11"), chat(relay, "33", "44", system=None)
    joined = asked(relay, first, second, save=True).json()["handoff"]["id"]
    before = prompt_of(relay)
    history = [("user", "11"), ("assistant", "11 11"), ("user", "33"), ("user", "44"), ("assistant", "33 44")]
    messages = [{"role": role, "content": content, "annotations": []} for role, content in history]
    messages += [*QUESTION, {"role": "assistant", "content": "11 11"}, {"role": "user", "content": "66"}]
    body = {"messages": messages, "max_tokens": 1, "handoff": {"from": joined}}
    response = post(relay, body, CHAT)
    assert response.json()["handoff"]["source"]["resent_messages"] == len(messages) - 1
    assert prompt_of(relay) == [*before, 11, 11, *token_ids("<end> <user> 66 <end> <assistant>")]


def test_messages_that_hold_a_part_of_it_are_refused(relay: FakeGateway) -> None:
    """They would leave the other parts out."""
    parts = [chat(relay, "11"), chat(relay, "33")]
    own = [{"role": "user", "content": "11"}, {"role": "assistant", "content": "11 11"}, *QUESTION]
    body = {"messages": own, "max_tokens": 1, "handoff": {"from": parts}}
    assert error(post(relay, body, CHAT)) == (400, "invalid_request", "messages")


def test_a_chat_and_one_that_continues_it_are_not_doubled(relay: FakeGateway) -> None:
    first = chat(relay, "11")
    second = asked(relay, first, save=True).json()["handoff"]["id"]
    assert asked(relay, second, first).status_code == 200
    assert prompt_of(relay) == [11, 11, 11, *ASKED, 11, 11, *ASKED], "the second holds all of the first"
    assert error(asked(relay, first, second)) == (400, "invalid_request", "handoff.from[0]")


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_a_chat_that_another_part_continues_is_written_once_wherever_it_stands(
    relay: FakeGateway, order: tuple[int, ...]
) -> None:
    other, first = chat(relay, "33"), chat(relay, "11")
    parts = (other, first, asked(relay, first, save=True).json()["handoff"]["id"])
    shown = asked(relay, *(parts[index] for index in order), save=True).json()["handoff"]
    turns = [token_ids(f"<end> <user> {word} <end> <assistant> 11 11") for word in ("11", "22")]
    assert prompt_of(relay) == [33, 33, 33, *turns[0], *turns[1], *ASKED]
    sizes = {part["id"]: part["tokens"] for part in shown["source"]["parts"]}
    assert sizes[first] == 0


def test_different_answers_to_one_question_are_both_written_with_it(relay: FakeGateway) -> None:
    """Behind it each conversation went its own way."""
    parts = []
    for answer in ("5", "6"):
        messages = [
            {"role": "user", "content": "11"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"3{answer}"},
        ]
        body = {"messages": messages, "max_tokens": 1, "handoff": {"save": True}}
        parts.append(post(relay, body, CHAT).json()["handoff"]["id"])
    assert asked(relay, *parts).status_code == 200
    second = token_ids("<end> <user> 11 <end> <assistant> 6 <end> <user> 36 <end> <assistant> 11")
    assert prompt_of(relay) == [11, 5, 35, 11, *second, *ASKED]


def test_text_before_a_chat_s_messages_is_never_left_out(relay: FakeGateway) -> None:
    after_text = asked(relay, text(relay, "5 6"), save=True).json()["handoff"]["id"]
    plain = chat(relay, "11")
    assert error(asked(relay, plain, after_text)) == (400, "invalid_request", "handoff.from[1]")
    assert asked(relay, after_text, plain).status_code == 200
    assert prompt_of(relay)[:3] == [5, 6, 5]
    changed = [{"role": "user", "content": "22"}, {"role": "assistant", "content": "else"}, *QUESTION]
    body = {"messages": changed, "max_tokens": 1, "handoff": {"from": after_text}}
    assert error(post(relay, body, CHAT))[:2] == (400, "handoff_template_unsupported")


def test_a_template_that_forgets_answers_joins_none(relay: FakeGateway) -> None:
    parts = [chat(relay, "11"), chat(relay, "33")]
    relay.engine("a").behaviour.forgets_answers = True
    assert error(asked(relay, *parts)) == (400, "handoff_template_unsupported", "handoff.from[1]")


def test_a_completion_without_a_prompt_goes_on_in_the_last_answer(relay: FakeGateway) -> None:
    """What it says then belongs to that answer, as with one handoff."""
    parts = [chat(relay, "11"), chat(relay, "33")]
    body = {"max_tokens": 1, "handoff": {"from": parts, "save": True}}
    further = post(relay, body, TEXT).json()["handoff"]["id"]
    before = prompt_of(relay)
    assert asked(relay, further).status_code == 200
    assert prompt_of(relay) == [*before, 11, *ASKED]
    response = post(relay, {"max_tokens": 1, "handoff": {"from": parts}}, CHAT)
    assert error(response) == (400, "invalid_request", "messages")


def test_more_than_the_model_s_context_is_refused_before_anything_is_written(relay: FakeGateway) -> None:
    long = [text(relay, " ".join([str(number)] * 5000)) for number in (1, 2)]
    calls = len(relay.engine("a").bodies)
    body = {"prompt": "7", "max_tokens": 1, "handoff": {"from": long}}
    assert error(post(relay, body, TEXT)) == (400, "context_length_exceeded", "handoff.from[1]")
    assert len(relay.engine("a").bodies) == calls


def test_contexts_can_be_joined_ahead(relay: FakeGateway) -> None:
    texts, chats = [text(relay, "1 2"), text(relay, "3 4")], [chat(relay, "11"), chat(relay, "33")]
    response = post(relay, {"from": texts, "label": "both"}, AHEAD)
    joined = response.json()
    assert (response.status_code, joined["tokens"], joined["parents"]) == (201, 6, texts)
    completed(relay, joined["id"])
    assert prompt_of(relay) == [1, 2, 1, 3, 4, 3, 7]
    joined = post(relay, {"from": chats}, AHEAD).json()
    assert asked(relay, joined["id"]).status_code == 200
    assert prompt_of(relay) == [11, 11, 11, *token_ids("<end> <user> 33 <end> <assistant> 33 33"), *ASKED]


def test_contexts_are_joined_ahead_with_more_after_them(relay: FakeGateway) -> None:
    texts = [text(relay, "1 2"), text(relay, "3 4")]
    assert post(relay, {"from": texts, "prompt": [9]}, AHEAD).json()["tokens"] == 7
    assert prompt_of(relay) == [1, 2, 1, 3, 4, 3, 9]


def test_what_is_joined_ahead_waits_for_its_parts_and_its_reader_for_it() -> None:
    """It has its id at once, and is computed when the engine has nothing else to do."""
    held = Held()
    slow = FakeEngine("a", supports_handoffs=True, behaviour=FakeBehaviour(wait=held))
    with run_fake(slow, handoffs={"auto": "off", "wait_s": 0.3}) as gateway:
        first = text(gateway, "1 2")
        slow.behaviour.token_seconds = 60
        body = {"prompt": "3 4", "max_tokens": 6, "handoff": {"save": True}}
        with ThreadPoolExecutor(1) as others:
            running = others.submit(post, gateway, body, TEXT)
            pending = wait_for_another(gateway, first)
            ahead = post(gateway, {"from": [first, pending]}, AHEAD)
            assert (ahead.status_code, ahead.json()["state"]) == (202, "pending")
            assert ahead.json()["parents"] == [first, pending]
            reader = post(gateway, {"prompt": "7", "handoff": {"from": ahead.json()["id"]}}, TEXT)
            assert (reader.status_code, reader.json()["error"]["code"]) == (409, "handoff_pending")
            held.release()
            assert running.result().status_code == 200
        with gateway.client() as client:
            deadline = time.monotonic() + 20
            while (shown := client.get(f"{AHEAD}/{ahead.json()['id']}").json())["state"] == "pending":
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert (shown["state"], shown["tokens"]) == ("ready", 11)
        unknown = post(gateway, {"from": [first, "nobody's"]}, AHEAD)
        assert error(unknown) == (404, "handoff_not_found", "from[1]")


def test_joins_ahead_are_bounded_and_wait_for_an_idle_engine() -> None:
    """One is computed at a time; a deleted one never; no request's place is held meanwhile."""
    held = Held()
    busy = FakeEngine("a", supports_handoffs=True, behaviour=FakeBehaviour(wait=held))
    with run_fake(busy, handoffs={"auto": "off"}) as gateway, ThreadPoolExecutor(1) as others:
        parts = [text(gateway, "1 2"), text(gateway, "3 4")]
        busy.behaviour.token_seconds = 60
        running = others.submit(post, gateway, {"prompt": "8", "max_tokens": 3}, TEXT)
        while not busy.active:
            time.sleep(0.01)
        answers = [post(gateway, {"from": parts, "label": str(number)}, AHEAD) for number in range(33)]
        assert [answer.status_code for answer in answers] == [*[202] * 32, 429]
        assert "Retry-After" in answers[-1].headers
        joined = len([body for body in busy.bodies if body.get("prompt") == [1, 2, 1, 3, 4, 3]])
        assert (running.done(), joined) == (False, 0), "all are answered, and none is computed beside it"
        gone = answers[0].json()["id"]
        with gateway.client() as client:
            assert client.delete(f"{AHEAD}/{gone}").status_code == 204
            held.release()
            running.result()
            deadline = time.monotonic() + 60
            while any(each["state"] == "pending" for each in client.get(f"{AHEAD}?limit=100").json()["data"]):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert len([body for body in busy.bodies if body.get("prompt") == [1, 2, 1, 3, 4, 3]]) == 31


def test_what_cannot_be_joined_ahead_is_refused_at_once_also_while_a_part_is_pending(
    relay: FakeGateway,
) -> None:
    one, chatted = text(relay, "1 2"), chat(relay, "11")
    assert error(post(relay, {"from": [one, chatted]}, AHEAD))[0] == 400
    other = text(relay, "3")
    assert error(post(relay, {"from": [one, other], "latent_steps": 2}, AHEAD))[0] == 400
    relay.engine("other").behaviour = FakeBehaviour(token_seconds=60, wait=(held := Held()))
    with ThreadPoolExecutor(1) as others:
        body = {"model": "other", "prompt": "5", "max_tokens": 4, "handoff": {"save": True}}
        running = others.submit(post, relay, body, TEXT)
        with relay.client() as client:
            known = {one, other, chatted}
            while not (new := {each["id"] for each in client.get(AHEAD).json()["data"]} - known):
                time.sleep(0.02)
        refused = [post(relay, {"from": [one, each]}, AHEAD) for each in new]
        assert not running.done()
        held.release()
        running.result()
    assert [error(each) for each in refused] == [(409, "handoff_incompatible", "from[1]")]


def test_why_a_join_failed_is_told() -> None:
    held = Held()
    slow = FakeEngine("a", supports_handoffs=True, behaviour=FakeBehaviour(wait=held))
    with run_fake(slow, handoffs={"auto": "off"}) as gateway, ThreadPoolExecutor(1) as others:
        first = text(gateway, "1 2")
        slow.behaviour.token_seconds = 60
        body = {"prompt": "3 4", "max_tokens": 6, "handoff": {"save": True}}
        running = others.submit(post, gateway, body, TEXT)
        ahead = post(gateway, {"from": [first, wait_for_another(gateway, first)]}, AHEAD).json()["id"]
        with gateway.client() as client:
            client.delete(f"{AHEAD}/{first}").raise_for_status()
            held.release()
            running.result()
            deadline = time.monotonic() + 20
            while (shown := client.get(f"{AHEAD}/{ahead}").json())["state"] == "pending":
                assert time.monotonic() < deadline
                time.sleep(0.05)
    assert (shown["state"], shown["error"][:9]) == ("failed", "from[0]: "), "it names the part"


def wait_for_another(gateway: FakeGateway, known: str) -> str:
    """The id of the handoff that another request is about to save."""
    with gateway.client() as client:
        for _ in range(1000):
            ids = [each["id"] for each in client.get(AHEAD).json()["data"] if each["id"] != known]
            if ids:
                return str(ids[0])
            time.sleep(0.02)
    raise AssertionError("no other handoff")


def test_what_cannot_be_told_or_had_with_moved_kv_is_refused(relay: FakeGateway) -> None:
    left = text(relay, "1 2")
    record = relay.app.state.gateway.library.index.known(left)
    vars(record)["exact"] = False  # as after a join that moved KV
    with relay.client() as client:
        assert client.get(f"{AHEAD}/{left}").json()["exact"] is False
    said = {"messages": QUESTION, "max_tokens": 1, "handoff": {"from": left}}
    assert error(post(relay, said | {"stream": True}, "/v1/messages"))[2] == "stream"
    assert post(relay, said, "/v1/messages").status_code == 200
    asked_for: list[tuple[dict[str, Any], str]] = [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"handoff": {"from": left, "save": {"latent_steps": 2}}}, "latent_steps"),
    ]
    for more, named in asked_for:
        body = {"prompt": "7", "max_tokens": 1, "handoff": {"from": left}} | more
        assert error(post(relay, body, TEXT)) == (400, "invalid_request", named)
    assert relay.engine("a").transfers[-1].salt is not None, "its prefix cache is its own"


def test_kv_is_moved_only_where_an_engine_can(relay: FakeGateway) -> None:
    parts = [text(relay, "1 2"), text(relay, "3 4")]
    shown = completed(relay, *parts, join="moved", save=True)
    assert prompt_of(relay) == [1, 2, 1, 3, 4, 3, 7], "the prompt is that of an exact join"
    assert (shown["exact"], shown["source"]["exact"]) == (True, True), "without stored KV nothing is moved"
    body = {"prompt": "7", "prompt_logprobs": 1, "handoff": {"from": parts, "join": "moved"}}
    assert error(post(relay, body, TEXT)) == (400, "invalid_request", "prompt_logprobs")
    relay.engine("a").moves_unsupported = "it has windows"
    refused = post(relay, {"prompt": "7", "handoff": {"from": parts, "join": "moved"}}, TEXT)
    assert error(refused) == (400, "operation_unsupported", "handoff.join")
    assert "it has windows" in refused.json()["error"]["message"]
    assert error(post(relay, {"from": parts, "join": "moved"}, AHEAD))[2] == "join"
    one = completed(relay, parts[0], join="moved")
    assert one["source"]["exact"], "of one handoff nothing is moved"


def error(response: httpx.Response) -> tuple[int, str, str | None]:
    found = response.json()["error"]
    return response.status_code, found["code"], found["param"]


def test_a_part_that_cannot_be_joined_is_named(relay: FakeGateway) -> None:
    one, other = text(relay, "1 2"), chat(relay, "11")
    assert error(asked(relay, other, one)) == (400, "invalid_request", "handoff.from[1]")
    assert error(asked(relay, other, chat(relay, "33", system="5"))) == (
        400,
        "invalid_request",
        "handoff.from[1]",
    )
    assert error(asked(relay, *(chat(relay, "3", system=words) for words in ("5", "5", "6")))) == (
        400,
        "invalid_request",
        "handoff.from[2]",
    )
    assert error(asked(relay, chat(relay, "3", system="5"), other)) == (
        400,
        "invalid_request",
        "handoff.from[1]",
    )
    asked_alone = chat(relay, "1", handoff={"save": {"scope": "prompt"}})
    torn = {"prompt": "5", "max_tokens": 1, "handoff": {"from": asked_alone, "save": True}}
    ended = post(relay, torn, TEXT).json()["handoff"]["id"]
    assert error(asked(relay, other, ended)) == (400, "invalid_request", "handoff.from[1]")


def test_a_thought_is_computed_behind_its_own_context_alone(relay: FakeGateway) -> None:
    one, thought = text(relay, "1 2"), text(relay, "3 4", latent_steps=2)
    body = {"prompt": "7", "max_tokens": 1, "handoff": {"from": [one, thought]}}
    assert error(post(relay, body, TEXT)) == (400, "invalid_request", "handoff.from[1]")
    ahead = {"from": [chat(relay, "1"), chat(relay, "2")], "latent_steps": 2}
    assert error(post(relay, ahead, AHEAD)) == (400, "invalid_request", "latent_steps")
    longer = text(relay, "1 2 3 4 5 6 7 8 9")
    completed(relay, longer, thought, order="any")
    assert prompt_of(relay)[:4] == [3, 4, STEP, STEP]
    completed(relay, thought, one)
    assert prompt_of(relay) == [3, 4, STEP, STEP, 3, 1, 2, 1, 7]


def test_parts_that_are_missing_or_of_others_are_named(relay: FakeGateway) -> None:
    one = text(relay, "1 2")
    body = {"prompt": "7", "max_tokens": 1}
    assert error(post(relay, body | {"handoff": {"from": [one, "gone"]}}, TEXT)) == (
        404,
        "handoff_not_found",
        "handoff.from[1]",
    )
    foreign = {"model": "other", "prompt": "3 4", "max_tokens": 1, "handoff": {"save": True}}
    other = post(relay, foreign, TEXT).json()["handoff"]["id"]
    assert error(post(relay, body | {"handoff": {"from": [one, other]}}, TEXT)) == (
        409,
        "handoff_incompatible",
        "handoff.from[1]",
    )


def test_another_tenant_s_part_is_not_found(tmp_path: Any) -> None:
    keys = {tenant: create_key(tmp_path / "keys.json", tenant) for tenant in ("acme", "globex")}
    engine = FakeEngine("a", supports_handoffs=True)
    with run_fake(engine, auth={"keys_file": tmp_path / "keys.json"}) as gateway:

        def ask(tenant: str, handoff: dict[str, Any]) -> httpx.Response:
            headers = {"Authorization": f"Bearer {keys[tenant]}"}
            body = {"model": "a", "prompt": "1 2", "max_tokens": 1, "handoff": handoff}
            with gateway.client() as client:
                return client.post(TEXT, json=body, headers=headers)

        mine, theirs = (ask(tenant, {"save": True}).json()["handoff"]["id"] for tenant in keys)
        found = error(ask("acme", {"from": [mine, theirs]}))
        assert found == (404, "handoff_not_found", "handoff.from[1]")


@pytest.mark.parametrize(
    ("handoff", "message"),
    [
        ({"from": []}, "handoff.from: there are 0 handoffs; name 1 to 16"),
        ({"from": [f"id-{number}" for number in range(17)]}, "handoff.from: there are 17 handoffs"),
        ({"from": ["one", "two", "one"]}, "handoff.from: [2] repeats [0]; name each handoff once"),
        ({"from": ["one", 2]}, "handoff.from.1: Input should be a valid string"),
        ({"from": ["one", "x" * 65]}, "handoff.from.1: String should have at most 64 characters"),
        ({"from": ["one", "two"], "join": "blend"}, "handoff.join: Input should be 'exact' or 'moved'"),
        ({"from": ["one", "two"], "order": "best"}, "handoff.order: Input should be 'given' or 'any'"),
    ],
)
def test_a_list_that_cannot_be_is_refused_before_anything_is_looked_up(
    relay: FakeGateway, handoff: dict[str, Any], message: str
) -> None:
    response = post(relay, {"prompt": "7", "handoff": handoff}, TEXT)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message), response.text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_apis_whose_prompt_is_what_they_say_join_nothing(relay: FakeGateway, path: str) -> None:
    parts = [text(relay, "1 2"), text(relay, "3 4")]
    body = {"messages": QUESTION, "input": "22", "max_tokens": 2, "handoff": {"from": parts}}
    assert error(post(relay, body, path)) == (400, "invalid_request", "handoff.from")
