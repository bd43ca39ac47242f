"""One suite for every engine: what a client may count on, from the fake one and from vLLM alike."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from support import image_files
from support.gateways import run_fake
from support.remote_gateways import remote, run_near

from baton.engines.backend import Backend
from baton.engines.engine import LocalEngine, Plugin
from baton.engines.fake.engine import FakeEngine

MESSAGES = [{"role": "user", "content": "Say a few words about the sea."}]
REQUESTS = {
    "/v1/completions": {"prompt": "The sea is", "max_tokens": 6},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 6},
    "/v1/responses": {"input": "The sea is", "max_output_tokens": 6},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 6},
}
PATHS = sorted(REQUESTS)


def fakes() -> list[FakeEngine]:
    """Engines of the names that the real gateway's have."""
    geo = Plugin("baton_geo", None, lambda body: body)
    return [
        FakeEngine("smollm2"),
        FakeEngine("smollm2-fp32"),
        FakeEngine("flood-tiny", pooling=True, plugin=geo),
    ]


def test_a_server_elsewhere_has_no_member_that_only_an_engine_here_can_answer() -> None:
    """Of the two ports it has the one that all have, and no constant in place of the rest."""
    everywhere, here, elsewhere = (
        {name for name in dir(each) if not name.startswith("_")}
        for each in (Backend, LocalEngine, remote("http://127.0.0.1:9"))
    )
    assert everywhere < here <= set(dir(FakeEngine("a")))
    assert elsewhere & here == everywhere | {"forwarding"}


@pytest.fixture(scope="module", params=["fake", "remote", pytest.param("vllm", marks=pytest.mark.engine)])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    if request.param == "remote":
        with run_fake(*fakes()) as there:
            engines = (remote(there.url, name, model=name) for name in there.fleet.names)
            with run_near(*engines) as gateway, gateway.client() as client:
                yield client
    elif request.param == "fake":
        with (
            run_fake(*fakes()) as gateway,
            gateway.client() as client,
        ):
            yield client
    else:
        with request.getfixturevalue("real_gateway").client() as client:
            yield client


@pytest.fixture
def here(client: httpx.Client, request: pytest.FixtureRequest) -> httpx.Client:
    """A client of engines that run in the gateway they are asked of."""
    if request.node.callspec.params["client"] == "remote":
        pytest.skip("ids, plugins and vLLM's metrics are the other gateway's")
    return client


def body(path: str, **more: object) -> dict[str, object]:
    return {"model": "smollm2", "temperature": 0} | REQUESTS[path] | more


def text_of(path: str, answer: dict[str, object]) -> str:
    places = {
        "/v1/completions": ("choices", 0, "text"),
        "/v1/chat/completions": ("choices", 0, "message", "content"),
        "/v1/responses": ("output", 0, "content", 0, "text"),
        "/v1/messages": ("content", 0, "text"),
    }
    value: object = answer
    for step in places[path]:
        value = value[step]  # type: ignore[index]  # JSON
    return str(value)


