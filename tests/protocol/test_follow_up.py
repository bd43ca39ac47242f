"""`follow_up` of `POST /pooling`: a chat model is asked about a plugin's result; both results come back."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from support.gateways import FakeGateway, run_fake
from support.sample_plugins import SECRET, Current, plugin

from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.http.follow_up import with_description
from baton.pooling.plugin import Description

QUESTION = "What is to be seen?"
BODY: dict[str, Any] = {"model": "words", "messages": [{"role": "user", "content": QUESTION}]}


def chat_with(content: Any) -> dict[str, Any]:
    return {"model": "words", "messages": [{"role": "user", "content": content}]}


PIXEL = Description("Two fields.", ("image/png", b"png"))


class Describing(Current):
    """Describes its sum, with a picture.

    Attributes:
        asked: one `True` for each request that `for_description` has seen.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.asked: list[bool] = []

    def for_description(self, data: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(True)
        return data

    def describe(self, output: dict[str, Any]) -> tuple[str, tuple[str, Path] | None]:
        self.threads.add("describe")
        if output["sum"] > 1:
            raise RuntimeError(f"cannot open {SECRET}")
        picture = self._folder / "sum.png"
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, "PNG")
        picture.write_bytes(file.getvalue())
        return f"The sum is {output['sum']:.2f}.", ("image/png", picture)


@pytest.fixture
def describing(tmp_path: Path) -> Describing:
    return Describing(tmp_path)


def gateway_of(instance: Any, behaviour: FakeBehaviour | None = None) -> Any:
    geo = FakeEngine("geo", pooling=True, plugin=plugin(instance))
    return run_fake(geo, FakeEngine("words", behaviour=behaviour or FakeBehaviour()))


