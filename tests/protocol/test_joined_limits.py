"""What joins hold to: exact KV alone unless the client wants moved KV, their model's limits, orders that can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake
from support.random_images import part, picture, user

from baton.engines.backend import ImageInput, Json, Operation, Reply
from baton.engines.fake.answers import IMAGE, MAX_MODEL_LEN, token_id, token_ids
from baton.engines.fake.engine import FakeEngine
from baton.errors import BatonError, EngineOverloaded, GenerationFailed
from baton.library.handoff import Handoff

CHAT, TEXT, AHEAD = "/v1/chat/completions", "/v1/completions", "/v1/handoffs"
STEP = 999
ASKED = token_ids("<end> <user> 22 <end> <assistant>")
SEES = ImageInput(limit=2, tokens=frozenset({token_id(IMAGE)}), texts=(IMAGE,))


@pytest.fixture
def relay() -> Iterator[FakeGateway]:
    engine = FakeEngine("a", supports_handoffs=True, placeholder=STEP, images=SEES)
    with run_fake(engine, handoffs={"auto": "off"}) as gateway:
        yield gateway


def post(gateway: FakeGateway, path: str, **body: Any) -> httpx.Response:
    with gateway.client() as client:
        return client.post(path, json={"model": "a"} | body)


def made(gateway: FakeGateway, **body: Any) -> str:
    """The id of a context that is computed without an answer."""
    response = post(gateway, AHEAD, **body)
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


def chat(gateway: FakeGateway, *messages: Any, **handoff: Any) -> str:
    """The id of what a chat leaves."""
    written = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    response = post(gateway, CHAT, messages=written, max_tokens=2, handoff={"save": True} | handoff)
    assert response.status_code == 200, response.text
    return str(response.json()["handoff"]["id"])


def asked(gateway: FakeGateway, *ids: str, path: str = CHAT, **options: Any) -> httpx.Response:
    body = {"prompt": "7"} if path == TEXT else {"messages": [{"role": "user", "content": "22"}]}
    return post(gateway, path, max_tokens=1, handoff={"from": list(ids)} | options, **body)


def turns(*said: str) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turns."""
    roles = ("user", "assistant") * len(said)
    return [{"role": role, "content": content} for role, content in zip(roles, said, strict=False)]


def answered(gateway: FakeGateway, tokens: int) -> str:
    """The id of a chat with one question, and an answer of so many tokens."""
    body = {"messages": [{"role": "user", "content": "11"}], "max_tokens": tokens, "handoff": {"save": True}}
    return str(post(gateway, CHAT, **body).json()["handoff"]["id"])


def record_of(gateway: FakeGateway, left: str) -> Handoff:
    record = gateway.app.state.gateway.library.index.known(left)
    assert isinstance(record, Handoff)
    return record