def streamed_text(path: str, response: httpx.Response) -> str:
    said = []
    for line in response.text.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line[6:])
        if path == "/v1/completions":
            said += [choice["text"] for choice in event["choices"]]
        elif path == "/v1/chat/completions":
            said += [choice["delta"].get("content") or "" for choice in event["choices"]]
        elif event.get("type") in ("response.output_text.delta", "content_block_delta"):
            delta = event["delta"]
            said.append(delta if isinstance(delta, str) else delta["text"])
    return "".join(said)


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_in_one_piece_has_text_and_our_request_id(here: httpx.Client, path: str) -> None:
    response = here.post(path, json=body(path))
    assert response.status_code == 200, response.text
    assert text_of(path, response.json())
    assert response.headers["x-request-id"] in response.json()["id"]


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_says_the_same_as_the_answer_in_one_piece(client: httpx.Client, path: str) -> None:
    whole = text_of(path, client.post(path, json=body(path)).json())
    response = client.post(path, json=body(path, stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert streamed_text(path, response) == whole


@pytest.mark.parametrize("path", PATHS)
def test_a_missing_prompt_is_a_400_that_names_the_field(client: httpx.Client, path: str) -> None:
    response = client.post(path, json={"model": "smollm2", "max_tokens": 4})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == "invalid_request"
    assert any(word in error["message"] for word in ("prompt", "messages", "input"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_the_context_does_not_hold_is_a_400(
    client: httpx.Client, path: str, stream: bool
) -> None:
    long = "one two " * 5000
    sent = body(path, stream=stream, max_tokens=1)
    sent |= {"prompt": long} if "prompt" in sent else {"messages": [{"role": "user", "content": long}]}
    response = client.post(path, json=sent)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_a_limit_above_what_the_context_leaves_is_cut_to_that(client: httpx.Client, path: str) -> None:
    """The header says to what; the answer, which may go on for minutes, is left."""
    with client.stream("POST", path, json=body(path, max_tokens=100_000, stream=True)) as response:
        assert response.status_code == 200
        assert 0 < int(response.headers["x-baton-max-tokens"]) < 8192


@pytest.mark.parametrize("value", [-1, 0, "many", 1.5])
def test_a_bad_token_limit_is_a_400_that_names_it(client: httpx.Client, value: object) -> None:
    response = client.post("/v1/completions", json=body("/v1/completions", max_tokens=value))
    assert response.status_code == 400, response.text
    assert "max_tokens" in response.json()["error"]["message"]


def test_usage_adds_up_and_comes_last_in_a_stream(client: httpx.Client) -> None:
    sent = body("/v1/completions", stream=True, stream_options={"include_usage": True})
    lines = [line for line in client.post("/v1/completions", json=sent).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2][6:])
    usage = last["usage"]
    assert last["choices"] == []
    assert usage["completion_tokens"] == 6
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_tenants_tokens_are_counted_as_the_engine_used_them(
    client: httpx.Client, path: str, stream: bool
) -> None:
    """Whichever protocol, and whether the answer came at once or in pieces."""
    before = settled_tokens(client)
    assert client.post(path, json=body(path, stream=stream)).status_code == 200
    deadline = time.monotonic() + 20  # counted once the request is over, a moment after its last byte
    while (after := tenant_tokens(client))["generated"] == before[
        "generated"
    ] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after["generated"] - before["generated"] == 6
    assert after["prompt"] - before["prompt"] >= 3


def settled_tokens(client: httpx.Client) -> dict[str, float]:
    """What is counted once nothing of earlier requests is still to come."""
    found = tenant_tokens(client)
    while True:
        time.sleep(0.3)
        if (now := tenant_tokens(client)) == found:
            return found
        found = now


def tenant_tokens(client: httpx.Client) -> dict[str, float]:
    page = client.get("/metrics").text
    found = re.findall(r'^baton_tenant_tokens_total\{kind="(\w+)",tenant="local"\} (\S+)$', page, re.M)
    return {"prompt": 0.0, "generated": 0.0} | {kind: float(value) for kind, value in found}


def test_tokens_and_text_can_be_counted(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"model": "smollm2", "prompt": "The sea is"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 3
    text = client.post("/detokenize", json={"model": "smollm2", "tokens": tokens["tokens"]})
    assert text.status_code == 200
    counted = client.post("/v1/messages/count_tokens", json={"model": "smollm2", "messages": MESSAGES})
    assert counted.json()["input_tokens"] > 3


def test_an_embedding_from_a_text_model_is_refused(client: httpx.Client) -> None:
    response = client.post("/v1/embeddings", json={"model": "smollm2", "input": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "operation_unsupported")


def test_an_image_for_a_text_model_is_refused(client: httpx.Client) -> None:
    content = [image_files.part_of(image_files.file_of(image_files.image()))]
    for path in ("/v1/chat/completions", "/tokenize"):
        messages = {"model": "smollm2", "messages": [{"role": "user", "content": content}]}
        error = client.post(path, json=messages).json()["error"]
        assert (error["code"], error["param"]) == (
            "operation_unsupported",
            "messages[0].content[0].image_url",
        )


def test_every_model_is_listed_and_answers_under_its_own_name(client: httpx.Client) -> None:
    listed = [card["id"] for card in client.get("/v1/models").json()["data"]]
    assert listed == ["smollm2", "smollm2-fp32", "flood-tiny"]
    for name in ("smollm2", "smollm2-fp32"):
        assert (
            client.post("/v1/completions", json=body("/v1/completions", model=name)).json()["model"] == name
        )


def test_requests_at_once_on_two_engines_are_each_answered(client: httpx.Client) -> None:
    answers: list[tuple[str, httpx.Response]] = []

    def ask(name: str) -> None:
        sent = body("/v1/completions", model=name, stream=True)
        answers.append((name, client.post("/v1/completions", json=sent)))

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("smollm2", "smollm2-fp32") * 6]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 12
    for name, response in answers:
        assert response.text.endswith("data: [DONE]\n\n")
        assert f'"model": "{name}"' in response.text.replace('":"', '": "')


def test_an_engine_s_metrics_carry_its_name(here: httpx.Client) -> None:
    page = here.get("/metrics").text
    for name in ("smollm2", "smollm2-fp32"):
        assert f'baton_engine_up{{engine="{name}"}} 1.0' in page
        assert f'vllm:generation_tokens_total{{engine="0",model_name="{name}"}}' in page
    assert page.count("# TYPE vllm:generation_tokens_total counter") == 1


def test_a_plugins_model_takes_data_and_says_so(here: httpx.Client) -> None:
    refused = here.post("/pooling", json={"model": "flood-tiny", "input": "where is the water?"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    for path in ("/v1/embeddings", "/classify"):
        refused = here.post(path, json={"model": "flood-tiny", "input": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "operation_unsupported")
    (row,) = [
        row
        for row in here.get("/v1/plugins").json()["data"]
        if (row["group"], row["name"]) == ("vllm.io_processor_plugins", "baton_geo")
    ]
    assert row["engines"] == ["flood-tiny"]
