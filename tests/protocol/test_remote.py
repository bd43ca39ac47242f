"""Requests for an engine that is another Baton: what its clients get is what that one's own clients would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from starlette.responses import JSONResponse
from support.gateways import FakeGateway, free_port, run_fake
from support.image_requests import LOOKS, URL
from support.raw_requests import connect, metric, request, wait_for
from support.remote_gateways import (
    OtherServer,
    asking,
    both,
    complete,
    completion,
    other_server,
    remote,
    run_near,
)

from baton.engines.fake.engine import FakeBehaviour, FakeEngine

CHAT = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 4}
REQUESTS = {
    "/v1/completions": {"prompt": "one two three", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "one two three", "max_output_tokens": 4},
    "/v1/messages": CHAT,
}
ALL = REQUESTS | {
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/embeddings": {"input": "one two"},
    "/pooling": {"input": "one two"},
    "/classify": {"input": "one two"},
    "/score": {"queries": "one", "documents": ["two"]},
    "/v1/rerank": {"query": "one", "documents": ["two"]},
    "/tokenize": {"prompt": "one two"},
    "/detokenize": {"tokens": [1, 2]},
}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[FakeGateway, FakeGateway]]:
    with run_fake(FakeEngine("far"), FakeEngine("far-pooling", pooling=True)) as there:
        near = remote(there.url, aliases=("other-name",))
        pooling = remote(there.url, "near-pooling", model="far-pooling")
        with run_near(near, pooling) as here:
            yield here, there


@pytest.fixture(scope="module")
def beside() -> Iterator[tuple[FakeGateway, OtherServer]]:
    with other_server() as server, run_near(remote(server.url)) as gateway:
        yield gateway, server


@pytest.fixture
def asked(beside: tuple[FakeGateway, OtherServer]) -> Iterator[tuple[httpx.Client, OtherServer]]:
    with asking(*beside) as client_and_server:
        yield client_and_server


POOLING = {"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/rerank"}


def without_ids(answer: object) -> object:
    if isinstance(answer, dict):
        dropped = ("id", "created", "created_at")
        return {key: without_ids(value) for key, value in answer.items() if key not in dropped}
    return [without_ids(each) for each in answer] if isinstance(answer, list) else answer


def events(response: httpx.Response) -> list[object]:
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return [without_ids(json.loads(line[6:])) if line[6:] != "[DONE]" else "[DONE]" for line in lines]


@pytest.mark.parametrize("path", ALL)
def test_an_answer_is_the_other_gateways_under_our_models_name(
    pair: tuple[FakeGateway, FakeGateway], path: str
) -> None:
    here, there = pair
    kind = "-pooling" if path in POOLING else ""
    with here.client() as client, there.client() as direct:
        answer = client.post(path, json={"model": f"near{kind}"} | ALL[path])
        plain = direct.post(path, json={"model": f"far{kind}"} | ALL[path])
    assert answer.status_code == plain.status_code == 200, answer.text
    expected = plain.json() | ({"model": f"near{kind}"} if "model" in plain.json() else {})
    assert without_ids(answer.json()) == without_ids(expected)
    assert there.engine(f"far{kind}").bodies[-2]["model"] == f"far{kind}"


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_is_the_other_gateways_event_for_event(
    pair: tuple[FakeGateway, FakeGateway], path: str, usage: bool
) -> None:
    here, there = pair
    more: dict[str, object] = {"stream": True}
    if usage and "completions" in path:
        more["stream_options"] = {"include_usage": True}
    with here.client() as client, there.client() as direct:
        answer = events(client.post(path, json={"model": "near"} | REQUESTS[path] | more))
        plain = events(direct.post(path, json={"model": "far"} | REQUESTS[path] | more))
    assert json.dumps(answer) == json.dumps(plain).replace('"model": "far"', '"model": "near"')


def test_the_models_are_listed_with_what_the_other_gateway_knows_of_them(
    pair: tuple[FakeGateway, FakeGateway],
) -> None:
    here, _ = pair
    with here.client() as client:
        cards = client.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["near", "other-name", "near-pooling"]
        assert {card["max_model_len"] for card in cards} == {8192}
        assert client.get("/v1/models/other-name").status_code == 200
        assert complete(client, model="other-name").json()["model"] == "other-name"
        assert complete(client, model="far").json()["error"]["code"] == "model_not_found"


@pytest.mark.fault("I11")
def test_the_other_server_gets_our_headers_alone(asked: tuple[httpx.Client, OtherServer]) -> None:
    client, server = asked
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    theirs = {
        "Authorization": "Bearer of-the-client",
        "Cookie": "a=b",
        "X-Envoy-Attempt-Count": "1",
        "X-Forwarded-For": "10.0.0.1",
        "X-Session-Id": "s",
        "X-Api-Key": "k",
        "X-Request-Id": "mine",
        "Accept-Encoding": "gzip",
        "Traceparent": trace,
        "Tracestate": "a=1",
        "User-Agent": "client",
    }
    answer = client.post("/v1/completions", json={"model": "near", "prompt": "a"}, headers=theirs)
    assert answer.status_code == 200
    sent = server.asked[-1].headers
    assert sent.keys() == {
        *("host", "user-agent", "accept", "accept-encoding", "content-type", "content-length"),
        *("x-request-id", "x-baton-hops", "traceparent", "tracestate", "x-session-id"),
    }
    assert (sent["x-request-id"], sent["traceparent"]) == (answer.headers["x-request-id"], trace)
    assert (sent["user-agent"].partition("/")[0], sent["accept-encoding"]) == ("baton", "identity")
    assert sent["host"] in server.url


def test_a_session_is_passed_on_where_it_is_well_formed(asked: tuple[httpx.Client, OtherServer]) -> None:
    """A proxy before the other server keeps a session on one gateway, as one before this gateway does."""
    client, server = asked
    told = {
        "user:42/run-7@a.b~c+d=": "user:42/run-7@a.b~c+d=",
        "x" * 128: "x" * 128,
        "x" * 129: None,
        "": None,
        "two words": None,
        "a,b": None,
        'a"b': None,
        "ä": None,
    }
    for given, sent_on in told.items():
        headers = {"X-Session-Id": given.encode()}
        answer = client.post("/v1/completions", json={"model": "near", "prompt": "a"}, headers=headers)  # type: ignore[arg-type]  # httpx takes bytes too
        assert answer.status_code == 200
        assert server.asked[-1].headers.get("x-session-id") == sent_on, given


def test_headers_of_the_other_server_do_not_reach_clients(asked: tuple[httpx.Client, OtherServer]) -> None:
    client, server = asked
    headers = {"Set-Cookie": "a=b", "X-Envoy-Upstream": "1", "Server": "theirs", "X-Request-Id": "theirs"}
    server.answer = lambda _: JSONResponse(
        completion("far", "a"), headers=headers | {"X-Handoff-Id": "h" * 16}
    )
    answer = complete(client)
    assert not {"set-cookie", "x-envoy-upstream"} & answer.headers.keys()
    assert answer.headers.get_list("x-request-id") != ["theirs"]
    assert answer.headers["x-handoff-id"] == "h" * 16


@pytest.mark.fault("I11")
def test_the_gateways_own_checks_hold(asked: tuple[httpx.Client, OtherServer]) -> None:
    client, server = asked
    fields = {"cache_salt": "mine", "kv_transfer_params": {"a": 1}, "priority": -1, "vllm_xargs": {"a": 1}}
    assert complete(client, **fields).status_code == 200
    assert not fields.keys() & server.asked[-1].body.keys()
    assert complete(client, n=1000).json()["error"]["param"] == "n"
    deep = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a{1,1000}){1,1000}"}}}
    refused = complete(client, structured_outputs={"json": deep})
    assert refused.status_code == 400, refused.text
    image = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/a.png"}}
    chat = {"model": "near", "messages": [{"role": "user", "content": [image]}]}
    assert client.post("/v1/chat/completions", json=chat).json()["error"]["code"] == "operation_unsupported"
    assert len(server.asked) == 1


def test_limits_of_tenants_hold_before_a_request_is_sent_on() -> None:
    with other_server() as server:
        limits = {"tenant_rate": 60, "tenant_burst": 2}
        with run_near(remote(server.url), admission=limits) as gateway, gateway.client() as client:
            statuses = [complete(client).status_code for _ in range(3)]
            assert statuses == [200, 200, 429]
            assert len(server.asked) == 2


def test_images_are_decoded_here_and_sent_on_without_names() -> None:
    with other_server() as server:
        server.answer = lambda asked: JSONResponse(
            {"object": "chat.completion", "model": "far", "choices": []}
        )
        near = remote(server.url, remote={"images": True})
        with run_near(near) as gateway, gateway.client() as client:
            content = [
                {"type": "text", "text": "what?"},
                {"type": "image_url", "image_url": {"url": URL}, "uuid": "x"},
            ]
            body = {"model": "near", "messages": [{"role": "user", "content": content}]}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            sent = server.asked[-1].body["messages"][0]["content"]
            assert sent == [content[0], {"type": "image_url", "image_url": {"url": URL}}]
            content[1] = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/a.png"}}
            assert client.post("/v1/chat/completions", json=body).status_code == 400
            refused = complete(client, images=[URL], prompt="<image>")
            assert refused.json()["error"]["code"] == "operation_unsupported"
            assert len(server.asked) == 1


def test_images_beside_a_prompt_go_to_another_gateway() -> None:
    with (
        both(FakeEngine("far", images=LOOKS), remote={"images": True}) as (here, there),
        here.client() as client,
    ):
        answer = complete(client, prompt="a <image> b", images=[URL])
        assert answer.status_code == 200, answer.text
        (sent,) = there.engine("far").transfers
        assert [image.image.url for image in sent.images] == [URL]


def test_data_for_a_plugin_elsewhere_is_sent_on(asked: tuple[httpx.Client, OtherServer]) -> None:
    client, server = asked
    told = {"request_id": "r", "created_at": 1, "data": {"mask": "AAAA"}}
    server.answer = lambda _: JSONResponse(told)
    data = {"data": "aGk=", "data_format": "b64_json", "image_url": "http://10.0.0.1/a.tif"}
    answer = client.post("/pooling", json={"model": "near", "data": data})
    assert (answer.status_code, answer.json()) == (200, told)
    assert server.asked[-1].body == {"model": "far", "data": data}
    file = client.post("/pooling?model=near", content=b"II*", headers={"Content-Type": "image/tiff"})
    assert file.json()["error"]["code"] == "operation_unsupported"
    chat = {"model": "near", "messages": CHAT["messages"]}
    follow_up = client.post("/pooling", json={"model": "near", "data": data, "follow_up": chat})
    assert (follow_up.status_code, follow_up.json()["error"]["param"]) == (400, "follow_up")


def test_stored_responses_are_this_gateways_own(tmp_path: Path) -> None:
    with (
        run_fake(FakeEngine("far")) as there,
        run_near(remote(there.url), responses={"folder": tmp_path}) as here,
        here.client() as client,
    ):
        first = client.post("/v1/responses", json={"model": "near", "input": "one"}).json()
        body = {"model": "near", "input": "two", "previous_response_id": first["id"]}
        second = client.post("/v1/responses", json=body | {"stream": True})
        assert "response.completed" in second.text
        sent = there.engine("far").bodies[-1]
        assert len(sent["input"]) == 3
        assert "previous_response_id" not in sent
        shown = client.get(f"/v1/responses/{first['id']}").json()
        assert shown["model"] == "near"


@pytest.mark.fault("I10")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_with_it(stream: bool) -> None:
    slow = FakeEngine("far", behaviour=FakeBehaviour(token_seconds=0.05))
    with both(slow) as (here, _):
        engine = here.fleet.engines[0]
        connection = connect(here)
        connection.sendall(request({"model": "near", "max_tokens": 1000, "stream": stream}))
        wait_for(lambda: slow.active == 1, "the other gateway works on it")
        assert engine.active == 1
        connection.close()
        wait_for(lambda: slow.aborted == 1 and not slow.active, "the other gateway has dropped it")
        wait_for(lambda: not engine.active, "so has this one")
        assert metric(here, 'baton_remote_requests_total{engine="near",outcome="cancelled"}') == 1


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_counted_for_the_tenant(
    pair: tuple[FakeGateway, FakeGateway], path: str, stream: bool
) -> None:
    here, _ = pair

    def counted() -> float:
        return metric(here, 'baton_tenant_tokens_total{kind="generated",tenant="local"}')

    before = counted()
    with here.client() as client:
        assert client.post(path, json={"model": "near", "stream": stream} | REQUESTS[path]).status_code == 200
    wait_for(lambda: counted() == before + 4, "four tokens were counted")


@pytest.mark.fault("I11")
def test_gateways_that_name_each_other_end_the_circle() -> None:
    port = free_port()
    circle = remote(f"http://127.0.0.1:{port}", model="near", remote={"probe_s": 0.1})
    with run_near(circle, port=port) as gateway, gateway.client() as client:
        wait_for(lambda: gateway.fleet.whole, "it reaches itself")
        answer = complete(client)
        assert answer.status_code == 502
        assert metric(gateway, 'baton_remote_requests_total{engine="near",outcome="failed"}') == 5


def test_an_unmodified_sdk_streams_through_both(pair: tuple[FakeGateway, FakeGateway]) -> None:
    here, _ = pair
    client = OpenAI(base_url=f"{here.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="near", messages=[{"role": "user", "content": "one two three"}], max_tokens=4, stream=True
    )
    assert "".join(each.choices[0].delta.content or "" for each in stream).split() == [
        "one",
        "two",
        "three",
        "one",
    ]
