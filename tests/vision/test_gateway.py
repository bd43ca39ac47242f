"""Images through a real gateway into a real engine: answered right, refused before they do harm, cached."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from typing import Any

import httpx
import pytest
from support import image_files
from support.gateways import RealGateway
from support.look_requests import ask, body_of, file, filler, image, metric, refused, said, text
from support.steady_requests import asked_all_the_time

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
LENGTH = 256
"""Of the engine `look`, in engines.toml."""
IMAGE_TOKENS = 9


@pytest.fixture(scope="module")
def gateway(vision_gateway: RealGateway) -> RealGateway:
    return vision_gateway


@pytest.fixture(scope="module")
def token(gateway: RealGateway) -> int:
    """Return the id of the image placeholder."""
    config = json.loads((gateway.output.parent / "model" / "config.json").read_text())
    found: int = config.get("image_token_index", config.get("image_token_id"))
    return found


def test_what_is_in_the_image_decides_what_is_said(gateway: RealGateway) -> None:
    """The same image gives the same answer, another one another, and their order counts."""
    question = text("what is where? ")
    one, other = said(ask(gateway, question, image(1))), said(ask(gateway, question, image(2)))
    assert one != other
    assert said(ask(gateway, question, image(1))) == pytest.approx(one, abs=1e-3)
    both = said(ask(gateway, image(1), question, image(2)))
    turned = said(ask(gateway, image(2), question, image(1)))
    assert both != pytest.approx(turned, abs=1e-3)


def test_an_image_takes_its_tokens(gateway: RealGateway) -> None:
    """As many as the tower gives, for each of three."""
    answers = [ask(gateway, *[image(1)] * count, text("a")) for count in (1, 2, 3)]
    first, second, third = (answer.json()["usage"]["prompt_tokens"] for answer in answers)
    assert (second - first, third - second) == (IMAGE_TOKENS, IMAGE_TOKENS)


def test_images_in_a_file_of_any_kind_are_the_same_image(gateway: RealGateway) -> None:
    """PNG, lossless WebP, a palette, and one on its side: one answer."""
    made = image_files.opened(file(3))
    wanted = said(ask(gateway, image(3), text("what?")))
    exif = image_files.Image.Exif()
    exif[0x0112] = 8
    turned = made.transpose(image_files.Image.Transpose.ROTATE_270)
    for data in (
        image_files.file_of(made, "WEBP"),
        image_files.file_of(made.quantize(256), "GIF"),
        image_files.file_of(turned, "PNG", exif=exif.tobytes()),
    ):
        assert said(ask(gateway, image_files.part_of(data), text("what?"))) == pytest.approx(wanted, abs=1e-3)


def test_every_api_shows_the_model_the_same(gateway: RealGateway, token: int) -> None:
    """Chat, a stream, responses and messages count the same prompt for the same question."""
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file(4)).decode()}
    with gateway.client() as client:
        chat = client.post("/v1/chat/completions", json=body_of(image(4), text("what?"))).json()["usage"]
        parts = [
            {"type": "input_image", "image_url": image(4)["image_url"]["url"]},
            {"type": "input_text", "text": "what?"},
        ]
        responses = {"model": "look", "input": [{"role": "user", "content": parts}], "max_output_tokens": 6}
        told = client.post("/v1/responses", json=responses).json()
        assert told["usage"]["input_tokens"] == chat["prompt_tokens"] + 1  # vLLM begins these with `<s>`
        message = {
            "model": "look",
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}, text("what?")]}],
        }
        told = client.post("/v1/messages", json=message | {"max_tokens": 6}).json()
        assert told["usage"]["input_tokens"] == chat["prompt_tokens"]
        told = client.post("/v1/messages/count_tokens", json=message).json()
        assert told["input_tokens"] == chat["prompt_tokens"]
        tokens = client.post("/tokenize", json=body_of(image(4), text("what?"))).json()["tokens"]
        assert tokens.count(token) == IMAGE_TOKENS
    streamed = ask(gateway, image(4), text("what?"), stream=True, stream_options={"include_usage": True})
    assert f'"prompt_tokens":{chat["prompt_tokens"]}' in streamed.text
    assert "error" not in streamed.text


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_and_images_say_what_the_chat_says(
    gateway: RealGateway, token: int, stream: bool, room: bool
) -> None:
    """`images` of `/v1/completions`: one token for each in the prompt, or with room for it as vLLM makes it."""
    parts = image(1), text("what?"), image(2)
    wanted = said(ask(gateway, *parts))
    with gateway.client() as client:
        whole = client.post("/tokenize", json=body_of(*parts)).json()["tokens"]
        assert whole.count(token) == 2 * IMAGE_TOKENS
        ones = [at for at, one in enumerate(whole) if (one, whole[at - 1]) != (token, token)]
        prompt = whole if room else [whole[at] for at in ones]
        body = {
            "model": "look",
            "prompt": prompt,
            "images": [part["image_url"]["url"] for part in parts[::2]],
        }
        body |= {"max_tokens": 6, "temperature": 0, "logprobs": 1, "stream": stream}
        answer = client.post("/v1/completions", json=body)
        few = client.post("/v1/completions", json=body | {"prompt": [one for one in prompt if one != token]})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line and "[DONE]" not in line]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    found = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    assert found == pytest.approx(wanted, abs=1e-3)
    assert refused(few)["param"] == "prompt"


def test_nobody_calls_one_image_by_another_s_name(gateway: RealGateway) -> None:
    """Two images under one `uuid` of the client's are still two, also when the first is cached under ours."""
    question = text("what is in this picture, and where? " * 4)
    wanted = [said(ask(gateway, image(seed) | {"uuid": "mine"}, question)) for seed in (5, 6)]
    assert wanted[0] != pytest.approx(wanted[1], abs=1e-3)
    again = [said(ask(gateway, image(seed) | {"uuid": "yours"}, question)) for seed in (5, 6)]
    assert again[0] == pytest.approx(wanted[0], abs=1e-3)
    assert again[1] == pytest.approx(wanted[1], abs=1e-3)


