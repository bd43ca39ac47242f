"""Handoffs of contexts with images, with a fake engine: the images go with the token ids, by their digests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake
from support.random_images import part, picture, text, user

from baton.admission.api_keys import create_key
from baton.config.groups import EngineSettings
from baton.engines.backend import ImageInput
from baton.engines.fake.answers import IMAGE, token_id, token_ids
from baton.engines.fake.engine import FakeEngine
from baton.images.image import PlacedImage
from baton_kv.format import ImageRef

CHAT = "/v1/chat/completions"
SEES = ImageInput(limit=4, tokens=frozenset({token_id(IMAGE)}), texts=(IMAGE,))
BIRD, FISH = picture(1, 5), picture(2, 6)
ASKED = user(part(BIRD), "11")


def engines() -> tuple[FakeEngine, ...]:
    return (
        FakeEngine("a", supports_handoffs=True, images=SEES),
        FakeEngine("b", supports_handoffs=True, images=SEES),
        FakeEngine("blind", supports_handoffs=True),
    )


@contextmanager
def run(store: Path, **more: Any) -> Iterator[FakeGateway]:
    """A gateway whose handoffs lie in a folder."""
    served = tuple(EngineSettings(name=engine.name, model="fake", handoff=True) for engine in engines())
    handoffs = {"store": f"file:{store}"} | more.pop("handoffs", {})
    with run_fake(*engines(), engines=served, handoffs=handoffs, **more) as gateway:
        yield gateway


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[FakeGateway]:
    with run(tmp_path / "store") as gateway:
        yield gateway


def images_of(gateway: FakeGateway) -> Path:
    return Path(gateway.settings.handoff_store.removeprefix("file:")) / "images"


def record_of(gateway: FakeGateway, left: dict[str, Any]) -> Path:
    """A handoff's record, which is on disk a moment after it is ready."""
    path = images_of(gateway).parent / "records" / f"{left['id']}.json"
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path


def post(gateway: FakeGateway, body: dict[str, Any], path: str = CHAT, **options: Any) -> httpx.Response:
    with gateway.client(**options) as client:
        return client.post(path, json={"model": "a", "max_tokens": 2} | body)


def leave(gateway: FakeGateway, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    response = post(gateway, {"messages": list(messages), "handoff": {"save": True} | more})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["handoff"]
    return found


def seen(gateway: FakeGateway, name: str = "a") -> tuple[list[int], list[PlacedImage]]:
    """The last prompt an engine was given, and its images."""
    relay = gateway.engine(name).transfers[-1]
    assert relay.prompt is not None
    return relay.prompt, relay.images


def require_in_place(prompt: list[int], images: list[PlacedImage]) -> None:
    """Every token of an image stands where its image is said to be, and no other one does."""
    places = {index for image in images for index in range(image.offset, image.offset + image.length)}
    assert {index for index, token in enumerate(prompt) if token == token_id(IMAGE)} == places


def test_b_is_given_a_s_tokens_and_a_s_images(relay: FakeGateway) -> None:
    left = leave(relay, ASKED)
    assert (left["state"], left["images"]) == ("ready", 1)
    first, _ = seen(relay)
    assert first.count(token_id(IMAGE)) == 5, "one token a pixel of its width"
    response = post(
        relay,
        {"model": "b", "messages": [{"role": "user", "content": "22"}], "handoff": {"from": left["id"]}},
    )
    assert response.status_code == 200, response.text
    prompt, images = seen(relay, "b")
    assert prompt[: len(first)] == first
    assert [image.image for image in images] == [BIRD]
    require_in_place(prompt, images)


def test_b_s_own_images_come_after_a_s(relay: FakeGateway) -> None:
    left = leave(relay, ASKED)
    second = leave(relay, user("22", part(FISH), "33", part(BIRD)), **{"from": left["id"]})
    assert second["images"] == 3
    third = leave(relay, user(part(FISH)), **{"from": second["id"]})
    prompt, images = seen(relay)
    assert third["images"] == 4
    assert [image.image for image in images] == [BIRD, FISH, BIRD, FISH]
    require_in_place(prompt, images)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_goes_on_from_a_chat_with_images(relay: FakeGateway, stream: bool) -> None:
    left = leave(relay, ASKED)
    body = {"prompt": "7 8", "stream": stream, "handoff": {"from": left["id"], "save": {"scope": "prompt"}}}
    assert post(relay, body, "/v1/completions").status_code == 200
    prompt, images = seen(relay)
    assert (prompt[-2:], [image.image for image in images]) == ([7, 8], [BIRD])
    require_in_place(prompt, images)


@pytest.mark.parametrize("first", [{"scope": "prompt"}, {"scope": "context"}])
def test_a_prompt_alone_is_left_with_its_images(relay: FakeGateway, first: dict[str, Any]) -> None:
    left = leave(relay, ASKED, save=first)
    assert left["images"] == 1
    leave(relay, user(part(FISH)), **{"from": left["id"]})
    prompt, images = seen(relay)
    assert [image.image for image in images] == [BIRD, FISH]
    require_in_place(prompt, images)


def test_a_context_with_images_is_computed_without_an_answer(relay: FakeGateway) -> None:
    made = post(relay, {"messages": [ASKED]}, "/v1/handoffs").json()
    assert (made["state"], made["images"]) == ("ready", 1)
    grown = post(relay, {"messages": [user(part(FISH))], "from": made["id"]}, "/v1/handoffs").json()
    assert grown["images"] == 2
    leave(relay, user("22"), **{"from": grown["id"]})
    prompt, images = seen(relay)
    assert [image.image for image in images] == [BIRD, FISH]
    require_in_place(prompt, images)


def test_a_chat_with_images_begins_after_a_text(relay: FakeGateway) -> None:
    body = {"prompt": "1 2 3", "handoff": {"save": True}}
    left = post(relay, body, "/v1/completions").json()["handoff"]
    leave(relay, ASKED, **{"from": left["id"]})
    prompt, images = seen(relay)
    assert prompt[:5] == [1, 2, 3, 1, 2]
    require_in_place(prompt, images)


def test_what_a_template_needs_of_an_image_is_its_place(relay: FakeGateway) -> None:
    """A record holds no pixels in its messages: those lie in a file, once."""
    left = leave(relay, ASKED)
    assert "base64" not in record_of(relay, left).read_text()
    assert (images_of(relay) / f"{left['id']}.{BIRD.digest}").read_bytes() == BIRD.data


def test_a_handoff_outlives_its_gateway_with_its_images(relay: FakeGateway) -> None:
    left = leave(relay, ASKED)
    assert record_of(relay, left).exists()
    with run(images_of(relay).parent) as again:
        answer = post(again, {"messages": [user("22")], "handoff": {"from": left["id"]}})
        assert answer.status_code == 200, answer.text
        prompt, images = seen(again)
        assert [image.image for image in images] == [BIRD]
        require_in_place(prompt, images)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "another", "link"])
