"""Handoffs of contexts with images on real engines: what B says is what a model says that sees everything anew.

The reference is HuggingFace's model in fp32, given the token ids and pixels that B's prompt is said to be.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
from support.gateways import RealGateway
from support.image_relays import CHAT, TEXT, Answer, Eyes, Seer
from support.random_images import part, picture, user

from baton.images.image import ClientImage

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
ENGINES = ("reader", "writer")
WORDS = [
    "a",
    "red",
    "square",
    "left",
    "of",
    "two",
    "blue",
    "circles",
    "on",
    "a",
    "green",
    "field",
    "with",
    "water,",
    "roads",
    "and",
    "clouds",
]


@pytest.fixture(scope="module")
def eyes(vision_gateway: RealGateway) -> Eyes:
    folder = vision_gateway.output.parent
    return Eyes(vision_gateway, Seer(folder / "model"), folder / "store")


class Cases:
    """Made-up contexts: no picture and no text twice."""

    def __init__(self) -> None:
        self._number = 0

    def picture(self, chance: random.Random) -> ClientImage:
        self._number += 1
        return picture(self._number, chance.choice([8, 24, 30, 61]), chance.choice([8, 30, 47]))

    def message(self, chance: random.Random, images: int) -> tuple[dict[str, Any], list[ClientImage]]:
        """Make a user's message of words with so many pictures at random places."""
        pictures = [self.picture(chance) for _ in range(images)]
        parts: list[Any] = [part(each) for each in pictures]
        for _ in range(chance.randint(1, 3)):
            words = " ".join(chance.choices(WORDS, k=chance.randint(1, 12)))
            parts.insert(chance.randint(0, len(parts)), f" {words} {self._number}")
        return user(*parts), pictures


CASES = Cases()


@dataclass(frozen=True)
class Case:
    """One relay from A to B.

    Attributes:
        number: its seed.
        first: images in what A is asked.
        then: images in what B is asked.
        how: A answers (`chat`), answers and leaves its prompt alone (`prompt`), or only computes (`compute`).
        goes_on: B is asked in a chat, or as plain text.
        to: B's engine; A's is the first.
        stream: B's answer is streamed.
        evicted: A's KV is gone by then.
        chain: requests between A and B, each with an image of its own.
    """

    number: int
    first: int
    then: int
    how: str
    goes_on: str
    to: str
    stream: bool
    evicted: bool
    chain: int


def cases(count: int) -> list[Case]:
    chance = random.Random(8)
    made = []
    for number in range(count):
        goes_on = chance.choice(["chat", "chat", "text"])
        first = chance.choice([1, 1, 2, 3])
        then = 0 if goes_on == "text" else chance.choice([0, 1, 2])
        if number % 5 == 0:  # A hands over words alone, and B shows something
            first, goes_on, then = 0, "chat", max(1, then)
        how = chance.choice(["chat", "chat", "prompt", "compute"])
        evicted, chain = chance.random() < 0.25, chance.choice([0, 0, 0, 1, 2])
        made.append(
            Case(number, first, then, how, goes_on, chance.choice(ENGINES), number % 3 == 0, evicted, chain)
        )
    return made


def name_of(case: Case) -> str:
    ways = [str(case.number), case.how, f"{case.first}+{case.then}", case.goes_on, case.to]
    ways += ["stream"] * case.stream + ["evicted"] * case.evicted + [f"chain{case.chain}"] * bool(case.chain)
    return "-".join(ways)


EACH = [
    pytest.param(case, marks=[pytest.mark.chaos] if case.number >= 12 else [], id=name_of(case))
    for case in cases(63)
]
"""Fifty of them hand over images. Most run with `make chaos`."""


@pytest.mark.parametrize("case", EACH)
def test_b_says_what_a_model_says_that_sees_everything_anew(eyes: Eyes, case: Case) -> None:
    chance = random.Random(case.number)
    message, seen = CASES.message(chance, case.first)
    if case.how == "compute":
        left = eyes.compute("reader", {"messages": [message]})["id"]
    else:
        scope = "prompt" if case.how == "prompt" else "context"
        first = eyes.ask("reader", {"messages": [message], "handoff": {"save": {"scope": scope}}})
        assert first.said == eyes.seer.says(first.prompt, seen)
        left = first.left
    for _ in range(case.chain):
        message, more = CASES.message(chance, 1)
        seen = seen + more
        between = eyes.ask("reader", {"messages": [message], "handoff": {"from": left, "save": True}})
        assert between.said == eyes.seer.says(between.prompt, seen)
        left = between.left
    if case.evicted:
        eyes.forget_kv(left)
    before = eyes.encoded(case.to)
    wish = {"handoff": {"from": left}, "stream": case.stream}
    if case.goes_on == "text":
        own: list[ClientImage] = []
        answer = eyes.ask(case.to, wish | {"prompt": f" and {chance.choice(WORDS)}"}, TEXT)
    else:
        message, own = CASES.message(chance, case.then)
        answer = eyes.ask(case.to, wish | {"messages": [message]})
    assert answer.said == eyes.seer.says(answer.prompt, seen + own)
    _require_encoded(eyes, case, answer, before, len(seen), len(own))