def test_what_was_processed_once_is_processed_no_more(gateway: RealGateway) -> None:
    """The second request with an image is a hit of vLLM's processor cache, counted for this engine."""
    names = ("vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total")
    first = said(ask(gateway, image(7), text("a")))
    before = [metric(gateway, name) for name in names]
    assert said(ask(gateway, image(7), text("a"))) == pytest.approx(first, abs=1e-3)
    assert said(ask(gateway, image(7), text("b"))) != pytest.approx(first, abs=1e-3)
    after = [metric(gateway, name) for name in names]
    assert [late - early for late, early in zip(after, before, strict=True)] == [2.0, 2.0]


STOLEN = [
    ("text of two parts", [text("a <ima"), text("ge> b")]),
    ("text of two parts, before an image", [text("a <ima"), text("ge> b"), image(8)]),
    ("text of two parts, after an image", [image(8), text("a <ima"), text("ge> b")]),
]


@pytest.mark.parametrize(("name", "parts"), STOLEN, ids=[name for name, _ in STOLEN])
def test_a_token_that_came_about_by_itself_is_refused(
    gateway: RealGateway, name: str, parts: list[dict[str, Any]]
) -> None:
    """No text alone holds it, but the prompt does: it would steal the image's place."""
    assert refused(ask(gateway, *parts))["code"] in ("invalid_request", "images_misplaced")
    assert said(ask(gateway, image(8), text("b")))


