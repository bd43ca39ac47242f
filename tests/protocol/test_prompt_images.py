"""Plain prompts with images: `images` of `/v1/completions` and `POST /v1/handoffs`, with a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake
from support.random_images import part, picture, user

from baton.config.groups import EngineSettings
from baton.engines.backend import ImageInput
from baton.engines.fake.answers import IMAGE, token_id
from baton.engines.fake.engine import FakeEngine
from baton.images.image import ClientImage, PlacedImage

HERE = token_id(IMAGE)
SEES = ImageInput(limit=3, tokens=frozenset({HERE}), texts=(IMAGE,))
BIRD, FISH = picture(1, 5), picture(2, 6)
PROMPTS: list[str | list[int]] = [f"1 {IMAGE} 2 {IMAGE} 3", [1, HERE, 2, HERE, 3]]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGateway]:
    engines = [
        FakeEngine("look", supports_handoffs=True, images=SEES),
        FakeEngine("alone", images=SEES),
        FakeEngine("blind", supports_handoffs=True),
    ]
    served = tuple(
        EngineSettings(name=engine.name, model="fake", handoff=engine.supports_handoffs) for engine in engines
    )
    with run_fake(*engines, engines=served, handoffs={"store": f"file:{tmp_path}/store"}) as running:
        yield running


def url(shown: ClientImage) -> str:
    found: str = part(shown)["image_url"]["url"]
    return found


def post(
    gateway: FakeGateway, said: object, *shown: ClientImage, path: str = "/v1/completions", **more: Any
) -> httpx.Response:
    body = {"model": "look", "prompt": said, "images": [url(each) for each in shown], "max_tokens": 2}
    with gateway.client() as client:
        return client.post(path, json=body | more)


def refused(answer: httpx.Response, param: str | None, code: str = "invalid_request") -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error
    message: str = error["message"]
    return message


def seen(gateway: FakeGateway, name: str = "look") -> tuple[list[int], list[PlacedImage]]:
    """The last prompt an engine was given, and its images; every token of one stands where it is said to."""
    relay = gateway.engine(name).transfers[-1]
    assert relay.prompt is not None
    places = {index for image in relay.images for index in range(image.offset, image.offset + image.length)}
    assert {index for index, token in enumerate(relay.prompt) if token == HERE} == places
    return relay.prompt, relay.images


@pytest.mark.parametrize("model", ["look", "alone"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["text", "token ids"])
def test_images_stand_where_the_prompt_has_places_for_them(
    gateway: FakeGateway, prompt: str | list[int], model: str
) -> None:
    answer = post(gateway, prompt, BIRD, FISH, model=model)
    assert answer.status_code == 200, answer.text
    assert "handoff" not in answer.json()
    tokens, images = seen(gateway, model)
    assert tokens == [1, *[HERE] * 5, 2, *[HERE] * 6, 3]
    assert [(image.image, image.offset) for image in images] == [(BIRD, 1), (FISH, 7)]
    assert "images" not in gateway.engine(model).bodies[-1]


def test_a_stream_and_parts_as_in_a_chat(gateway: FakeGateway) -> None:
    answer = post(gateway, PROMPTS[0], stream=True, images=[part(BIRD), url(FISH)])
    assert answer.text.endswith("data: [DONE]\n\n")
    assert [image.image for image in seen(gateway)[1]] == [BIRD, FISH]


def test_they_are_handed_over_like_those_of_a_chat(gateway: FakeGateway) -> None:
    save = {"scope": "prompt"}  # the fake model's answers echo its prompts
    left = post(gateway, [1, HERE], BIRD, handoff={"save": save}).json()["handoff"]
    assert (left["images"], left["tokens"]) == (1, 6)
    more = {"handoff": {"from": left["id"], "save": save}}
    grown = post(gateway, f"7 {IMAGE}", FISH, **more).json()["handoff"]
    assert grown["images"] == 2
    prompt, images = seen(gateway)
    assert prompt == [1, *[HERE] * 5, 7, *[HERE] * 6]
    assert [image.image for image in images] == [BIRD, FISH]
    with gateway.client() as client:
        body = {"model": "look", "messages": [user("8")], "handoff": {"from": grown["id"]}}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert [image.image for image in seen(gateway)[1]] == [BIRD, FISH]


def test_a_context_of_token_ids_and_images_is_computed_without_an_answer(gateway: FakeGateway) -> None:
    made = post(gateway, [1, HERE], BIRD, path="/v1/handoffs")
    assert (made.status_code, made.json()["images"]) == (201, 1)
    post(gateway, [9], handoff={"from": made.json()["id"]})
    prompt, images = seen(gateway)
    assert (prompt, [image.image for image in images]) == ([1, *[HERE] * 5, 9], [BIRD])


@pytest.mark.parametrize("prompt", [[1, 2], "1 2", [HERE, HERE], f"{IMAGE} {IMAGE}"], ids=repr)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/handoffs"])
def test_one_place_for_each_image_or_none_is_taken(gateway: FakeGateway, prompt: object, path: str) -> None:
    assert f"'{IMAGE}'" in refused(post(gateway, prompt, BIRD, path=path), "prompt", "images_misplaced")
    assert gateway.engine("look").transfers == []


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"images": [url(BIRD)] * 4}, "images[3]", "invalid_request"),
        ({"images": url(BIRD)}, "images", "invalid_request"),
        ({"images": [7]}, "images[0]", "invalid_image"),
        ({"images": [{}]}, "images[0]", "invalid_image"),
        ({"images": [""]}, "images[0]", "invalid_request"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images[0]", "invalid_image"),
        ({"images": ["https://example.org/cat.png"]}, "images[0]", "invalid_request"),
        (
            {"images": [{"type": "video_url", "video_url": {"url": "x"}}]},
            "images[0].video_url",
            "invalid_request",
        ),
        ({"model": "blind"}, "images[0]", "operation_unsupported"),
        ({"prompt": ["1 <image>", "2"]}, "prompt", "invalid_request"),
        ({"prompt": [[HERE], [2]]}, "prompt", "invalid_request"),
        ({"prompt": None}, "prompt", "invalid_request"),
        ({"prompt": [part(BIRD)], "images": []}, "prompt[0].image_url", "invalid_request"),
        ({"prompt": f"1 {IMAGE}", "images": []}, "prompt", "invalid_request"),
        ({"echo": True}, "echo", "invalid_request"),
        ({"use_beam_search": True}, "use_beam_search", "invalid_request"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens", "invalid_request"),
        ({"prompt_embeds": "x"}, "prompt_embeds", "invalid_request"),
        ({"suffix": f"and {IMAGE}"}, "suffix", "invalid_request"),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, dict) else "",
)
def test_what_does_not_go_with_images_is_said(
    gateway: FakeGateway, more: dict[str, Any], param: str, code: str
) -> None:
    refused(post(gateway, f"1 {IMAGE}", BIRD, **more), param, code)
    assert all(gateway.engine(name).transfers == [] for name in ("look", "alone", "blind"))


def test_images_of_a_chat_do_not_come_beside_it(gateway: FakeGateway) -> None:
    body = {"model": "look", "messages": [user("1")], "images": [url(BIRD)]}
    with gateway.client() as client:
        assert "parts of its messages" in refused(client.post("/v1/handoffs", json=body), None)