def test_an_image_that_is_not_what_it_was_is_never_shown_to_a_model(relay: FakeGateway, damage: str) -> None:
    left = leave(relay, ASKED)
    path = images_of(relay) / f"{left['id']}.{BIRD.digest}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage == "link":
        path.symlink_to("/dev/zero")
    elif damage != "gone":
        path.write_bytes({"flipped": data, "cut": data[:-9], "another": FISH.data}[damage])
    asked = len(relay.engine("a").transfers)
    response = post(relay, {"messages": [user("22")], "handoff": {"from": left["id"]}})
    assert (response.status_code, response.json()["error"]["code"]) == (410, "handoff_images_lost")
    assert len(relay.engine("a").transfers) == asked, "no engine heard of it"


def test_images_go_with_their_handoff_and_stay_with_those_that_went_on_from_it(relay: FakeGateway) -> None:
    folder = images_of(relay)
    first = leave(relay, ASKED)
    second = leave(relay, user(part(FISH)), **{"from": first["id"]})
    ours = [path for path in folder.iterdir() if path.name.partition(".")[0] in (first["id"], second["id"])]
    assert len(ours) == 3
    assert len({path.stat().st_ino for path in ours}) == 2, "the same bytes are there once"
    with relay.client() as client:
        assert client.delete(f"/v1/handoffs/{first['id']}").status_code == 204
        assert post(relay, {"messages": [user("3")], "handoff": {"from": second["id"]}}).status_code == 200
        assert client.delete(f"/v1/handoffs/{second['id']}").status_code == 204
    assert not [path for path in ours if path.exists()]


def test_more_bytes_of_images_than_a_handoff_keeps_are_refused_before_the_engine(tmp_path: Path) -> None:
    big = picture(3, 40, 40)
    with run(tmp_path / "store", handoffs={"image_bytes": 4096}) as gateway:
        assert len(big.data) > 4096
        body = {"messages": [user(part(big))]}
        refused = post(gateway, body | {"handoff": {"save": True}})
        assert (refused.status_code, "image_bytes" in refused.text) == (400, True)
        assert post(gateway, body, "/v1/handoffs").status_code == 400
        assert gateway.engine("a").transfers == []
        assert post(gateway, body).status_code == 200


def test_an_engine_that_sees_nothing_takes_no_images_from_a_handoff_either(relay: FakeGateway) -> None:
    left = leave(relay, ASKED)
    body = {"model": "blind", "messages": [user("22")], "handoff": {"from": left["id"]}}
    refused = post(relay, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "handoff_incompatible")
    assert post(relay, {"model": "blind", "messages": [ASKED], "handoff": {"save": True}}).status_code == 400


