"""What a client meets on the wire, over a real socket and with a fake engine behind it."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import httpx
import pytest
from starlette.routing import Route
from support.gateways import FakeGateway, Held, run_fake

from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import EngineOverloaded, EngineUnavailable, StartError

CHAT = {"model": "alpha", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 4}
TEXT = {"model": "alpha", "prompt": "one two three", "max_tokens": 4}


def error_of(response: httpx.Response) -> dict[str, object]:
    error: dict[str, object] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    return error


def test_a_request_is_answered_by_the_engine_its_model_names(fake_gateway: FakeGateway) -> None:
    with fake_gateway.client() as client:
        for name in ("alpha", "beta"):
            answer = client.post("/v1/completions", json=TEXT | {"model": name}).json()
            assert answer["model"] == name
            assert fake_gateway.engine(name).bodies[-1]["model"] == name
    assert len(fake_gateway.engine("alpha").bodies) == 1


def test_an_unknown_model_is_a_404_that_lists_what_is_served(fake_gateway: FakeGateway) -> None:
    with fake_gateway.client() as client:
        response = client.post("/v1/chat/completions", json=CHAT | {"model": "gpt-4"})
    assert response.status_code == 404
    error = error_of(response)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "alpha, beta, embed" in str(error["message"])


@pytest.mark.parametrize("model", [None, "", 7, ["alpha"]])
def test_a_missing_or_odd_model_is_a_400_when_several_are_served(
    fake_gateway: FakeGateway, model: object
) -> None:
    with fake_gateway.client() as client:
        response = client.post("/v1/completions", json=TEXT | {"model": model})
    assert (response.status_code, error_of(response)["param"]) == (400, "model")


@pytest.mark.fault("E16")
@pytest.mark.parametrize(
    ("model", "near"), [("ALPHA", "alpha"), ("alpah", "alpha"), ("org/beta", "beta"), ("gpt-4", None)]
)
def test_an_unknown_model_is_told_the_nearest(
    fake_gateway: FakeGateway, model: str, near: str | None
) -> None:
    with fake_gateway.client() as client:
        for answer in (
            client.post("/v1/chat/completions", json=CHAT | {"model": model}),
            client.get(f"/v1/models/{model}"),
        ):
            assert answer.status_code == 404
            message = str(error_of(answer)["message"])
            assert (f"Did you mean '{near}'?" in message) if near else ("mean" not in message)


@pytest.mark.fault("E16")
@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/message", "/v1/messages"),
        ("/V1/Models", "/v1/models"),
        ("/wp-login.php", None),
        ("/" + "x" * 8000, None),
    ],
)
def test_an_unknown_path_is_told_the_nearest(fake_gateway: FakeGateway, path: str, near: str | None) -> None:
    with fake_gateway.client() as client:
        answer = client.post(path, json=CHAT)
    assert answer.status_code == 404
    message = str(error_of(answer)["message"])
    assert (f"Did you mean '{near}'?" in message) if near else ("mean" not in message)


def methods_of(gateway: FakeGateway) -> dict[str, set[str]]:
    """The methods of each path that there is."""
    found: dict[str, set[str]] = {}
    for route in gateway.app.routes:
        if isinstance(route, Route):
            found.setdefault(route.path, set()).update(route.methods or ())
    return found


@pytest.mark.fault("E16")
def test_whatever_may_be_read_answers_head_as_get_without_its_content(fake_gateway: FakeGateway) -> None:
    reads = [path for path, methods in methods_of(fake_gateway).items() if "GET" in methods]
    assert len(reads) > 10
    reads.remove("/v1/events")  # without an end
    with fake_gateway.client() as client:
        opened = client.head("/v1/events")
        assert (opened.status_code, opened.content) == (200, b"")
        assert opened.headers["content-type"] == "text/event-stream; charset=utf-8"
        for path in reads:
            path = path.replace("{file}", "start.js").replace("{model:path}", "alpha")
            get, head = client.get(path), client.head(path)
            assert head.status_code == get.status_code, path
            assert head.content == b""
            varies = path in ("/metrics", "/v1/peer") or "{" in path  # the error names its request
            if not varies:
                assert head.headers["content-length"] == get.headers["content-length"], path
            assert head.headers.get("content-type") == get.headers.get("content-type")
        assert client.head("/v1/completions").status_code == 405
        assert client.get("/livez").json() == {"status": "alive"}, "the connection is in step"


@pytest.mark.fault("E16")
def test_allow_names_every_method_of_a_path(fake_gateway: FakeGateway) -> None:
    with fake_gateway.client() as client:
        for path, methods in methods_of(fake_gateway).items():
            answer = client.request("BREW", path.replace("{model:path}", "alpha"))
            assert answer.status_code == 405, path
            expected = methods | ({"HEAD"} if "GET" in methods else set())
            assert set(answer.headers["allow"].split(", ")) == expected, path


@pytest.mark.fault("E16")
def test_a_request_that_names_no_model_gets_the_only_one_of_its_kind() -> None:
    engines = FakeEngine("chat", aliases=("talk",)), FakeEngine("embed", pooling=True)
    with run_fake(*engines) as gateway, gateway.client() as client:
        assert client.post("/v1/completions", json={"prompt": "hi"}).json()["model"] == "chat"
        assert client.post("/tokenize", json={"prompt": "hi"}).status_code == 200
        assert client.post("/v1/embeddings", json={"input": "hi"}).json()["model"] == "embed"
    with run_fake(FakeEngine("a"), FakeEngine("b"), FakeEngine("c", pooling=True)) as gateway:
        with gateway.client() as client:
            refused = client.post("/v1/completions", json={"prompt": "hi"})
        assert (refused.status_code, error_of(refused)["message"]) == (
            400,
            "'model' must name one of: a, b, c.",
        )


def test_one_engine_alone_needs_no_name() -> None:
    with run_fake(FakeEngine("only")) as gateway, gateway.client() as client:
        assert client.post("/v1/completions", json={"prompt": "hi"}).json()["model"] == "only"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/livez", 405, "method_not_allowed"),
    ],
)
def test_what_is_not_there_is_refused_in_the_one_error_shape(
    fake_gateway: FakeGateway, method: str, path: str, status: int, code: str
) -> None:
    with fake_gateway.client() as client:
        response = client.request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (status, code)


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b"[1]", "application/json", 400, "invalid_json"),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
        (b'{"a": NaN}', "application/json", 400, "invalid_json"),
        (b'{"a":' * 80 + b"1" + b"}" * 80, "application/json", 400, "invalid_request"),
        (b'{"a":' * 100_000, "application/json", 400, "invalid_request"),
    ],
)
def test_bad_bodies_are_refused_with_the_engine_untouched(
    fake_gateway: FakeGateway, body: bytes, content_type: str, status: int, code: str
) -> None:
    headers = {"content-type": content_type}
    with fake_gateway.client() as client:
        response = client.post("/v1/completions", content=body, headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert fake_gateway.engine("alpha").bodies == []


def test_an_oversized_body_is_refused_by_its_announced_length() -> None:
    with run_fake(FakeEngine("a"), limits={"body_bytes": 2048}) as gateway, gateway.client() as client:
        response = client.post("/v1/completions", json={"prompt": "x" * 4096})
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
        assert "2.0KiB" in str(error_of(response)["message"])
        assert gateway.engine("a").bodies == []


def test_an_oversized_body_without_a_length_is_refused_while_it_comes() -> None:
    def endless() -> object:
        while True:
            yield b"x" * 1024

    with run_fake(FakeEngine("a"), limits={"body_bytes": 2048}) as gateway, gateway.client() as client:
        headers = {"content-type": "application/json"}
        # The answer comes while the client still writes: most libraries see the connection end first.
        with contextlib.suppress(httpx.WriteError):
            assert client.post("/v1/completions", content=endless(), headers=headers).status_code == 413
        assert 'baton_rejections_total{reason="body_too_large"} 1.0' in client.get("/metrics").text
        assert gateway.engine("a").bodies == []


def test_steering_fields_are_dropped_and_counted(fake_gateway: FakeGateway) -> None:
    sent = TEXT | {
        "cache_salt": "s",
        "kv_transfer_params": {"a": 1},
        "vllm_xargs": {"kv_transfer_params": "x"},
    }
    with fake_gateway.client() as client:
        assert client.post("/v1/completions", json=sent).status_code == 200
        page = client.get("/metrics").text
    assert fake_gateway.engine("alpha").bodies == [TEXT]
    assert 'baton_stripped_fields_total{field="kv_transfer_params"} 2.0' in page
    assert 'baton_stripped_fields_total{field="cache_salt"} 1.0' in page


def test_vllms_own_store_of_responses_stays_off(fake_gateway: FakeGateway) -> None:
    with fake_gateway.client() as client:
        body = {"model": "alpha", "input": "one two", "store": True}
        assert client.post("/v1/responses", json=body).status_code == 200
    sent = fake_gateway.engine("alpha").bodies[-1]
    assert (sent["store"], sent["background"]) == (False, False)


def test_a_client_request_id_comes_back_but_never_becomes_ours(fake_gateway: FakeGateway) -> None:
    with fake_gateway.client() as client:
        answers = [
            client.post("/v1/completions", json=TEXT, headers={"X-Request-Id": "mine"}) for _ in range(2)
        ]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert all(answer.headers["x-client-request-id"] == "mine" for answer in answers)
    assert {answer.json()["id"] for answer in answers} == {f"cmpl-{one}" for one in ids}


def test_a_stream_ends_with_done_and_nothing_holds_it_back(fake_gateway: FakeGateway) -> None:
    fake_gateway.engine("alpha").behaviour.token_seconds = 0.05
    arrivals: list[float] = []
    lines = []
    request = ("POST", "/v1/chat/completions")
    with fake_gateway.client() as client, client.stream(*request, json=CHAT | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                lines.append(line)
                arrivals.append(time.monotonic())
    assert lines[-1] == "data: [DONE]"
    said = "".join(json.loads(line[6:])["choices"][0]["delta"]["content"] for line in lines[:-1])
    assert said == "one two three one"
    assert arrivals[-1] - arrivals[0] > 0.1, "the events came all at once"


def test_a_failure_before_the_first_token_has_its_own_status(fake_gateway: FakeGateway) -> None:
    fake_gateway.engine("alpha").behaviour.call_error = EngineOverloaded()
    with fake_gateway.client() as client:
        for stream in (False, True):
            response = client.post("/v1/completions", json=TEXT | {"stream": stream})
            assert (response.status_code, error_of(response)["code"]) == (503, "engine_overloaded")
            assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_failure_midway_ends_the_stream_with_one_typed_error_event(
    fake_gateway: FakeGateway, path: str
) -> None:
    fake_gateway.engine("alpha").behaviour.stream_error = EngineUnavailable()
    body = CHAT | {"stream": True, "prompt": "a b c", "input": "a b c"}
    with fake_gateway.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == 200
    events = [event for event in response.text.split("\n\n") if event]
    name, _, data = events[-1].partition("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))["error"]
    assert (error["code"], error["request_id"]) == ("engine_unavailable", response.headers["x-request-id"])
    assert "[DONE]" not in response.text
    assert sum(event.startswith("event: error") for event in events) == 1


def test_an_unforeseen_exception_shows_nothing_of_itself(fake_gateway: FakeGateway) -> None:
    fake_gateway.engine("alpha").behaviour.call_error = KeyError("/root/secret/path")
    with fake_gateway.client() as client:
        response = client.post("/v1/completions", json=TEXT)
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert "KeyError" not in response.text


def test_errors_of_the_messages_route_are_also_anthropic_s(fake_gateway: FakeGateway) -> None:
    with fake_gateway.client() as client:
        response = client.post("/v1/messages", json={"model": "none"})
    assert response.json()["type"] == "error"
    assert error_of(response)["type"] == "not_found_error"


def test_a_client_that_leaves_a_stream_frees_the_engine(fake_gateway: FakeGateway) -> None:
    engine = fake_gateway.engine("alpha")
    engine.behaviour.token_seconds = 0.02
    with (
        fake_gateway.client() as client,
        client.stream(
            "POST", "/v1/completions", json=TEXT | {"stream": True, "max_tokens": 4000}
        ) as response,
    ):
        lines = response.iter_lines()  # kept: an iterator that goes away takes the connection along
        next(lines)
        assert engine.active == 1
    wait_for(lambda: engine.active == 0, "the stream was not ended")
    with fake_gateway.client() as client:
        counted = 'baton_client_disconnects_total{phase="stream"} 1.0'
        wait_for(lambda: counted in client.get("/metrics").text, "it was not counted")


def test_a_client_that_leaves_while_waiting_frees_the_engine(fake_gateway: FakeGateway) -> None:
    engine = fake_gateway.engine("alpha")
    engine.behaviour.token_seconds = 0.02
    with httpx.Client(base_url=fake_gateway.url, timeout=0.3) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=TEXT | {"max_tokens": 4000})
    wait_for(lambda: engine.active == 0, "the request was not ended")
    assert engine.aborted == 1


def wait_for(condition: object, why: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


def test_while_engines_start_the_process_is_alive_but_not_ready() -> None:
    held = Held()
    behaviour = FakeBehaviour(start_seconds=60.0, wait=held)
    with run_fake(FakeEngine("slow", behaviour=behaviour), wait=False) as gateway, gateway.client() as client:
        assert client.get("/livez").status_code == 200
        assert client.get("/readyz").status_code == 503
        assert client.get("/readyz").headers["retry-after"] == client.get("/health").headers["retry-after"]
        assert client.get("/readyz").json() == {"status": "not ready", "engines": {"starting": 1}}
        assert client.get("/health").status_code == 503
        response = client.post("/v1/completions", json={"prompt": "x"})
        assert (response.status_code, error_of(response)["code"]) == (503, "engine_unavailable")
        assert int(response.headers["retry-after"]) >= 1
        held.release()
        wait_for(lambda: client.get("/readyz").status_code == 200, "never became ready")
        assert client.get("/health").content == b""


def test_a_failed_start_ends_the_gateway_with_its_reason() -> None:
    behaviour = FakeBehaviour(start_error=StartError("the weights are gone"))
    with run_fake(FakeEngine("broken", behaviour=behaviour), wait=False) as gateway:
        wait_for(lambda: gateway.server.failure is not None, "no failure was noted")
        assert gateway.server.failure is not None
        assert gateway.server.failure.message == "the weights are gone"


def test_models_lists_every_engine_and_retrieves_one(fake_gateway: FakeGateway) -> None:
    with fake_gateway.client() as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["alpha", "beta", "embed"]
        assert client.get("/v1/models/beta").json()["id"] == "beta"
        assert client.get("/v1/models/gamma").status_code == 404


def test_an_engine_answers_to_its_aliases() -> None:
    alpha, beta = FakeEngine("alpha", aliases=("gpt", "org/first")), FakeEngine("beta")
    with run_fake(alpha, beta) as gateway, gateway.client() as client:
        served = [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert served == ["alpha", "gpt", "org/first", "beta"]
        assert client.get("/v1/models/org/first").json()["id"] == "org/first"
        for name in ("alpha", "gpt", "org/first"):
            answer = client.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1})
            assert answer.status_code == 200
        refused = client.post("/v1/completions", json={"model": "other", "prompt": "x"}).json()
        assert "Served are: alpha, beta, gpt, org/first." in refused["error"]["message"]
        assert (len(alpha.bodies), len(beta.bodies)) == (3, 0)
        page = client.get("/metrics").text
    assert 'model="gpt"' not in page  # series know the engine by its name alone


def test_an_operation_the_model_cannot_do_is_a_400(fake_gateway: FakeGateway) -> None:
    with fake_gateway.client() as client:
        response = client.post("/v1/embeddings", json={"model": "alpha", "input": "x"})
        assert (response.status_code, error_of(response)["code"]) == (400, "operation_unsupported")
        response = client.post("/v1/completions", json=TEXT | {"model": "embed"})
        assert (response.status_code, error_of(response)["code"]) == (400, "operation_unsupported")
        assert client.post("/v1/embeddings", json={"model": "embed", "input": "x"}).status_code == 200


def test_metrics_count_requests_by_known_routes_only(fake_gateway: FakeGateway) -> None:
    with fake_gateway.client() as client:
        client.post("/v1/completions", json=TEXT)
        client.get("/v1/models/alpha")
        before = client.get("/metrics").text.count("\nbaton_")
        for number in range(50):
            client.get(f"/made/up/{number}")
            client.post("/v1/completions", json=TEXT | {"model": f"made-up-{number}"})
        page = client.get("/metrics").text
    assert 'baton_http_requests_total{code_class="4xx",method="GET",route="other"} 50.0' in page
    assert 'method="GET",route="/v1/models/{model}"} 1.0' in page
    assert 'baton_rejections_total{reason="model_not_found"} 50.0' in page
    assert page.count("\nbaton_") < before + 60, "labels grow with traffic"
    assert 'vllm:generation_tokens_total{engine="0",model_name="alpha"} 4.0' in page
    assert "made-up" not in page


def test_many_streams_at_once_each_get_their_own_words(fake_gateway: FakeGateway) -> None:
    fake_gateway.engine("alpha").behaviour.token_seconds = 0.01
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        body = TEXT | {"prompt": f"word{number}", "stream": True, "max_tokens": 8}
        with fake_gateway.client() as client:
            answers[number] = client.post("/v1/completions", json=body).text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, text in answers.items():
        assert text.count(f'word{number}"') == 8
        assert text.endswith("data: [DONE]\n\n")
