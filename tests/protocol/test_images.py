"""Images on the wire: what reaches an engine, in which shape, and what never does."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from support import image_files
from support.gateways import FakeGateway, run_fake
from support.image_requests import LOOKS, PNG, URL, block, chat, post, seen

from baton.engines.fake.engine import FakeEngine


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """One model that takes three images, one that takes text only."""
    with run_fake(FakeEngine("look", images=LOOKS), FakeEngine("text")) as running:
        yield running


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}, "uuid": "another's"},
        {"type": "image_url", "image_url": URL},
        {"image_url": URL},
        {"image_url": {"url": URL}, "uuid": "x", "anything": 1},
        {"type": "input_image", "image_url": URL},
        {"type": "image_url", "image_url": {"url": f"  {URL}\n"}},
        {"type": "image_url", "image_url": {"url": image_files.url_of(PNG, "text/html")}},
    ],
)
def test_every_form_of_an_image_in_a_chat_becomes_the_one_we_read(
    gateway: FakeGateway, part: dict[str, Any]
) -> None:
    """A verified data: URL, and our own name for it; nothing else of the client's part goes on."""
    assert post(gateway, chat({"type": "text", "text": "what?"}, part)).status_code == 200
    sent, digest = seen(gateway)["messages"][0]["content"], "sha256 of PNG"
    assert sent[0] == {"type": "text", "text": "what?"}
    digest = sent[1].pop("uuid")
    assert sent[1] == {"type": "image_url", "image_url": {"url": URL}}
    assert len(digest) == 64


def test_images_keep_their_places_and_their_names(gateway: FakeGateway) -> None:
    """Three images in two messages: each in its place, the equal ones of one name, the other of another."""
    other = image_files.part_of(image_files.file_of(image_files.image(30, 20)))
    body = chat(image_files.part_of(PNG), {"type": "text", "text": "and"}, other)
    body["messages"] += [
        {"role": "assistant", "content": "hm"},
        {"role": "user", "content": [image_files.part_of(PNG)]},
    ]
    assert post(gateway, body).status_code == 200
    first, _, last = seen(gateway)["messages"]
    urls = [
        part["image_url"]["url"] for part in (first["content"][0], first["content"][2], last["content"][0])
    ]
    assert urls == [URL, other["image_url"]["url"], URL]
    names = [part["uuid"] for part in (first["content"][0], first["content"][2], last["content"][0])]
    assert (names[0] == names[2], names[0] == names[1]) == (True, False)


def test_responses_and_messages_get_images_in_their_own_shapes(gateway: FakeGateway) -> None:
    """Each API's handler reads its own; a tool's result may hold one too."""
    image = {"type": "input_image", "image_url": URL, "file_id": None}
    body = {"model": "look", "input": [{"role": "user", "content": [image]}]}
    assert post(gateway, body, "/v1/responses").status_code == 200
    sent = seen(gateway)["input"][0]["content"][0]
    assert (sent["type"], sent["image_url"], sent["detail"]) == ("input_image", URL, "auto")
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block()]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert post(gateway, chat(block(), result), path).status_code == 200
        first, second = seen(gateway)["messages"][0]["content"]
        wanted = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
        assert first == second["content"][0] == {"type": "image", "source": wanted}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", chat(image_files.part_of(PNG))),
        ("/v1/embeddings", {"messages": chat(image_files.part_of(PNG))["messages"]}),
        ("/pooling", {"messages": chat(image_files.part_of(PNG))["messages"]}),
        ("/score", {"queries": {"content": [image_files.part_of(PNG)]}, "documents": "a"}),
        ("/rerank", {"query": "a", "documents": [{"content": [image_files.part_of(PNG)]}]}),
    ],
)
def test_no_route_lets_an_unread_image_through(path: str, body: dict[str, Any]) -> None:
    """Wherever a body may hold one it is read: a broken one in the same place is refused, unseen."""
    engine = FakeEngine("look", images=LOOKS, pooling=path != "/tokenize")
    with run_fake(engine) as gateway, gateway.client() as client:
        client.post(path, json=body | {"model": "look"})
        assert f"'url': '{URL}'" in str(engine.bodies[-1])
        assert "'uuid': '" in str(engine.bodies[-1])
        engine.bodies.clear()
        broken = json.loads(json.dumps(body).replace(URL, image_files.url_of(b"GIF89a")))
        error = client.post(path, json=broken | {"model": "look"}).json()["error"]
        assert (error["code"], engine.bodies) == ("invalid_image", [])


@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
def test_what_would_change_how_an_image_is_read_is_dropped_and_counted(
    gateway: FakeGateway, field: str
) -> None:
    """It is part of an image's name in vLLM's caches, and of how much memory it takes."""
    body = chat(image_files.part_of(PNG), **{field: {"image": {"image_mode": None}}})
    assert post(gateway, body).status_code == 200
    assert field not in seen(gateway)
    with gateway.client() as client:
        assert f'baton_stripped_fields_total{{field="{field}"}} 1.0' in client.get("/metrics").text


def test_a_tool_s_own_json_may_say_what_it_likes(gateway: FakeGateway) -> None:
    """Arguments and schemas are the client's; nothing in them is an image."""
    odd = {"image_url": "https://example.com/a.png", "type": "input_audio"}
    call = {"id": "a", "type": "function", "function": {"name": "see", "arguments": odd}}
    body = chat(tools=[{"type": "function", "function": {"name": "see", "parameters": odd}}])
    body["messages"].append({"role": "assistant", "content": "", "tool_calls": [call]})
    assert post(gateway, body).status_code == 200
    assert seen(gateway)["messages"] == body["messages"]
    use = {"type": "tool_use", "id": "b", "name": "see", "input": odd}
    body = {"model": "look", "max_tokens": 2, "messages": [{"role": "assistant", "content": [use]}]}
    assert post(gateway, body, "/v1/messages").status_code == 200
    assert seen(gateway)["messages"] == body["messages"]


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_what_an_answer_is_not_to_say_is_no_prompt(gateway: FakeGateway, field: str) -> None:
    assert post(gateway, chat({"type": "text", "text": "a"}, **{field: ["<image>"]})).status_code == 200


def test_what_is_read_is_counted(gateway: FakeGateway) -> None:
    """By outcome, in bytes, and those that were written anew."""
    turned = image_files.part_of(image_files.oriented(6))
    assert post(gateway, chat(image_files.part_of(PNG), turned)).status_code == 200
    assert post(gateway, chat({"image_url": image_files.url_of(b"no")})).status_code == 400
    with gateway.client() as client:
        counted = client.get("/metrics").text
    assert 'baton_images_total{outcome="read"} 2.0' in counted
    assert 'baton_images_total{outcome="invalid_image"} 1.0' in counted
    assert "baton_images_rewritten_total 1.0" in counted
    assert "baton_image_read_seconds_count 3.0" in counted