def test_image_tokens_of_the_client_s_own_are_refused(gateway: RealGateway, token: int) -> None:
    """As token ids, one or as many as an image has, and as text; id by id the others pass."""
    with gateway.client() as client:
        for prompt in ([5, token, 7], [token] * IMAGE_TOKENS, "a <image> b", ["a", "b<image>"]):
            answer = client.post("/v1/completions", json={"model": "look", "prompt": prompt, "max_tokens": 2})
            error = refused(answer)
            assert "'<image>'" in error["message"]
            assert error["param"].startswith("prompt")
        body = {"model": "look", "prompt": [5, token - 1, 7], "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_token_ids_slipped_in_beside_a_chat_are_not_taken(gateway: RealGateway, token: int) -> None:
    """vLLM would take them for the prompt; a client's are dropped."""
    wanted = said(ask(gateway, text("what?")))
    slipped = {"prompt_token_ids": [5, token, 7]}
    assert said(ask(gateway, text("what?"), kv_transfer_params=slipped)) == pytest.approx(wanted, abs=1e-3)


BAD = {
    "bomb": [{"image_url": image_files.url_of(image_files.png(65_500, 65_500, image_files.pixels_of(8, 8)))}],
    "1x1": [image_files.part_of(image_files.file_of(image_files.image(1, 1)))],
    "1x65000": [image_files.part_of(image_files.png(1, 65_000))],
    "animated": [image_files.part_of(image_files.animated("WEBP"))],
    "truncated": [image_files.part_of(file(1)[:90])],
    "disguised": [image_files.part_of(image_files.SVG)],
    "too many": [image(1)] * 4,
    "by id alone": [{"type": "image_url", "image_url": None, "uuid": "x"}],
    "embeddings": [{"type": "image_embeds", "image_embeds": "AAAA"}],
    "local file": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
    "sound": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
    "typed": [text("<image>"), image(1)],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_the_engine_untouched(gateway: RealGateway, name: str) -> None:
    """A 400, and the same engine answers on, which has seen no request."""
    seen = metric(gateway, "vllm:mm_cache_queries_total")
    prompts = metric(gateway, "vllm:prompt_tokens_total")
    assert refused(ask(gateway, *BAD[name]))["message"]
    assert metric(gateway, "vllm:mm_cache_queries_total") == seen
    assert metric(gateway, "vllm:prompt_tokens_total") == prompts
    assert metric(gateway, "baton_engine_restarts_total") == 0
    assert metric(gateway, "baton_engine_up") == 1


def test_an_image_of_a_refused_request_is_not_remembered_as_sent(gateway: RealGateway) -> None:
    """The prompt is too long only once its image is written out, which is after vLLM has cached that image."""
    long = filler(gateway, LENGTH - 4)
    error = refused(ask(gateway, image(9), long, max_tokens=1))
    assert error["code"] == "context_length_exceeded"
    lone = said(ask(gateway, image(9), text("what?")))
    assert said(ask(gateway, image(9), text("what?"))) == pytest.approx(lone, abs=1e-3)


def test_an_image_of_a_cancelled_request_is_not_remembered_as_sent(gateway: RealGateway) -> None:
    """Clients that go away at any moment, and then others who send the same images."""
    seeds = range(100, 124)
    for number, seed in enumerate(seeds):
        patience = httpx.Timeout(30, read=0.001 + number * 0.002)
        with gateway.client(timeout=patience) as client, contextlib.suppress(httpx.TimeoutException):
            client.post("/v1/chat/completions", json=body_of(image(seed), text("what?")))
    for seed in seeds:
        assert said(ask(gateway, image(seed), text("what?")))


def test_the_same_new_image_may_come_many_times_at_once(gateway: RealGateway) -> None:
    """Twelve requests with one image that nobody has sent before: one answer."""
    answers: list[httpx.Response] = []

    def one() -> None:
        answers.append(ask(gateway, image(200), text("what?")))

    threads = [threading.Thread(target=one) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = said(answers[0])
    assert all(said(answer) == pytest.approx(wanted, abs=1e-3) for answer in answers)


def test_large_images_hold_nobody_up(gateway: RealGateway) -> None:
    """Six photos of 20 megapixels, one on its side: read, written anew and processed beside the event loop."""
    exif = image_files.Image.Exif()
    exif[0x0112] = 6
    photo = image_files.image(5000, 4000)
    bodies = [
        image_files.part_of(image_files.file_of(photo, "JPEG", quality=90 - number, exif=exif.tobytes()))
        for number in range(6)
    ]
    answers: list[httpx.Response] = []
    with asked_all_the_time(gateway, "six photos"):
        threads = [
            threading.Thread(target=lambda part=part: answers.append(ask(gateway, part, text("what?"))))
            for part in bodies
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(said(answer) for answer in answers)


ODD: list[dict[str, Any]] = [
    {"n": 3, "temperature": 1.0},
    {"use_beam_search": True, "n": 2, "logprobs": False},
    {"prompt_logprobs": 1},
    {"truncate_prompt_tokens": 5},
    {"truncate_prompt_tokens": 12},
    {"truncate_prompt_tokens": -1},
    {"echo": True},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"chat_template_kwargs": {"messages": []}},
    {"stream": True, "n": 2},
]


@pytest.mark.parametrize("fields", ODD, ids=lambda fields: next(iter(fields)))
def test_odd_requests_with_an_image_harm_no_engine(gateway: RealGateway, fields: dict[str, Any]) -> None:
    """Answered or refused, also where the model is made to say what stands for an image; never a 5xx."""
    for seed in (300, 301, 300):
        answer = ask(gateway, image(seed), text("what?"), **fields)
        assert answer.status_code in (200, 400, 422), answer.text
        assert "event: error" not in answer.text
    assert said(ask(gateway, image(300), text("what?")))
    assert metric(gateway, "baton_engine_restarts_total") == 0


def test_a_model_may_say_what_stands_for_an_image(gateway: RealGateway, token: int) -> None:
    """Its own words are no image: they take nobody's place, and end no engine."""
    for fields in ({"logit_bias": {str(token): 100}}, {"allowed_token_ids": [token]}):
        assert said(ask(gateway, image(320), text("what?"), max_tokens=12, **fields))
    assert metric(gateway, "baton_engine_restarts_total") == 0


@pytest.mark.parametrize("role", ["system", "developer", "assistant", "tool", "user"])
def test_an_image_in_anybody_s_message_is_seen_or_refused(gateway: RealGateway, role: str) -> None:
    """Where the template has no place for it that is a 400, not an image that is silently left out."""
    told: dict[str, Any] = {"role": role, "content": [text("see: "), image(310)]}
    if role == "tool":
        told["tool_call_id"] = "a"
    messages = [told, {"role": "user", "content": "what?"}]
    with gateway.client() as client:
        answer = client.post("/v1/chat/completions", json=body_of(messages=messages))
    if answer.status_code == 200:
        assert answer.json()["usage"]["prompt_tokens"] > IMAGE_TOKENS + 8
    else:
        assert refused(answer)["code"] in ("images_misplaced", "invalid_image")
    assert said(ask(gateway, image(310), text("what?")))
