"""Models with image tokens of other kinds through a real gateway: Fuyu, and BLIP-2 of vLLM's own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import RealGateway
from support.random_images import part, picture, user

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(600)]

MAKE = "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import tiny_vision; "
MAKE += "folder = pathlib.Path(sys.argv[2]); "
MAKE += (
    "tiny_vision.make_fuyu(folder / 'fuyu', spare=200); tiny_vision.make_blip2(folder / 'blip2', spare=200)"
)
ENGINE = """
[[engines]]
name = "{name}"
model = "{folder}/{name}"
handoff = true
auto = "off"
kv_cache_memory = "64MiB"
[engines.args]
max_model_len = 512
dtype = "float32"
[engines.serving]
chat_template = "{{% for message in messages %}}{{{{ message['content'] }}}} {{% endfor %}}"
"""
NAMES = ("fuyu", "blip2")
ONE, OTHER = picture(1, 40, 30), picture(2, 40, 30)
URL = part(ONE)["image_url"]["url"]
ASKED = "what is where? "


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    folder = tmp_path_factory.mktemp("more")
    for name in NAMES:
        (folder / name).mkdir()
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", MAKE, here, str(folder)], check=True, capture_output=True)
    settings = "".join(ENGINE.format(name=name, folder=folder) for name in NAMES)
    (folder / "baton.toml").write_text(f'[handoffs]\nstore = "file:{folder}/store"\n{settings}')
    with RealGateway(["--config", str(folder / "baton.toml")], folder, forked=True) as running:
        running.wait_until_ready()
        yield running


def post(gateway: RealGateway, path: str, body: dict[str, Any]) -> httpx.Response:
    with gateway.client() as client:
        return client.post(path, json={"max_tokens": 6, "temperature": 0} | body)


def chat(gateway: RealGateway, model: str, *parts: Any, **more: Any) -> list[float]:
    body = {"model": model, "messages": [user(*parts)], "logprobs": True}
    answer = post(gateway, "/v1/chat/completions", body | more)
    assert answer.status_code == 200, answer.text
    return [token["logprob"] for token in answer.json()["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_in_the_image_decides_what_is_said(gateway: RealGateway, name: str) -> None:
    """Again the same from the caches; another image says something else, none something else again."""
    first = chat(gateway, name, part(ONE), ASKED)
    assert chat(gateway, name, part(ONE), ASKED) == pytest.approx(first, abs=1e-3)
    assert chat(gateway, name, part(OTHER), ASKED) != pytest.approx(first, abs=1e-3)
    assert chat(gateway, name, ASKED) != pytest.approx(first, abs=1e-3)


def complete(gateway: RealGateway, model: str, prompt: object, **more: Any) -> dict[str, Any]:
    answer = post(gateway, "/v1/completions", {"model": model, "prompt": prompt, "logprobs": 1} | more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def logprobs(answer: dict[str, Any]) -> Any:
    return pytest.approx(answer["choices"][0]["logprobs"]["token_logprobs"], abs=1e-3)


def tokens(gateway: RealGateway, model: str, text: str, *, first: bool = True) -> list[int]:
    body = {"model": model, "prompt": text, "add_special_tokens": first}
    found: list[int] = post(gateway, "/tokenize", body).json()["tokens"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_prompt_and_its_image(gateway: RealGateway, name: str) -> None:
    """Text, token ids and a chat say the same; the model puts the image at the beginning itself."""
    said = [
        logprobs(complete(gateway, name, prompt, images=[URL]))
        for prompt in (ASKED, tokens(gateway, name, ASKED))
    ]
    assert said[0] == said[1].expected
    assert logprobs(complete(gateway, name, ASKED)) != said[0].expected


@pytest.mark.parametrize("name", NAMES)
def test_two_images_are_one_too_many(gateway: RealGateway, name: str) -> None:
    """Refused before the engine, which goes on."""
    body = {"model": name, "messages": [user(part(ONE), part(OTHER), "what?")]}
    answer = post(gateway, "/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    chat(gateway, name, "what?")


def encoded(gateway: RealGateway, model: str) -> str:
    """How many images the engine has encoded."""
    with gateway.client() as client:
        page = client.get("/metrics").text
    (value,) = re.findall(rf'^baton_images_encoded_total{{engine="{model}"}} (\S+)$', page, re.MULTILINE)
    return str(value)


def whole(name: str, ids: list[int]) -> list[int]:
    """Return an answer's prompt as it can be sent with its image: Fuyu takes it expanded, BLIP-2 without its four tokens."""
    return ids if name == "fuyu" else ids[4:]


@pytest.mark.parametrize("name", NAMES)
def test_a_context_that_begins_with_an_image_goes_on(gateway: RealGateway, name: str) -> None:
    """B says what it says of the whole prompt, and A's image is not encoded for it."""
    save = {"handoff": {"save": {"scope": "prompt"}}, "return_token_ids": True}
    left = complete(gateway, name, ASKED, images=[URL], **save)
    source = {"handoff": {"from": left["handoff"]["id"]}}
    before = encoded(gateway, name)
    answer = complete(gateway, name, "and why?", **source)
    assert answer["handoff"]["source"]["outcome"] in ("loaded", "resident"), answer
    assert encoded(gateway, name) == before
    ids = left["choices"][0]["prompt_token_ids"] + tokens(gateway, name, "and why?", first=False)
    wanted = complete(gateway, name, whole(name, ids), images=[URL])
    assert answer["choices"][0]["text"] == wanted["choices"][0]["text"]
    assert logprobs(answer) == logprobs(wanted).expected
    other = complete(gateway, name, whole(name, ids), images=[part(OTHER)["image_url"]["url"]])
    assert logprobs(answer) != logprobs(other).expected


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_about_an_image_goes_on(gateway: RealGateway, name: str) -> None:
    """With new messages only; a second image has no place in these models' prompts."""
    begun = {"model": name, "messages": [user(part(ONE), ASKED)], "handoff": {"save": True}}
    left = post(gateway, "/v1/chat/completions", begun)
    assert left.status_code == 200, left.text
    more = {"model": name, "messages": [user("and why? ")], "logprobs": True, "return_token_ids": True}
    more |= {"handoff": {"from": left.json()["handoff"]["id"]}}
    answer = post(gateway, "/v1/chat/completions", more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["handoff"]["source"]["outcome"] in ("loaded", "resident")
    wanted = complete(gateway, name, whole(name, answer.json()["prompt_token_ids"]), images=[URL])
    said = [token["logprob"] for token in answer.json()["choices"][0]["logprobs"]["content"]]
    assert said == logprobs(wanted).expected
    refused = post(gateway, "/v1/chat/completions", more | {"messages": [user(part(OTHER), "and? ")]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
    chat(gateway, name, "what?")