def send(gateway: FakeGateway, follow_up: object, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    body = {"model": "geo", "data": {"numbers": [0.03, 0.01]}, "follow_up": follow_up} | more
    with gateway.client() as client:
        return client.post("/pooling", json=body, headers=headers)


def test_both_results_come_back(describing: Describing) -> None:
    """The plugin's data as without `follow_up`, and a whole chat answer beside it."""
    with gateway_of(describing) as gateway:
        response = send(gateway, BODY)
        asked = gateway.engine("words").bodies[-1]
    answer = response.json()
    assert response.status_code == 200
    assert answer["data"]["sum"] == pytest.approx(0.04)
    assert answer["follow_up"]["object"] == "chat.completion"
    assert describing.asked == [True]
    assert len(describing.forgotten) == 1
    assert asked["messages"] == [{"role": "user", "content": f"The sum is 0.04.\n{QUESTION}"}]


def test_a_plugin_describes_only_what_a_follow_up_asks_about(describing: Describing) -> None:
    """Without `follow_up` neither hook is called."""
    with gateway_of(describing) as gateway, gateway.client() as client:
        answer = client.post("/pooling", json={"model": "geo", "data": {"numbers": [0.03]}}).json()
    assert set(answer) == {"request_id", "created_at", "data"}
    assert describing.asked == []
    assert "describe" not in describing.threads


@pytest.mark.parametrize(
    ("follow_up", "param"),
    [
        ("words", "follow_up"),
        ([], "follow_up"),
        ({"model": "words"}, "follow_up.messages"),
        ({"model": "words", "messages": []}, "follow_up.messages"),
        ({"model": "words", "messages": "hello"}, "follow_up.messages"),
        ({"model": "words", "messages": [{"role": "system", "content": "x"}]}, "follow_up.messages"),
        ({"messages": BODY["messages"]}, "follow_up.model"),
        *((chat_with(content), "follow_up.messages[0]") for content in (5, True, {"a": 1}, 1.5)),
        ({"model": "words", "messages": [*BODY["messages"], "hello"]}, "follow_up.messages[1]"),
        (BODY | {"model": "geo"}, "follow_up.model"),
        (BODY | {"stream": True}, "follow_up.stream"),
    ],
)
def test_what_is_no_chat_is_refused_before_the_plugin_begins(
    describing: Describing, follow_up: Any, param: str
) -> None:
    """With the field that is wrong."""
    with gateway_of(describing) as gateway:
        response = send(gateway, follow_up)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert describing.threads == set()


@pytest.mark.parametrize("model", ["geo", "words"])
def test_the_fields_former_name_is_refused_with_the_new_one(describing: Describing, model: str) -> None:
    """`then`, before the plugin begins; on a model without a plugin, too."""
    body = {"model": model, "data": {"numbers": [0.03]}, "input": "x", "then": BODY}
    with gateway_of(describing) as gateway, gateway.client() as client:
        response = client.post("/pooling", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "then")
    assert error["message"] == "'then' is called 'follow_up' now: rename the field."
    assert describing.threads == set()


def test_an_unknown_model_is_refused_before_the_plugin_begins(describing: Describing) -> None:
    """As on every other route."""
    with gateway_of(describing) as gateway:
        response = send(gateway, BODY | {"model": "nobody"})
    assert response.status_code == 404
    assert describing.threads == set()


def test_a_plugin_without_the_hook_refuses_a_follow_up() -> None:
    """A plugin without the hook, before it begins; a model without a plugin, too."""
    with gateway_of(Current()) as gateway:
        refused = send(gateway, BODY)
        plain = send(gateway, BODY, model="words", input="x")
    assert refused.json()["error"]["code"] == "operation_unsupported"
    assert plain.status_code == 400


def test_both_results_come_as_json_only(describing: Describing) -> None:
    """A file holds no second result."""
    with gateway_of(describing) as gateway:
        response = send(gateway, BODY, headers={"accept": "image/tiff"})
    assert response.json()["error"]["code"] == "not_acceptable"
    assert describing.threads == set()


def test_what_would_steer_the_engine_is_dropped_inside_too(describing: Describing) -> None:
    """`follow_up` is a request like any other."""
    with gateway_of(describing) as gateway:
        assert send(gateway, BODY | {"kv_transfer_params": {"a": 1}, "cache_salt": "x"}).status_code == 200
        asked = gateway.engine("words").bodies[-1]
    assert "kv_transfer_params" not in asked
    assert "cache_salt" not in asked


def test_a_chat_that_fails_does_not_cost_the_plugins_result(describing: Describing) -> None:
    """What is asked for too much is an error in `follow_up`, with its code and this request's id."""
    with gateway_of(describing) as gateway:
        answer = send(gateway, BODY | {"n": 10_000}).json()
    assert answer["data"]["sum"] == pytest.approx(0.04)
    assert answer["follow_up"]["error"]["code"] == "invalid_request"
    assert answer["follow_up"]["error"]["request_id"] == answer["request_id"]


def test_a_plugin_that_fails_to_describe_is_a_failure_of_the_plugin(describing: Describing) -> None:
    """Its text stays inside, and its request is forgotten."""
    with gateway_of(describing) as gateway:
        response = send(gateway, BODY, data={"numbers": [0.1] * 11})
    assert response.json()["error"]["code"] == "plugin_failed"
    assert SECRET not in response.text
    assert len(describing.forgotten) == 1


def test_the_picture_stands_before_the_words_and_they_before_the_question() -> None:
    """For a model that takes images, whatever form the message had."""
    url = "data:image/png;base64," + base64.b64encode(b"png").decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    (plain,) = with_description(BODY, PIXEL, takes_images=True)["messages"]
    assert plain["content"] == [image, {"type": "text", "text": f"Two fields.\n{QUESTION}"}]
    parts = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
    (typed,) = with_description(BODY | {"messages": [parts]}, PIXEL, takes_images=True)["messages"]
    assert typed["content"] == [image, {"type": "text", "text": "Two fields.\n"}, *parts["content"]]


def test_a_model_without_eyes_gets_the_words() -> None:
    """And nothing of the picture."""
    (message,) = with_description(BODY, PIXEL, takes_images=False)["messages"]
    assert message["content"] == f"Two fields.\n{QUESTION}"


def test_the_first_message_of_the_user_is_where_it_is_shown() -> None:
    """What stands before and after stays as it is, and so does the request."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]
    body = BODY | {"messages": messages}
    found = with_description(body, PIXEL, takes_images=False)["messages"]
    assert [message["content"] for message in found] == ["Be brief.", "Two fields.\nOne?", "Yes.", "Two?"]
    assert messages[1]["content"] == "One?"
