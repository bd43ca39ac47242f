"""Images on the wire: what reaches an engine, in which shape, and what never does."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from geo.sources.hosts import Handler, Host, Names, hosting, page, redirect
from httpx import Response
from support import pictures
from support.gateways import FakeGateway, run_fake

from baton.config.groups import ImageSettings
from baton.engines.fake.engine import FakeEngine
from baton.engines.port import ImageInput
from baton.errors import ImageFetchFailed, SettingsError
from baton.images.fetching import fetcher_of

PNG = pictures.file_of(pictures.image())
URL = pictures.url_of(PNG)
LOOKS = ImageInput(limit=3, tokens=frozenset({9}), texts=("<image>", "[IMG]"))


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """One model that takes three images, one that takes text only."""
    with run_fake(FakeEngine("look", images=LOOKS), FakeEngine("text")) as running:
        yield running


def chat(*parts: Any, model: str = "look", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": [*parts]}], "max_tokens": 2} | fields


def block(data: bytes = PNG, **source: Any) -> dict[str, Any]:
    """As Anthropic's clients send an image."""
    told = {"type": "base64", "media_type": "image/jpeg", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": told | source}


def post(gateway: FakeGateway, body: dict[str, Any], path: str = "/v1/chat/completions") -> Response:
    with gateway.client() as client:
        return client.post(path, json=body)


def refused(gateway: FakeGateway, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
    """The error; no engine may have seen the request."""
    response = post(gateway, body, path)
    assert response.status_code == 400, response.text
    assert all(gateway.engine(name).bodies == [] for name in ("look", "text"))
    error: dict[str, Any] = response.json()["error"]
    return error


def seen(gateway: FakeGateway) -> dict[str, Any]:
    return gateway.engine("look").bodies[-1]


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
        {"type": "image_url", "image_url": {"url": pictures.url_of(PNG, "text/html")}},
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
    other = pictures.part_of(pictures.file_of(pictures.image(30, 20)))
    body = chat(pictures.part_of(PNG), {"type": "text", "text": "and"}, other)
    body["messages"] += [
        {"role": "assistant", "content": "hm"},
        {"role": "user", "content": [pictures.part_of(PNG)]},
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
        ("/tokenize", chat(pictures.part_of(PNG))),
        ("/v1/embeddings", {"messages": chat(pictures.part_of(PNG))["messages"]}),
        ("/pooling", {"messages": chat(pictures.part_of(PNG))["messages"]}),
        ("/score", {"queries": {"content": [pictures.part_of(PNG)]}, "documents": "a"}),
        ("/rerank", {"query": "a", "documents": [{"content": [pictures.part_of(PNG)]}]}),
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
        broken = json.loads(json.dumps(body).replace(URL, pictures.url_of(b"GIF89a")))
        error = client.post(path, json=broken | {"model": "look"}).json()["error"]
        assert (error["code"], engine.bodies) == ("invalid_image", [])


@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
def test_what_would_change_how_an_image_is_read_is_dropped_and_counted(
    gateway: FakeGateway, field: str
) -> None:
    """It is part of an image's name in vLLM's caches, and of how much memory it takes."""
    body = chat(pictures.part_of(PNG), **{field: {"image": {"image_mode": None}}})
    assert post(gateway, body).status_code == 200
    assert field not in seen(gateway)
    with gateway.client() as client:
        assert f'baton_stripped_fields_total{{field="{field}"}} 1.0' in client.get("/metrics").text


BAD = {
    **{f"disguised: {name}": pictures.url_of(data) for name, data in pictures.DISGUISED.items()},
    "animated": pictures.url_of(pictures.animated("GIF")),
    "cut short": pictures.url_of(PNG[: len(PNG) // 2]),
    "1x1": pictures.url_of(pictures.file_of(pictures.image(1, 1))),
    "1x65000": pictures.url_of(pictures.png(1, 65_000)),
    "bomb": pictures.url_of(pictures.png(65_500, 65_500, pictures.pixels_of(8, 8))),
    "packed text": pictures.url_of(pictures.text_bomb()),
    "endless": pictures.url_of(pictures.many_chunks(9000)),
    "no base64": "data:image/png;base64,?",
    "not base64": "data:image/png,abc",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_a_400_that_names_the_place(gateway: FakeGateway, name: str) -> None:
    """The second of two images is bad: the request is refused as a whole, engine untouched."""
    error = refused(gateway, chat(pictures.part_of(PNG), {"image_url": BAD[name]}))
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


@pytest.mark.parametrize("field", [{"type": "tool_use"}, {"type": "function_call"}, {"role": "assistant"}])
@pytest.mark.parametrize(
    ("path", "key"), [("/v1/responses", "input"), ("/v1/embeddings", "input"), ("/pooling", "input")]
)
def test_a_body_that_calls_itself_a_tool_s_call_hides_no_image(
    path: str, key: str, field: dict[str, Any]
) -> None:
    """What is a call's own JSON in one API is where the next one's images are."""
    broken = {"type": "image_url", "image_url": {"url": pictures.url_of(b"GIF89a")}, "uuid": "another's"}
    if path == "/v1/responses":
        broken = {"type": "input_image", "image_url": pictures.url_of(b"GIF89a"), "uuid": "another's"}
    body = {"model": "look", key: [{"role": "user", "content": [broken]}]}
    engine = FakeEngine("look", images=LOOKS, pooling=path != "/v1/responses")
    with run_fake(engine) as gateway, gateway.client() as client:
        for hidden in (body | field, {**body, key: [body[key][0] | field]}):
            error = client.post(path, json=hidden).json()["error"]
            assert (error["code"], engine.bodies) == ("invalid_image", [])


def test_a_text_model_takes_no_image(gateway: FakeGateway) -> None:
    """It is told so, and the engine is not."""
    error = refused(gateway, chat(pictures.part_of(PNG), model="text"))
    assert (error["code"], error["param"]) == ("operation_unsupported", "messages[0].content[0].image_url")


def test_as_many_images_as_the_model_takes(gateway: FakeGateway) -> None:
    """Four are one too many; the fourth is named, and three are answered."""
    image = pictures.part_of(PNG)
    error = refused(gateway, chat(image, image, image, image))
    assert (error["code"], error["param"]) == ("invalid_request", "messages[0].content[3].image_url")
    assert post(gateway, chat(image, image, image)).status_code == 200


def test_the_operator_s_count_is_another_limit() -> None:
    """Whatever the model takes; 0 takes none."""
    for count in (1, 0):
        with run_fake(
            FakeEngine("look", images=LOOKS), FakeEngine("text"), images={"count": count}
        ) as gateway:
            error = refused(gateway, chat(*[pictures.part_of(PNG)] * (count + 1)))
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


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_what_an_answer_is_not_to_say_is_no_prompt(gateway: FakeGateway, field: str) -> None:
    assert post(gateway, chat({"type": "text", "text": "a"}, **{field: ["<image>"]})).status_code == 200


def test_what_is_read_is_counted(gateway: FakeGateway) -> None:
    """By outcome, in bytes, and those that were written anew."""
    turned = pictures.part_of(pictures.oriented(6))
    assert post(gateway, chat(pictures.part_of(PNG), turned)).status_code == 200
    assert post(gateway, chat({"image_url": pictures.url_of(b"no")})).status_code == 400
    with gateway.client() as client:
        counted = client.get("/metrics").text
    assert 'baton_images_total{outcome="read"} 2.0' in counted
    assert 'baton_images_total{outcome="invalid_image"} 1.0' in counted
    assert "baton_images_rewritten_total 1.0" in counted
    assert "baton_image_read_seconds_count 3.0" in counted


NAME = "pictures.example.org"


@pytest.fixture
def host() -> Iterator[Host]:
    with hosting() as running:
        running.pages = {"/a.png": page(PNG), "/far": redirect("http://169.254.169.254/latest/meta-data")}
        yield running


@pytest.fixture
def open_gateway(host: Host) -> Iterator[FakeGateway]:
    """It may fetch from one host on loopback, named by its address."""
    images = {"allowed_hosts": (f"127.0.0.1:{host.port}",), "allow_http": True, "file_bytes": 4096}
    with run_fake(FakeEngine("look", images=LOOKS), FakeEngine("text"), images=images) as running:
        yield running


def test_an_allowed_address_is_fetched_by_us_and_never_by_the_engine(
    open_gateway: FakeGateway, host: Host
) -> None:
    """What the engine gets is the same as if the client had sent the bytes."""
    at = f"http://127.0.0.1:{host.port}/a.png"
    assert post(open_gateway, chat({"type": "image_url", "image_url": {"url": at}})).status_code == 200
    assert seen(open_gateway)["messages"][0]["content"][0]["image_url"] == {"url": URL}
    assert post(open_gateway, chat(block(type="url", url=at)), "/v1/messages").status_code == 200
    assert seen(open_gateway)["messages"][0]["content"][0]["source"]["media_type"] == "image/png"
    assert host.connects == 2
    assert "Cookie" not in host.asked[0][1]


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        ("/missing", "image_fetch_failed", "answered 404"),
        ("/far", "invalid_request", "a redirect leads there"),
        ("/large", "image_too_large", "4096 bytes"),
        ("/endless", "image_too_large", "4096 bytes"),
        ("/text", "invalid_image", "no PNG"),
    ],
)
def test_what_cannot_be_fetched_is_said(
    open_gateway: FakeGateway, host: Host, path: str, code: str, said: str
) -> None:
    """The place, and what the host did; nothing reaches the engine."""

    def endless(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(1000):
            handler.wfile.write(bytes(1 << 16))

    host.pages |= {"/large": page(bytes(5000)), "/endless": endless, "/text": page(b"hello")}
    error = refused(open_gateway, chat({"image_url": f"http://127.0.0.1:{host.port}{path}"}))
    assert (error["code"], error["param"]) == (code, "messages[0].content[0].image_url")
    assert said in error["message"]


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://localhost/a.png",
        "file:///etc/passwd",
        " HTTP://example.com/a.png",
        "ftp://example.com/a.png",
        "//example.com/a.png",
        "javascript:alert(1)",
        "blob:x",
    ],
)
def test_no_other_address_is_fetched(gateway: FakeGateway, open_gateway: FakeGateway, url: str) -> None:
    """With a list of hosts and without one, in any of the forms."""
    for running in (gateway, open_gateway):
        for body, path in (
            (chat({"type": "image_url", "image_url": {"url": url}}), "/v1/chat/completions"),
            (chat({"type": "image_url", "image_url": {"url": url}}), "/tokenize"),
            (chat(block(type="url", url=url)), "/v1/messages"),
            (
                {
                    "model": "look",
                    "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
                },
                "/v1/responses",
            ),
        ):
            assert refused(running, body, path)["code"] == "invalid_request"


async def test_a_host_that_hangs_costs_its_time_and_no_more(host: Host) -> None:
    """`images.fetch_s` is for all of it."""
    host.pages["/a.png"] = lambda _handler: time.sleep(2)
    settings = ImageSettings(
        allowed_hosts=(f"{NAME}:{host.port}", f"127.0.0.1:{host.port}"), allow_http=True, fetch_s=0.2
    )
    fetch = fetcher_of(settings, Names({NAME: [["127.0.0.1"]]}))
    with pytest.raises(ImageFetchFailed, match=r"messages.*longer than 0.2 s"):
        await fetch(f"http://{NAME}:{host.port}/a.png", "messages")


def test_a_list_that_holds_no_hosts_stops_the_start() -> None:
    """The operator's mistake shows before a client wonders."""
    with pytest.raises(SettingsError, match=r"images\.allowed_hosts"):
        fetcher_of(ImageSettings(allowed_hosts=("https://example.org",)))