def test_more_images_than_a_prompt_may_hold_are_refused_whoever_sent_them(relay: FakeGateway) -> None:
    left = leave(relay, user(part(BIRD), part(FISH), part(BIRD)))
    body = {"messages": [user(part(FISH), part(BIRD))], "handoff": {"from": left["id"]}}
    refused = post(relay, body)
    assert (refused.status_code, "images" in refused.text) == (400, True)


def test_another_tenant_s_images_cannot_be_named(tmp_path: Path) -> None:
    keys = {tenant: create_key(tmp_path / "keys.json", tenant) for tenant in ("acme", "globex")}
    auth = {"keys_file": tmp_path / "keys.json"}
    headers = {tenant: {"Authorization": f"Bearer {key}"} for tenant, key in keys.items()}
    with run(tmp_path / "store", auth=auth) as gateway:
        body = {"messages": [ASKED], "handoff": {"save": True}}
        left = post(gateway, body, headers=headers["acme"]).json()["handoff"]
        stolen = post(
            gateway,
            {"messages": [user("2")], "handoff": {"from": left["id"]}},
            headers=headers["globex"],
        )
        assert stolen.status_code == 404
        by_name = {"type": "image_url", "image_url": None, "uuid": BIRD.digest}
        for wish in ({}, {"handoff": {"save": True}}):
            named = post(gateway, {"messages": [user(by_name)]} | wish, headers=headers["globex"])
            assert named.status_code == 400


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, False),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,"}}, False),
        ({"type": "image_embeds", "image_embeds": "x"}, False),
        ({"type": "prompt_embeds", "data": "x"}, False),
        (text("x") | {"image_url": None}, False),
        (part(BIRD) | {"mm_processor_kwargs": {}}, True),
        (part(BIRD) | {"cache_control": {"type": "ephemeral"}}, True),
        ({"type": "input_image", "image_url": BIRD.url, "detail": "auto"}, True),
        (text("22") | {"cache_control": {"type": "ephemeral"}, "annotations": [], "id": None}, True),
    ],
)
def test_a_part_is_as_valid_with_a_handoff_as_without(
    relay: FakeGateway, given: dict[str, Any], valid: bool
) -> None:
    asked = {"messages": [user("1", given)]}
    plain = post(relay, asked)
    assert (plain.status_code == 200) is valid
    for path, body in ((CHAT, {"handoff": {"save": True}}), ("/v1/handoffs", {})):
        found = post(relay, asked | body, path)
        assert (found.status_code < 300) is valid, found.text
        if not valid:
            assert found.json()["error"]["param"] == plain.json()["error"]["param"]


@pytest.mark.parametrize(
    ("path", "field", "shown"),
    [
        (
            "/v1/messages",
            "messages",
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BIRD.base64}},
        ),
        ("/v1/responses", "input", {"type": "input_image", "image_url": BIRD.url, "detail": "auto"}),
    ],
)
def test_other_routes_show_their_images_again_and_the_handoff_keeps_none(
    relay: FakeGateway, path: str, field: str, shown: dict[str, Any]
) -> None:
    said = {"type": "input_text" if field == "input" else "text", "text": "11"}
    asked = {field: [user(shown, said)]}
    assert post(relay, asked, path).status_code == 200
    left = post(relay, asked | {"handoff": {"save": True}}, path)
    assert left.status_code == 200, left.text
    found = left.json()["handoff"]
    assert (found["state"], found["images"]) == ("ready", 0)
    assert post(relay, asked | {"handoff": {"from": found["id"]}}, path).status_code == 200
    record = relay.app.state.gateway.library.index.known(found["id"])
    vars(record)["positions"] = [ImageRef(BIRD.digest, 0, BIRD.width)]  # as a real engine has it
    refused = post(relay, {"prompt": "22", "handoff": {"from": found["id"]}}, "/v1/completions")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "handoff.from")


def test_shared_tokens_end_where_another_image_begins(relay: FakeGateway) -> None:
    """All images have the same placeholders; one that is shown again in another's place shares none of them."""
    first = post(relay, {"messages": [user("11", part(BIRD))], "handoff": {"save": True}}).json()
    left, said = first["handoff"], first["choices"][0]["message"]
    again = [user("11", part(picture(3, BIRD.width))), said, user("22")]
    source = post(relay, {"messages": again, "handoff": {"from": left["id"]}}).json()["handoff"]["source"]
    before = len(token_ids("<system> be kind <end> <user> 11"))
    assert source["shared_tokens"] == before < left["tokens"]


def test_images_of_a_request_that_was_given_up_are_not_kept(relay: FakeGateway) -> None:
    relay.engine("a").behaviour.call_error = TimeoutError()
    post(relay, {"messages": [ASKED], "handoff": {"save": True}})
    time.sleep(0.1)
    folder = images_of(relay)
    assert [path for path in folder.iterdir() if path.name.endswith(BIRD.digest)] == []
