"""Rows E9, E10 and F7: bodies made to break the gateway are refused, and it gives nothing away."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake
from support.hostile import EVIL, OTHER_FORMS, ROUTES, TOO_MUCH, asking, hostile_json, json_schema, tool
from support.leaked_words import leaks
from support.loop_lag import loop_lag

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeEngine

JSON = {"content-type": "application/json"}
LAG_S = 0.1
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def gateway() -> Iterator[FakeGateway]:
    with run_fake(FakeEngine("text", supports_handoffs=True), FakeEngine("embed", pooling=True)) as gateway:
        yield gateway


def seen(gateway: FakeGateway) -> int:
    return sum(len(gateway.engine(name).bodies) for name in ("text", "embed"))


def refused(response: httpx.Response, code: str) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code), error
    assert leaks(response) == []
    assert len(response.content) < 1000
    return error


@pytest.mark.parametrize("route", ROUTES)
def test_the_routes_of_the_tables_answer_what_is_not_hostile(gateway: FakeGateway, route: str) -> None:
    """Else a refusal would prove nothing. Minus zero is a number."""
    with gateway.client() as client:
        sent = asking(route, {})[:-1] + b', "x": [-0, -0.0, 9223372036854775807, 1e308]}'
        answer = client.post(
            route, content=sent if route != "/v1/handoffs" else asking(route, {}), headers=JSON
        )
    assert answer.status_code in (200, 201), answer.text


def test_every_route_that_takes_json_is_in_the_tables(gateway: FakeGateway) -> None:
    routes = gateway.app.routes
    posts = {route.path for route in routes if "POST" in (getattr(route, "methods", None) or ())}
    without_body = {
        *("/v1/responses/{response_id}/cancel", "/v1/batches/{batch_id}/cancel", "/v1/settings/reload"),
        "/v1/files",  # of a form
        "/v1/handoffs/{handoff_id}/warm",  # it may have one
    }
    without_body |= {f"/v1/engines/{{name:path}}/{act}" for act in ("start", "stop", "restart")}
    assert posts == {*ROUTES, *OTHER_FORMS} | without_body


@pytest.mark.parametrize("route", [*ROUTES, *OTHER_FORMS])
@pytest.mark.fault("E9")
def test_json_that_is_not_strict_is_refused_with_the_reason(gateway: FakeGateway, route: str) -> None:
    before = seen(gateway)
    with gateway.client() as client:
        for name, body, code, said in hostile_json(route):
            error = refused(client.post(route, content=body, headers=JSON), code)
            assert said in error["message"], name
    assert seen(gateway) == before


@pytest.mark.parametrize("table", [TOO_MUCH, EVIL], ids=["e9", "e10"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.fault("E9")
@pytest.mark.fault("E10")
def test_a_value_above_its_limit_is_refused_with_the_field_named(
    gateway: FakeGateway, route: str, table: dict[str, dict[str, Any]]
) -> None:
    before = seen(gateway)
    with gateway.client() as client:
        for name, more in table.items():
            error = refused(client.post(route, content=asking(route, more), headers=JSON), "invalid_request")
            assert error["param"].partition(".")[0] in more, name
            assert re.match(r"'\w|The (pattern|grammar) in '\w", error["message"]), name
    assert seen(gateway) == before


@pytest.mark.fault("E9")
def test_a_handoffs_patch_must_be_strict_json_too(gateway: FakeGateway) -> None:
    with gateway.client() as client:
        for body in (
            b'{"pin": true, "pin": false}',
            b'{"ttl_s": NaN}',
            b'{"ttl_s": 1e400}',
            b'{"ttl_s": 1} x',
        ):
            refused(client.patch("/v1/handoffs/none", content=body, headers=JSON), "invalid_json")


FAIR: dict[str, dict[str, Any]] = {
    "the limits themselves": {"n": 64, "max_tokens": 4, "logprobs": 20, "stop": ["x" * 1024] * 16},
    "logprobs of a long answer": {"n": 16, "max_tokens": 4000, "logprobs": 20},
    "many tools": {
        "tools": tool({"type": "object", "properties": {"path": {"type": "string"}}})["tools"] * 512
    },
    "a slug": json_schema({"type": "string", "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"}),
    "an email": json_schema({"pattern": r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$"}),
    "an address": json_schema({"pattern": r"^(\d{1,3}\.){3}\d{1,3}$"}),
    "a date": {"structured_outputs": {"regex": r"\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2}(\.\d+)?)?Z)?"}},
    "a name that is a keyword": json_schema({"properties": {"pattern": {"type": "string"}, "enum": {}}}),
    "a text that is no pattern": json_schema({"const": {"json": "no json", "structural_tag": "{"}}),
    "a grammar": {
        "structured_outputs": {"grammar": 'root ::= (ws item+)+ "((((" \nitem ::= [a-z]+ "\'"\n' * 400}
    },
    "an enum": json_schema({"enum": [f"value{number}" for number in range(4000)]}),
    "null": dict.fromkeys(["n", "stop", "tools", "response_format", "structured_outputs", "logit_bias"]),
    "wrong types": {
        "n": [],
        "stop": {},
        "tools": 7,
        "response_format": "x",
        "logit_bias": 1,
        "vllm_xargs": [],
    },
    "a long prompt of tokens": {"prompt": [1] * 4000},
    "commas": {"x": ", : " * 50_000},
}


@pytest.mark.parametrize("name", FAIR)
def test_what_is_much_but_fair_reaches_the_engine(gateway: FakeGateway, name: str) -> None:
    before = seen(gateway)
    with gateway.client() as client:
        body = asking("/v1/completions", FAIR[name])
        answer = client.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 200, answer.text
    assert seen(gateway) == before + 1


@pytest.mark.fault("E9")
@pytest.mark.fault("E10")
def test_no_hostile_body_blocks_the_event_loop(gateway: FakeGateway) -> None:
    """Each is sent three times, and its least lag counts: what the body costs comes every time, noise does not."""
    route = "/v1/completions"
    bodies = {name: body for name, body, _, _ in hostile_json(route)}
    bodies |= {name: asking(route, more) for name, more in (TOO_MUCH | EVIL).items()}
    lags = {}
    with gateway.client() as client:
        for name, body in bodies.items():
            lags[name] = min(_lag(gateway, client, route, body, 400) for _ in range(3))
    worst = max(lags, key=lambda name: lags[name])
    print(f"E9/E10: {len(bodies)} hostile bodies, worst event loop lag {lags[worst] * 1000:.0f} ms ({worst})")
    assert lags[worst] < LAG_S


def _lag(gateway: FakeGateway, client: httpx.Client, route: str, body: bytes, status: int) -> float:
    with loop_lag(gateway) as lag:
        assert client.post(route, content=body, headers=JSON).status_code == status
    return lag.worst_s


def large_bodies() -> dict[str, bytes]:
    """Bodies of up to 32 MiB that are all in order."""
    room = 32 * MIB - 1024
    head = json.dumps(ROUTES["/v1/completions"]).encode()[:-1] + b', "x": '
    escaped, pairs = b'"' + b"\\u00e9" * (room // 6) + b'"', 145_000
    items = {
        "one text": b'"' + b"x" * room + b'"',
        "one text of escapes": escaped,
        "long keys": json.dumps({f"key{number}" + "k" * 110: 0 for number in range(pairs)}).encode(),
        "numbers": b"[" + b"1.5," * 295_000 + b"0]",
        "empty lists": b"[" + b"[]," * 295_000 + b"0]",
    }
    return {name: head + item + b"}" for name, item in items.items()}


@pytest.mark.fault("E9")
def test_the_worst_stall_by_a_large_accepted_body_is_bounded(gateway: FakeGateway) -> None:
    """The parser holds the interpreter; how long is bounded by `limits.body_bytes` and `limits.body_values`."""
    lags = {}
    with gateway.client() as client:
        for name, body in large_bodies().items():
            lags[name] = min(_lag(gateway, client, "/v1/completions", body, 200) for _ in range(2))
            gateway.engine("text").bodies.clear()
    for name, lag in lags.items():
        print(f"E9: event loop lag of a body that is taken, {name}: {lag * 1000:.0f} ms")
    assert max(lags.values()) < 2


@pytest.mark.fault("F7")
def test_refusals_of_every_kind_disclose_nothing(tmp_path: Any) -> None:
    file = tmp_path / "keys.json"
    key = create_key(file, "acme")
    with run_fake(FakeEngine("text"), auth={"keys_file": file}, limits={"body_bytes": 4096}) as gateway:
        answers = list(_refusals(gateway, key))
    statuses = sorted({answer.status_code for answer in answers})
    hits = [(answer.status_code, hit) for answer in answers for hit in leaks(answer)]
    print(f"F7: {len(answers)} refusals with statuses {statuses}, hits {len(hits)}")
    assert hits == []
    assert statuses == [400, 401, 404, 405, 413, 415, 500, 503]
    tables = len(ROUTES) * (len(TOO_MUCH) + len(EVIL)) + sum(
        len(list(hostile_json(route))) for route in ROUTES
    )
    print(f"F7: and {tables} refusals of the tables, each scanned where it was made")


def _refusals(gateway: FakeGateway, key: str) -> Iterator[httpx.Response]:
    body = ROUTES["/v1/completions"]
    with gateway.client() as client:
        for path in ("/v1/models", "/nowhere", "/metrics"):
            yield client.get(path)
            yield client.get(path, headers={"Authorization": "Bearer wrong"})
    with gateway.client(headers={"Authorization": f"Bearer {key}"}) as client:
        for method in ("GET", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND"):
            yield client.request(method, "/v1/completions")
        yield client.get("/v1/nowhere")
        yield client.get("/v1/models/none")
        yield client.get("/v1/handoffs", params={"limit": "x"})
        yield client.get("/v1/handoffs", params={"limit": 10**30})
        yield client.get("/v1/handoffs/none")
        yield client.post("/v1/completions", json=body | {"x": "y" * 5000})
        for media_type in ("text/plain", "multipart/form-data; boundary=x", "", "application/jsonx"):
            yield client.post("/v1/completions", content=b"{}", headers={"content-type": media_type})
        yield client.post("/pooling", content=b"II*", headers={"content-type": "image/tiff"})
        for wrong in ({"model": "none"}, {"model": 7}, {"prompt": None}, {"max_tokens": -1}, {"handoff": 1}):
            yield client.post("/v1/completions", json=body | wrong)
        behaviour = gateway.engine("text").behaviour
        for error in (KeyError("/root/x.py"), RuntimeError("<baton.Thing at 0x7f00deadbeef>"), _down()):
            behaviour.call_error = error
            yield client.post("/v1/completions", json=body)


def _down() -> BaseException:
    from baton.errors import EngineUnavailable

    return EngineUnavailable()


@pytest.mark.parametrize(
    "text",
    [
        'File "/srv/app/x.py", line 3, in f',
        "at /usr/lib/python3/dist-packages/x",
        "<Engine object at 0x7f1234567890>",
        "baton.engines.fake.engine.FakeEngine",
        "ValueError: x",
        "<class 'int'>",
        "Traceback (most recent call last)",
        "pydantic_core says",
    ],
)
@pytest.mark.fault("F7")
def test_the_scan_would_find_something(text: str) -> None:
    assert leaks(httpx.Response(400, text=text))
    assert leaks(httpx.Response(400, headers={"x": text.replace("\n", " ")}, text=""))


def test_a_limit_is_a_setting(tmp_path: Any) -> None:
    began = time.monotonic()
    with run_fake(FakeEngine("text"), limits={"n": 2, "stop": 1}) as gateway, gateway.client() as client:
        body = ROUTES["/v1/completions"]
        error = client.post("/v1/completions", json=body | {"n": 3}).json()["error"]
        assert error["message"] == "'n' is 3; at most 2 are allowed (setting limits.n)."
        error = client.post("/v1/completions", json=body | {"stop": ["a", "b"]}).json()["error"]
        assert error["message"] == "'stop' has 2 strings; at most 1 are allowed (setting limits.stop)."
    assert time.monotonic() - began < 30


def test_what_steers_an_engine_past_others_is_dropped_and_counted() -> None:
    with (
        run_fake(FakeEngine("text"), limits={"xargs": ["top_n_sigma"]}) as gateway,
        gateway.client() as client,
    ):
        body = ROUTES["/v1/completions"] | {"priority": -9, "vllm_xargs": {"top_n_sigma": 1, "other": 2}}
        assert client.post("/v1/completions", json=body).status_code == 200
        (seen,) = gateway.engine("text").bodies
        page = client.get("/metrics").text
    assert ("priority" in seen, seen["vllm_xargs"]) == (False, {"top_n_sigma": 1})
    for field in ("priority", "vllm_xargs"):
        assert f'baton_stripped_fields_total{{field="{field}"}} 1.0' in page