def _require_encoded(eyes: Eyes, case: Case, answer: Answer, before: int, seen: int, own: int) -> None:
    """Where KV was used, the encoder has run for B's own images alone."""
    source = answer.source
    if not case.evicted:
        assert source["outcome"] in ("loaded", "resident")
        eyes.encodes(case.to, before, own)
        return
    assert (source["outcome"], source["reason"]) == ("recomputed", "kv_gone")
    if case.to == "writer":  # which has met none of them yet
        eyes.encodes("writer", before, seen + own)
    else:  # its encoder keeps some of A's
        assert own <= eyes.encoded("reader") - before <= seen + own


def test_many_go_on_from_one_picture_and_it_is_encoded_once(eyes: Eyes) -> None:
    chance = random.Random(1)
    message, seen = CASES.message(chance, 1)
    before = {name: eyes.encoded(name) for name in ENGINES}
    left = eyes.ask("reader", {"messages": [message], "handoff": {"save": True}}).left
    for question in ("what is where?", "a red square?", "and the water?"):
        for model in ENGINES:
            answer = eyes.ask(model, {"messages": [user(question)], "handoff": {"from": left}})
            assert answer.said == eyes.seer.says(answer.prompt, seen)
    eyes.encodes("reader", before["reader"], 1)
    eyes.encodes("writer", before["writer"], 0)


def test_the_same_words_about_another_picture_are_another_handoff(eyes: Eyes) -> None:
    """Token ids and places are equal; what is kept of them is not, and each answers about its own picture."""
    one, other = picture(5001, 30, 30), picture(5002, 30, 30)
    left = eyes.compute("reader", {"messages": [user(part(one), " what is where?")]})["id"]
    whole = eyes.compute("reader", {"messages": [user(part(other), " what is where?")]})["id"]
    record = eyes.store / "records" / f"{whole}.json"
    entries = {path.stem: path for path in (eyes.store / "entries").rglob("*.kv")}
    assert (
        json.loads(record.read_text())["tokens"]
        == json.loads((eyes.store / "records" / f"{left}.json").read_text())["tokens"]
    )
    assert entries[left].read_bytes() != entries[whole].read_bytes()
    answers = {}
    for handoff, pictures in ((left, [one]), (whole, [other])):
        answer = eyes.ask("writer", {"messages": [user("a field?")], "handoff": {"from": handoff}})
        assert answer.said == eyes.seer.says(answer.prompt, pictures)
        answers[handoff] = answer
    assert answers[left].prompt == answers[whole].prompt
    assert answers[left].said != answers[whole].said, "the pictures matter to this model"
    again = eyes.ask("writer", {"messages": [user("a field?")], "handoff": {"from": left}})
    assert again.said == answers[left].said


