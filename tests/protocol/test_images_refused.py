"""Images and other media that are refused: with the place in the request, and unseen by the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import image_files
from support.gateways import FakeGateway, run_fake
from support.image_requests import LOOKS, PNG, URL, chat, post, refused

from baton.engines.fake.engine import FakeEngine


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """One model that takes three images, one that takes text only."""
    with run_fake(FakeEngine("look", images=LOOKS), FakeEngine("text")) as running:
        yield running


BAD = {
    **{f"disguised: {name}": image_files.url_of(data) for name, data in image_files.DISGUISED.items()},
    "animated": image_files.url_of(image_files.animated("GIF")),
    "cut short": image_files.url_of(PNG[: len(PNG) // 2]),
    "1x1": image_files.url_of(image_files.file_of(image_files.image(1, 1))),
    "1x65000": image_files.url_of(image_files.png(1, 65_000)),
    "bomb": image_files.url_of(image_files.png(65_500, 65_500, image_files.pixels_of(8, 8))),
    "packed text": image_files.url_of(image_files.text_bomb()),
    "endless": image_files.url_of(image_files.many_chunks(9000)),
    "no base64": "data:image/png;base64,?",
    "not base64": "data:image/png,abc",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_a_400_that_names_the_place(gateway: FakeGateway, name: str) -> None:
    """The second of two images is bad: the request is refused as a whole, engine untouched."""
    error = refused(gateway, chat(image_files.part_of(PNG), {"image_url": BAD[name]}))
    assert error["param"] == "messages[0].content[1].image_url"
    assert error["code"] in ("invalid_image", "image_too_large")
    assert error["message"].startswith(error["param"])
    sent = {"type": "image", "source": {"type": "base64", "data": BAD[name].partition(",")[2] or "?"}}
    error = refused(gateway, chat(sent), "/v1/messages")
    assert error["param"] == "messages[0].content[0].source"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}, ".audio_url"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, ".input_audio"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, ".video_url"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, ".image_embeds"),
        ({"type": "prompt_embeds", "data": "AAAA"}, ""),
        ({"prompt_embeds": None, "data": "AAAA", "uuid": "x"}, ".prompt_embeds"),
        ({"type": "image_pil", "image_pil": None, "uuid": "x"}, ".image_pil"),
        ({"type": "text", "text": "a", "uuid": "x", "video_url": None}, ".video_url"),
        ({"type": "text", "text": "a", "uuid": "x", "image_url": URL}, ""),
        ({"type": "image_url", "image_url": None, "uuid": "x"}, ".image_url"),
        ({"type": "image_url", "image_url": {"url": ""}, "uuid": "x"}, ".image_url"),
        ({"type": "image_url"}, ".image_url"),
        ({"type": "input_image", "file_id": "file-1"}, ".image_url"),
        ({"type": "file", "file": {"file_data": URL}}, ".file"),
        ({"type": "input_file", "file_url": "https://example.com/a"}, ""),
        ({"type": ["image_url"], "image_url": {"url": 7}}, ".image_url"),
        ({"type": "image", "source": {"type": "base64", "data": "AAAA"}}, ""),
        ({"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}}, ".source"),
    ],
)
def test_media_that_are_no_images_are_refused_plainly(
    gateway: FakeGateway, part: dict[str, Any], param: str
) -> None:
    """By type or by key, as vLLM would take them."""
    error = refused(gateway, chat(part))
    assert error["param"] == f"messages[0].content[0]{param}"
    assert error["code"] in ("invalid_request", "invalid_image")


EMBEDS = {"type": "prompt_embeds", "data": "AAAA"}
TURNS = [{"role": "user", "content": [EMBEDS]}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TURNS}),
        ("/v1/responses", {"input": TURNS}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": TURNS}),
        ("/tokenize", {"messages": TURNS}),
        ("/v1/embeddings", {"messages": TURNS}),
        ("/pooling", {"messages": TURNS}),
        ("/score", {"queries": {"content": [EMBEDS]}, "documents": ["a"]}),
    ],
)
def test_embeddings_in_a_prompt_s_place_are_refused_like_other_media(
    gateway: FakeGateway, path: str, body: dict[str, Any]
) -> None:
    error = refused(gateway, {"model": "look"} | body, path)
    assert "'prompt_embeds' is not supported" in error["message"]
    assert error["param"].endswith("content[0]")


@pytest.mark.parametrize("field", [{"type": "tool_use"}, {"type": "function_call"}, {"role": "assistant"}])
@pytest.mark.parametrize(
    ("path", "key"), [("/v1/responses", "input"), ("/v1/embeddings", "input"), ("/pooling", "input")]
)
def test_a_body_that_calls_itself_a_tool_s_call_hides_no_image(
    path: str, key: str, field: dict[str, Any]
) -> None:
    """What is a call's own JSON in one API is where the next one's images are."""
    broken = {"type": "image_url", "image_url": {"url": image_files.url_of(b"GIF89a")}, "uuid": "another's"}
    if path == "/v1/responses":
        broken = {"type": "input_image", "image_url": image_files.url_of(b"GIF89a"), "uuid": "another's"}
    body = {"model": "look", key: [{"role": "user", "content": [broken]}]}
    engine = FakeEngine("look", images=LOOKS, pooling=path != "/v1/responses")
    with run_fake(engine) as gateway, gateway.client() as client:
        for hidden in (body | field, {**body, key: [body[key][0] | field]}):
            error = client.post(path, json=hidden).json()["error"]
            assert (error["code"], engine.bodies) == ("invalid_image", [])


def test_a_text_model_takes_no_image(gateway: FakeGateway) -> None:
    """It is told so, and the engine is not."""
    error = refused(gateway, chat(image_files.part_of(PNG), model="text"))
    assert (error["code"], error["param"]) == ("operation_unsupported", "messages[0].content[0].image_url")


def test_as_many_images_as_the_model_takes(gateway: FakeGateway) -> None:
    """Four are one too many; the fourth is named, and three are answered."""
    image = image_files.part_of(PNG)
    error = refused(gateway, chat(image, image, image, image))
    assert (error["code"], error["param"]) == ("invalid_request", "messages[0].content[3].image_url")
    assert post(gateway, chat(image, image, image)).status_code == 200


def test_the_operator_s_count_is_another_limit() -> None:
    """Whatever the model takes; 0 takes none."""
    for count in (1, 0):
        with run_fake(
            FakeEngine("look", images=LOOKS), FakeEngine("text"), images={"count": count}
        ) as gateway:
            error = refused(gateway, chat(*[image_files.part_of(PNG)] * (count + 1)))
            assert (error["code"], error["param"]) == (
                "invalid_request",
                f"messages[0].content[{count}].image_url",
            )


@pytest.mark.parametrize(
    ("body", "path", "param"),
    [
        (
            chat({"type": "text", "text": "an <image> of"}),
            "/v1/chat/completions",
            "messages[0].content[0].text",
        ),
        (
            {"model": "look", "messages": [{"role": "system", "content": "x[IMG]"}]},
            "/v1/chat/completions",
            "messages[0].content",
        ),
        ({"model": "look", "prompt": ["a", "<image>"]}, "/v1/completions", "prompt[1]"),
        ({"model": "look", "input": "<image><image>"}, "/v1/responses", "input"),
        (
            {"model": "look", "system": "<image>", "messages": [{"role": "user", "content": "a"}]},
            "/v1/messages",
            "system",
        ),
    ],
)
def test_what_stands_for_an_image_may_not_be_typed(
    gateway: FakeGateway, body: dict[str, Any], path: str, param: str
) -> None:
    """It would take the place of an image; for a model that knows none it is a word like any other."""
    error = refused(gateway, body, path)
    assert (error["code"], error["param"]) == ("invalid_request", param)
    assert post(gateway, body | {"model": "text"}, path).status_code == 200
