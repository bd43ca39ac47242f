"""Models with image tokens of other kinds through a real gateway: Fuyu, and BLIP-2 of vLLM's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateways import RealGateway
from noise import part, picture, user

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
kv_cache_memory = "64MiB"
[engines.args]
max_model_len = 512
dtype = "float32"
[engines.serving]
chat_template = "{{% for message in messages %}}{{{{ message['content'] }}}} {{% endfor %}}"
"""
NAMES = ("fuyu", "blip2")
ONE, OTHER = picture(1, 40, 30), picture(2, 40, 30)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    folder = tmp_path_factory.mktemp("more")
    for name in NAMES:
        (folder / name).mkdir()
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", MAKE, here, str(folder)], check=True, capture_output=True)
    settings = "".join(ENGINE.format(name=name, folder=folder) for name in NAMES)
    (folder / "baton.toml").write_text(f'[handoffs]\nstore = "file:{folder}/store"\n{settings}')
    with RealGateway(["--config", str(folder / "baton.toml")], folder) as running:
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
    asked = "what is where? "
    first = chat(gateway, name, part(ONE), asked)
    assert chat(gateway, name, part(ONE), asked) == pytest.approx(first, abs=1e-3)
    assert chat(gateway, name, part(OTHER), asked) != pytest.approx(first, abs=1e-3)
    assert chat(gateway, name, asked) != pytest.approx(first, abs=1e-3)


@pytest.mark.parametrize("name", ["blip2"])  # Fuyu takes images in chats only
def test_a_plain_prompt_and_its_image(gateway: RealGateway, name: str) -> None:
    """Text and token ids say the same; the model puts the image at the beginning itself."""
    url = part(ONE)["image_url"]["url"]
    found = []
    ids = post(gateway, "/tokenize", {"model": name, "prompt": "what is where?"}).json()["tokens"]
    for prompt in ("what is where?", ids):
        body = {"model": name, "prompt": prompt, "images": [url], "logprobs": 1}
        answer = post(gateway, "/v1/completions", body)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["logprobs"]["token_logprobs"])
    assert found[0] == pytest.approx(found[1], abs=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_two_images_are_one_too_many(gateway: RealGateway, name: str) -> None:
    """Refused before the engine, which goes on."""
    body = {"model": name, "messages": [user(part(ONE), part(OTHER), "what?")]}
    answer = post(gateway, "/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    chat(gateway, name, "what?")


@pytest.mark.parametrize("name", ["blip2"])  # Fuyu takes images in chats only
def test_a_context_that_begins_with_an_image_goes_on(gateway: RealGateway, name: str) -> None:
    """B says what it says of the whole prompt, and A's image is not encoded for it."""
    url = part(ONE)["image_url"]["url"]
    begun = {"model": name, "prompt": "what is where? ", "images": [url]}
    left = post(gateway, "/v1/completions", begun | {"handoff": {"save": {"scope": "prompt"}}})
    assert left.status_code == 200, left.text
    source = {"from": left.json()["handoff"]["id"]}
    more = {"model": name, "prompt": "and why?", "logprobs": 1, "handoff": source}
    answer = post(gateway, "/v1/completions", more).json()
    assert answer["handoff"]["source"]["outcome"] in ("loaded", "resident"), answer
    ids = post(gateway, "/tokenize", {"model": name, "prompt": begun["prompt"]}).json()["tokens"]
    rest = post(gateway, "/tokenize", {"model": name, "prompt": "and why?", "add_special_tokens": False})
    whole = {"model": name, "prompt": ids + rest.json()["tokens"], "images": [url], "logprobs": 1}
    wanted = post(gateway, "/v1/completions", whole).json()
    found, expected = (one["choices"][0]["logprobs"]["token_logprobs"] for one in (answer, wanted))
    assert found == pytest.approx(expected, abs=1e-3)