def test_a_picture_that_is_sent_again_starts_from_stored_kv_by_itself_and_another_one_does_not(
    eyes: Eyes,
) -> None:
    """A client that knows nothing of handoffs; the prompts' token ids are equal but for the last words."""
    one, other = picture(5301, 30, 30), picture(5302, 30, 30)
    rules = " ".join(f"{word} {number}" for number, word in enumerate(WORDS))

    def talk(shown: ClientImage, *more: Any) -> dict[str, Any]:
        return {"messages": [user(rules, part(shown), " what is where? " + rules), *more]}

    before = eyes.automatic
    eyes.ask("reader", talk(one))
    eyes.saved_by_itself(before)
    further = ({"role": "assistant", "content": "two circles"}, user("a field?"))
    encoded = eyes.encoded("reader")
    again = eyes.ask("reader", talk(one, *further))
    eyes.encodes("reader", encoded, 0)
    image = again.prompt.index(eyes.seer.image_token)
    assert again.cached > again.prompt.index(again.prompt[-1], image), "the picture's KV and what follows it"
    assert again.said == eyes.seer.says(again.prompt, [one])
    swapped = eyes.ask("reader", talk(other, *further))
    eyes.encodes("reader", encoded, 1)
    assert swapped.prompt == again.prompt
    assert swapped.cached <= image, "from there on it is another picture's"
    assert swapped.said == eyes.seer.says(swapped.prompt, [other])
    assert swapped.said != again.said, "the pictures matter to this model"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_the_routes_that_show_a_picture_again_start_from_its_kv_and_not_from_another_s(
    eyes: Eyes, path: str
) -> None:
    def asked(shown: ClientImage, **wish: Any) -> dict[str, Any]:
        if path == "/v1/responses":
            image: dict[str, Any] = {"type": "input_image", "image_url": shown.url, "detail": "auto"}
            content = [
                {"type": "input_text", "text": "what"},
                image,
                {"type": "input_text", "text": "is where?"},
            ]
            body: dict[str, Any] = {"input": [user(*content)], "max_output_tokens": 4}
        else:
            source = {"type": "base64", "media_type": shown.media_type, "data": shown.base64}
            body = {
                "messages": [user("what", {"type": "image", "source": source}, "is where?")],
                "max_tokens": 4,
            }
        with eyes.gateway.client() as client:
            response = client.post(path, json={"model": "reader", "temperature": 0, "handoff": wish} | body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()["handoff"]
        return found

    one, other = picture(5401, 30, 30), picture(5402, 30, 30)
    left = asked(one, save=True)["id"]
    before = eyes.encoded("reader")
    again = asked(one, **{"from": left})["source"]
    eyes.encodes("reader", before, 0)
    assert again["outcome"] in ("loaded", "resident")
    swapped = asked(other, **{"from": left})["source"]
    eyes.encodes("reader", before, 1)
    reused = swapped["loaded_tokens"] + swapped["resident_tokens"]
    assert reused <= swapped["shared_tokens"] < again["shared_tokens"], (
        "from there on it is another picture's"
    )


@pytest.mark.parametrize("model", ENGINES)
def test_chats_about_several_pictures_are_joined(eyes: Eyes, model: str) -> None:
    """Exactly; moved with every picture in its place, and nobody else meets what was moved."""
    chance, left, seen = random.Random(model), [], []
    for _ in range(3):
        message, pictures = CASES.message(chance, 1)
        left.append(eyes.ask("reader", {"messages": [message], "handoff": {"save": True}}).left)
        seen += pictures
    message, own = CASES.message(chance, 1)
    exact = eyes.ask(model, {"messages": [message], "handoff": {"from": left}})
    assert exact.said == eyes.seer.says(exact.prompt, seen + own)
    before = eyes.encoded(model)
    moved = eyes.ask(model, {"messages": [message], "handoff": {"from": left, "join": "moved", "save": True}})
    assert moved.prompt == exact.prompt
    assert (moved.source["exact"], moved.handoff["images"]) == (False, 4)
    assert all(part["moved_tokens"] for part in moved.source["parts"][1:]), "their pictures with them"
    assert eyes.encoded(model) - before <= 1
    again = eyes.ask(model, {"messages": [message], "handoff": {"from": left}})
    assert again.said == exact.said


def test_a_swapped_picture_never_hits(eyes: Eyes) -> None:
    """Another gateway over the same store might leave a record whose images are not those of its KV."""
    one, other = picture(5201, 30, 30), picture(5202, 30, 30)
    asked = {"messages": [user(part(one), " what is where?")], "ttl_s": 2}
    swapped = eyes.compute("reader", asked)["id"]
    record = eyes.store / "records" / f"{swapped}.json"
    (entry,) = (eyes.store / "entries").rglob(f"{swapped}.kv")
    told, kv = record.read_text(), entry.read_bytes()
    deadline = time.monotonic() + 20
    while record.exists() or entry.exists():  # until its time is over here
        assert time.monotonic() < deadline
        time.sleep(0.1)
    lives = {"ttl_s": 600, "expires_at": time.time() + 600}
    record.write_text(json.dumps(json.loads(told.replace(one.digest, other.digest)) | lives))
    entry.write_bytes(kv)
    (eyes.store / "images" / f"{swapped}.{other.digest}").write_bytes(other.data)
    before = eyes.encoded("writer")
    answer = eyes.ask("writer", {"messages": [user("a field?")], "handoff": {"from": swapped}})
    assert answer.said == eyes.seer.says(answer.prompt, [other])
    begins = json.loads(told)["images"][0]["offset"]
    assert answer.source["loaded_tokens"] <= begins, "its KV is of another picture from there on"
    eyes.encodes("writer", before, 1)


def test_a_picture_changed_on_disk_is_never_shown(eyes: Eyes) -> None:
    left = eyes.compute("reader", {"messages": [user(part(picture(5003)), " a road?")]})["id"]
    (path,) = (eyes.store / "images").glob(f"{left}.*")
    path.write_bytes(picture(5004).data)
    for model in ENGINES:
        with eyes.gateway.client() as client:
            body = {"model": model, "messages": [user("so?")], "handoff": {"from": left}}
            refused = client.post(CHAT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (410, "handoff_images_lost")


@pytest.mark.parametrize("then", [[], [user(part(picture(5010)), "one more")]])
def test_what_is_too_much_is_refused_and_the_engine_goes_on(eyes: Eyes, then: list[dict[str, Any]]) -> None:
    eight = [part(picture(5020 + number)) for number in range(8)]
    left = eyes.compute("reader", {"messages": [user(*eight)]})
    assert left["images"] == 8
    with eyes.gateway.client() as client:
        body = {"model": "reader", "messages": then or [user("so? " * 900)]}
        refused = client.post(CHAT, json=body | {"handoff": {"from": left["id"]}})
        assert refused.status_code == 400, refused.text
    answer = eyes.ask("writer", {"messages": [user("so?")], "handoff": {"from": left["id"]}})
    assert answer.source["outcome"] in ("loaded", "resident")


def test_a_context_whose_model_said_what_stands_for_an_image_is_not_gone_on_from(eyes: Eyes) -> None:
    """It belongs to no image, and models' code fails on that; what was asked before it can be handed over."""
    shown = picture(5201)
    says_it = {"messages": [user(part(shown), " what is where?")]}
    says_it["logit_bias"] = {str(eyes.seer.image_token): 100}
    shows = says_it | {"skip_special_tokens": False}  # else its client receives nothing of it
    left = {
        "context": eyes.ask("reader", shows | {"handoff": {"save": True}}),
        "unseen": eyes.ask("reader", says_it | {"handoff": {"save": True}}),
        "prompt": eyes.ask("reader", says_it | {"handoff": {"save": {"scope": "prompt"}}}),
    }
    assert {token for each in left.values() for token in each.said} == {eyes.seer.image_token}
    with eyes.gateway.client() as client:
        body = {"model": "reader", "messages": [user("so?")], "handoff": {"from": left["context"].left}}
        refused = client.post(CHAT, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
    assert "context that it continues" in refused.json()["error"]["message"]
    for scope in ("unseen", "prompt"):
        answer = eyes.ask("reader", {"messages": [user("so?")], "handoff": {"from": left[scope].left}})
        assert answer.said == eyes.seer.says(answer.prompt, [shown])


@pytest.mark.chaos
def test_after_a_restart_a_handoff_is_what_it_was_and_a_swapped_picture_never_hits(eyes: Eyes) -> None:
    """The restart is the only way to make a gateway believe a record that somebody else wrote."""
    one, other = picture(5101, 30, 30), picture(5102, 30, 30)
    asked = {"messages": [user(part(one), " what is where?")]}
    kept, swapped = (eyes.compute("reader", asked)["id"] for _ in range(2))
    record = eyes.store / "records" / f"{swapped}.json"
    record.write_text(record.read_text().replace(one.digest, other.digest))
    (eyes.store / "images" / f"{swapped}.{other.digest}").write_bytes(other.data)
    eyes.gateway.restart()
    begins = json.loads(record.read_text())["images"][0]["offset"]
    before = eyes.encoded("writer")
    wish = {"messages": [user("a field?")]}
    forged = eyes.ask("writer", wish | {"handoff": {"from": swapped}})
    assert forged.said == eyes.seer.says(forged.prompt, [other])
    assert forged.source["loaded_tokens"] <= begins, "its KV is of another picture from there on"
    eyes.encodes("writer", before, 1)
    sound = eyes.ask("reader", wish | {"handoff": {"from": kept}})
    assert sound.said == eyes.seer.says(sound.prompt, [one])
    assert sound.source["outcome"] == "loaded"
    eyes.encodes("reader", 0, 0)
    assert sound.prompt == forged.prompt
    assert sound.said != forged.said