def refused(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, response.json()["error"]["param"]


def test_an_exact_join_loads_no_moved_kv_and_is_exact(relay: FakeGateway) -> None:
    """Alone such a handoff is continued from its KV; of several nothing of it is loaded."""
    blended, other = made(relay, prompt=[1, 2]), made(relay, prompt=[3, 4])
    vars(record_of(relay, blended))["exact"] = False
    alone = asked(relay, blended, path=TEXT)
    assert alone.status_code == 200
    assert relay.engine("a").transfers[-1].salt is not None
    joined = asked(relay, blended, other, path=TEXT, save=True).json()["handoff"]
    transfer = relay.engine("a").transfers[-1]
    assert (transfer.salt, transfer.load) == (None, None)
    assert (joined["exact"], joined["source"]["exact"], joined["source"]["outcome"]) == (
        True,
        True,
        "recomputed",
    )
    body = {"prompt": "7", "max_tokens": 1, "prompt_logprobs": 1, "handoff": {"from": [blended, other]}}
    assert post(relay, TEXT, **body).status_code == 200, "it is as exact as without a handoff"
    moved = asked(relay, blended, other, path=TEXT, join="moved")
    assert moved.status_code == 200
    assert relay.engine("a").transfers[-1].salt is not None


def test_in_any_order_kv_that_may_not_be_loaded_saves_nothing(relay: FakeGateway) -> None:
    long, short = made(relay, prompt=[1, 2, 3, 4, 5]), made(relay, prompt=[8, 9])
    for each in (long, short):
        record_of(relay, each).bytes = 100  # as if it were stored
    assert asked(relay, short, long, path=TEXT, order="any").json()["handoff"]["source"]["id"] == long
    vars(record_of(relay, long))["exact"] = False
    assert asked(relay, short, long, path=TEXT, order="any").json()["handoff"]["source"]["id"] == short
    moved = asked(relay, short, long, path=TEXT, order="any", join="moved").json()["handoff"]
    assert moved["source"]["id"] == long


def test_in_any_order_a_chat_that_another_one_continues_is_not_the_first(relay: FakeGateway) -> None:
    """It would be refused there, whatever its KV saves."""
    first = chat(relay, "11 " * 50)
    second, other = chat(relay, "22", **{"from": first}), chat(relay, "33")
    record_of(relay, first).bytes = 10**6
    assert refused(asked(relay, first, second, other)) == (400, "handoff.from[0]")
    found = asked(relay, first, second, other, order="any")
    assert found.status_code == 200, found.text
    assert found.json()["handoff"]["source"]["id"] == second


def test_the_token_of_an_answer_must_fit_behind_what_is_joined(relay: FakeGateway) -> None:
    one, two, full = (
        made(relay, prompt=[number] * count) for number, count in ((1, 9), (2, MAX_MODEL_LEN - 10), (3, 1))
    )
    assert asked(relay, one, two, path=TEXT).status_code == 400, "nor does its own prompt fit"
    body = {"max_tokens": 1, "handoff": {"from": [one, two]}}
    assert post(relay, TEXT, **body).status_code == 200
    assert refused(asked(relay, one, two, full, path=TEXT)) == (400, "handoff.from[2]")


def test_a_joined_chat_that_is_too_long_is_refused_by_the_part_that_passes_the_end(
    relay: FakeGateway,
) -> None:
    """What the template writes between chats counts: that is known once it is written."""
    half = "11 " * (MAX_MODEL_LEN // 2 - 4)
    parts = chat(relay, half), chat(relay, half.replace("11", "33")), chat(relay, "44")
    calls = len(relay.engine("a").transfers)
    found = asked(relay, *parts)
    assert refused(found) == (400, "handoff.from[1]"), found.text
    assert found.json()["error"]["code"] == "context_length_exceeded"
    assert len(relay.engine("a").transfers) == calls, "the engine was not asked for it"


def test_images_that_all_parts_begin_with_count_once(relay: FakeGateway) -> None:
    look = user(part(picture(1, 5)), "11")
    parts = [chat(relay, look, user(words)) for words in ("33", "44", "55")]
    found = asked(relay, *parts)
    assert found.status_code == 200, found.text
    assert len(relay.engine("a").transfers[-1].images) == 1


def test_too_many_images_are_refused_by_the_part_that_brings_them(relay: FakeGateway) -> None:
    looks = [user(part(picture(number, 5)), "11") for number in (1, 2, 3)]
    parts = [chat(relay, look) for look in looks]
    assert refused(asked(relay, *parts)) == (400, "handoff.from[2]")
    again = [chat(relay, user(words), looks[0]) for words in ("33", "44", "55")]
    found = asked(relay, *again, chat(relay, "66"))
    assert refused(found) == (400, "handoff.from[2]"), "each has its own place in the context"


def test_the_bytes_of_one_image_count_once_however_many_parts_hold_it() -> None:
    engine, image = FakeEngine("a", supports_handoffs=True, images=SEES), picture(1, 30)
    size = 2 * len(image.data)
    assert size > 1024
    with run_fake(engine, handoffs={"auto": "off", "image_bytes": size}) as gateway:
        parts = [chat(gateway, user(part(image), "11"), user(words)) for words in ("33", "44", "55", "66")]
        found = asked(gateway, *parts)
        assert found.status_code == 200, found.text


def test_a_question_is_repeated_where_the_template_takes_one_answer_to_each(relay: FakeGateway) -> None:
    parts = [answered(relay, tokens) for tokens in (1, 2, 3)]
    relay.engine("a").behaviour.alternates = True
    found = asked(relay, *parts)
    assert found.status_code == 200, found.text
    prompt = relay.engine("a").transfers[-1].prompt
    turns = [token_ids(f"<end> <user> 11 <end> <assistant> {'11 ' * index}") for index in (2, 3)]
    assert prompt == [11, 11, *turns[0], *turns[1], *token_ids("<end> <user> 22 <end> <assistant>")]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_answer_stands_behind_its_own_question(relay: FakeGateway, order: tuple[int, ...]) -> None:
    """Where another conversation went on from that question, it is written again, whatever the template takes."""
    parts = [chat(relay, *turns("11", "5", "33")), answered(relay, 1)]
    assert asked(relay, *(parts[index] for index in order)).status_code == 200
    prompt = relay.engine("a").transfers[-1].prompt
    assert prompt is not None
    question = token_ids("<user> 11 <end> <assistant>")
    if order == (0, 1):
        assert prompt[-len(ASKED) - len(question) - 1 :] == [*question, 11, *ASKED]
    places = [at for at in range(len(prompt)) if prompt[at : at + len(question)] == question]
    assert len(places) == 1, "the fake writes a first chat without a template, and the question once more"


def test_an_answer_between_others_conversations_stands_behind_its_own_question(relay: FakeGateway) -> None:
    parts = [answered(relay, 1), chat(relay, *turns("11", "5", "33")), answered(relay, 3)]
    assert asked(relay, *parts).status_code == 200
    prompt = relay.engine("a").transfers[-1].prompt
    last = token_ids("<end> <user> 11 <end> <assistant> 11 11 11")
    assert prompt is not None
    assert prompt[-len(last) - len(ASKED) :] == [*last, *ASKED]


def test_in_any_order_what_must_be_first_is_joined_ahead_too(relay: FakeGateway) -> None:
    plain, thought = made(relay, prompt=[1, 2]), made(relay, prompt=[3, 4], latent_steps=2)
    assert refused(post(relay, AHEAD, **{"from": [plain, thought]})) == (400, "from[1]")
    joined = post(relay, AHEAD, **{"from": [plain, thought], "order": "any"})
    assert (joined.status_code, joined.json()["parents"]) == (201, [thought, plain])


def test_of_a_chat_that_another_one_continues_nothing_is_counted(relay: FakeGateway) -> None:
    """Neither its tokens, nor that it can be the first alone."""
    first = chat(relay, "11 " * (MAX_MODEL_LEN // 3))
    second = chat(relay, "22", **{"from": first})
    other = chat(relay, "33 " * (MAX_MODEL_LEN // 3))
    found = asked(relay, other, first, second)
    assert found.status_code == 200, found.text
    begins = chat(relay, "5", **{"from": made(relay, prompt=[1, 2])})
    goes_on = chat(relay, "6", **{"from": begins})
    assert asked(relay, goes_on, begins).status_code == 200
    assert refused(asked(relay, chat(relay, "44"), goes_on)) == (400, "handoff.from[1]")


def test_the_part_that_alone_is_too_long_is_named(relay: FakeGateway) -> None:
    long, short = made(relay, prompt=[1] * (MAX_MODEL_LEN - 1)), made(relay, prompt=[2])
    assert refused(asked(relay, long, short, path=TEXT)) == (400, "handoff.from[1]")
    record_of(relay, long).tokens.extend([1])  # as if a model with a longer context had computed it
    assert refused(asked(relay, long, short, path=TEXT)) == (400, "handoff.from[0]")


def failing(engine: FakeEngine, errors: Sequence[BatonError], monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    """Let an engine fail so many completions; returns the bodies of all that it is asked for."""
    call, left, asked_for = engine.call, list(errors), list[Json]()

    async def fails(operation: Operation, body: Json, *more: Any) -> Reply:
        if operation is Operation.COMPLETIONS:
            asked_for.append(body)
            if left:
                raise left.pop(0)
        return await call(operation, body, *more)

    monkeypatch.setattr(engine, "call", fails)
    return asked_for


def test_a_join_ahead_that_finds_the_engine_full_is_tried_again(
    relay: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.relay.ahead.RETRY_AFTER_S", 0.1)
    parts = [made(relay, prompt=[1, 2]), made(relay, prompt=[3, 4])]
    tries = failing(relay.engine("a"), [EngineOverloaded(), EngineOverloaded()], monkeypatch)
    ahead = post(relay, AHEAD, **{"from": parts})
    assert (ahead.status_code, ahead.json()["state"], len(tries)) == (201, "ready", 3), ahead.text


def test_why_the_engine_failed_a_join_ahead_is_told(
    relay: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [made(relay, prompt=[1, 2]), made(relay, prompt=[3, 4])]
    tries = failing(relay.engine("a"), [GenerationFailed("It ran out of luck.")], monkeypatch)
    failed = post(relay, AHEAD, **{"from": parts})
    assert (failed.status_code, len(tries)) == (500, 1)
    with relay.client() as client:
        (shown,) = [each for each in client.get(AHEAD).json()["data"] if each["state"] == "failed"]
    assert shown["error"] == "It ran out of luck."
