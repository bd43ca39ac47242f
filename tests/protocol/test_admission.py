"""Who is let in, over real sockets: limits of tenants, places at engines, memory (rows E8 and E12)."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.routing import Route
from support.gateways import FakeGateway, Held, run_fake
from support.plugin_gateways import ask, until, upload
from support.sample_plugins import Current, Files, plugin

from baton.admission.fair_threads import in_own_thread
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import GenerationFailed
from baton.http import openapi
from baton.http.middleware.gate import PUBLIC_PATHS
from baton.http.routes import ROUTERS
from baton.telemetry import memory
from baton.telemetry.memory import MemoryReader

BODY = {"model": "a", "prompt": "one two", "max_tokens": 4}
LONG = BODY | {"max_tokens": 400, "stream": True}
MIB = 1024 * 1024


def slow(name: str = "a", token_seconds: float = 0.05, **options: Any) -> FakeEngine:
    return FakeEngine(name, behaviour=FakeBehaviour(token_seconds=token_seconds), **options)


def shown(gateway: FakeGateway, name: str, engine: str = "a") -> float:
    page = httpx.get(f"{gateway.url}/metrics").text
    wanted = f'baton_admission_{name}{{engine="{engine}"}} '
    return next(float(line.removeprefix(wanted)) for line in page.splitlines() if line.startswith(wanted))


@contextmanager
def streaming(gateway: FakeGateway, body: dict[str, Any] = LONG) -> Iterator[httpx.Response]:
    """A stream that has begun; its client goes away at the end."""
    with gateway.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        parts = response.iter_bytes()  # kept: httpx closes the answer with it
        next(parts)
        yield response


def refused(response: httpx.Response, status: int, code: str) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.fault("E8")
def test_a_tenant_above_its_rate_gets_openais_rate_limit_error() -> None:
    """Before the body is read, whatever the route."""
    limits = {"tenant_rate": 1, "tenant_burst": 2}
    with run_fake(FakeEngine("a"), admission=limits) as gateway, gateway.client() as client:
        assert [client.post("/v1/completions", json=BODY).status_code for _ in range(2)] == [200, 200]
        response = client.post("/v1/completions", json=BODY)
        refused(response, 429, "rate_limited")
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert 30 <= int(response.headers["retry-after"]) <= 60
        refused(client.post("/v1/completions", content=b"{"), 429, "rate_limited")
        refused(client.post("/pooling", json=BODY), 429, "rate_limited")
        refused(client.post("/v1/handoffs", json=BODY), 429, "rate_limited")
        refused(client.get("/v1/models"), 429, "rate_limited")
        page = client.get("/metrics").text
    assert 'baton_rejections_total{reason="rate_limited"} 5.0' in page
    assert len(gateway.engine("a").bodies) == 2


@pytest.mark.fault("E8")
def test_a_tenants_running_requests_are_limited() -> None:
    """A stream counts until it ends, also by a client that goes away."""
    with run_fake(slow(), admission={"tenant_requests": 1}) as gateway, gateway.client() as client:
        with streaming(gateway):
            refused(client.post("/v1/completions", json=BODY), 429, "rate_limited")
        assert until(lambda: client.post("/v1/completions", json=BODY).status_code == 200)


KEYED = sorted(
    (method, route.path)
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, Route) and route.path not in PUBLIC_PATHS
    for method in route.methods or ()
)


@pytest.mark.fault("E8")
def test_every_route_that_needs_a_key_is_held_to_the_tenants_limits() -> None:
    """None but the probes' answers a tenant that is above its rate, or has its requests running."""
    asked = [*KEYED, ("GET", "/openapi.json"), ("GET", "/nothing"), ("OPTIONS", "/v1/handoffs")]
    for limits in ({"tenant_rate": 1, "tenant_burst": 1}, {"tenant_requests": 1}):
        with run_fake(slow(), admission=limits) as gateway, gateway.client() as client, streaming(gateway):
            for method, path in asked:
                refused(client.request(method, path.replace("{", "").replace("}", "")), 429, "rate_limited")
            assert [client.get(path).status_code for path in sorted(PUBLIC_PATHS)] == [200] * len(
                PUBLIC_PATHS
            )
    assert len(asked) > 30


@pytest.mark.fault("E19")
def test_the_openapi_document_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """463 kB of JSON: one tenant that asks again and again held up the event loop for all."""
    made = []

    async def counted(work: Any) -> Any:
        made.append(work)
        return await in_own_thread(work)

    monkeypatch.setattr(openapi, "in_own_thread", counted)
    with run_fake(FakeEngine("a")) as gateway, gateway.client() as client:
        answers = {client.get("/openapi.json").content for _ in range(20)}
        with ThreadPoolExecutor(20) as pool:
            answers |= set(pool.map(lambda _: httpx.get(f"{gateway.url}/openapi.json").content, range(20)))
    assert len(made) == len(answers) == 1
    assert json.loads(answers.pop())["openapi"]


@pytest.mark.fault("E8")
def test_requests_through_a_plugin_count_for_their_tenant_too(tmp_path: Path) -> None:
    """JSON and files; and take no places twice."""
    for instance in (Current(), Files(tmp_path)):
        held = Held()
        engine = FakeEngine("geo", pooling=True, plugin=plugin(instance), behaviour=FakeBehaviour(wait=held))
        with run_fake(engine, admission={"tenant_requests": 1, "engine_requests": 1}) as gateway:
            with ThreadPoolExecutor() as pool:
                first = pool.submit(ask, gateway, numbers=[60.0])
                assert until(lambda engine=engine: engine.active == 1)
                assert shown(gateway, "running", "geo") == 0
                again = upload(gateway) if isinstance(instance, Files) else ask(gateway)
                refused(again, 429, "rate_limited")
                held.release()
                assert first.result().status_code == 200
            assert ask(gateway).status_code == 200
        assert engine.active == 0


@pytest.mark.fault("E8")
def test_an_engine_gets_a_limited_number_and_the_rest_wait() -> None:
    """And one engine that is full does not hold up another."""
    limits = {"engine_requests": 1, "engine_waiting": 1}
    with run_fake(slow(), FakeEngine("b"), admission=limits) as gateway, gateway.client() as client:
        with ThreadPoolExecutor() as pool, streaming(gateway):
            waiting = pool.submit(client.post, "/v1/completions", json=BODY)
            assert until(lambda: shown(gateway, "waiting") == 1)
            assert gateway.engine("a").active == 1
            with gateway.client() as third:
                response = third.post("/v1/completions", json=BODY)
                refused(response, 503, "engine_overloaded")
                assert response.elapsed.total_seconds() < 10  # of the stream's twenty
                assert third.post("/v1/completions", json=BODY | {"model": "b"}).status_code == 200
                assert third.get("/readyz").status_code == 200
            assert not waiting.done()  # it has its turn when the stream's client goes away
        assert waiting.result().status_code == 200
        assert until(lambda: shown(gateway, "running") == 0)
        page = client.get("/metrics").text
        assert 'baton_admission_wait_seconds_count{engine="a"} 2.0' in page


@pytest.mark.fault("E8")
def test_a_request_that_waits_too_long_is_a_503() -> None:
    limits = {"engine_requests": 1, "wait_s": 0.2}
    with run_fake(slow(), admission=limits) as gateway, streaming(gateway), gateway.client() as client:
        refused(client.post("/v1/completions", json=BODY), 503, "engine_overloaded")
        assert (shown(gateway, "running"), shown(gateway, "waiting")) == (1, 0)


@pytest.mark.fault("E8")
def test_a_client_that_goes_away_while_it_waits_leaves_the_queue_at_once() -> None:
    """And never reaches the engine."""
    with run_fake(slow(), admission={"engine_requests": 1}) as gateway, streaming(gateway):
        with httpx.Client(base_url=gateway.url, timeout=0.3) as impatient, pytest.raises(httpx.ReadTimeout):
            impatient.post("/v1/completions", json=BODY)
        assert until(lambda: shown(gateway, "waiting") == 0)
        assert (shown(gateway, "running"), len(gateway.engine("a").bodies)) == (1, 1)


@pytest.mark.parametrize("failure", ["call_error", "stream_error"])
@pytest.mark.fault("E8")
def test_a_request_that_fails_gives_its_place_back(failure: str) -> None:
    """Refused, failed before its first token, or in the midst of a stream."""
    engine = FakeEngine("a")
    setattr(engine.behaviour, failure, GenerationFailed())
    limits = {"engine_requests": 1, "engine_waiting": 0}
    with run_fake(engine, admission=limits) as gateway, gateway.client() as client:
        for body in (BODY, BODY | {"stream": True}, BODY | {"max_tokens": -1}, BODY | {"prompt": None}):
            client.post("/v1/completions", json=body)
            assert until(lambda: shown(gateway, "running") == 0)
        engine.behaviour = FakeBehaviour()
        assert client.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.fault("E8")
def test_a_client_that_does_not_read_its_whole_answers_holds_no_place() -> None:
    """The engine has done its part; of many answers on one connection one cannot be sent, and waits."""
    limits = {"engine_requests": 1, "engine_waiting": 0}
    long = json.dumps(BODY | {"max_tokens": 400, "prompt": "x" * 1000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(long)}\r\n\r\n"
    with run_fake(FakeEngine("a"), admission=limits) as gateway, gateway.client() as client:
        where, bodies = urlsplit(gateway.url), gateway.engine("a").bodies
        with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
            connection.sendall((head.encode() + long) * 40)
            count = -1
            while count < 2 or count != len(bodies):
                count = len(bodies)
                time.sleep(0.5)
            assert 1 < count < 40, "nothing is held up: the answers are too small for this machine's sockets"
            in_flight = 'baton_http_requests_in_flight{route="/v1/completions"} 1.0'
            assert until(lambda: in_flight in client.get("/metrics").text)
            assert until(lambda: shown(gateway, "running") == 0)
            assert client.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.fault("E8")
def test_work_that_outlives_its_answer_keeps_its_place() -> None:
    """`POST /v1/handoffs` answers 202 after `handoffs.wait_s`, and goes on."""
    options = {"admission": {"engine_requests": 1, "engine_waiting": 0}, "handoffs": {"wait_s": 0.1}}
    held = Held()
    engine = FakeEngine("a", behaviour=FakeBehaviour(token_seconds=60, wait=held), supports_handoffs=True)
    with run_fake(engine, **options) as gateway, gateway.client() as client:
        assert client.post("/v1/handoffs", json={"model": "a", "prompt": "1 2"}).status_code == 202
        refused(client.post("/v1/completions", json=BODY), 503, "engine_overloaded")
        held.release()
        assert until(lambda: shown(gateway, "running") == 0)


@pytest.mark.fault("E8")
def test_a_request_that_waits_for_a_handoff_holds_no_place() -> None:
    """There are two: one is the first leg's, the other is free for whoever comes while the second leg waits."""
    limits = {"engine_requests": 2, "engine_waiting": 0}
    with run_fake(slow(supports_handoffs=True), admission=limits) as gateway, gateway.client() as client:
        left = BODY | {"max_tokens": 400, "stream": True, "handoff": {"save": True}}
        with ThreadPoolExecutor() as pool, client.stream("POST", "/v1/completions", json=left) as first:
            body = BODY | {"handoff": {"from": first.headers["x-handoff-id"]}}
            second = pool.submit(httpx.post, f"{gateway.url}/v1/completions", json=body, timeout=30)
            waits = 'baton_http_requests_in_flight{route="/v1/completions"} 2.0'
            assert until(lambda: waits in httpx.get(f"{gateway.url}/metrics").text)
            assert httpx.post(f"{gateway.url}/v1/completions", json=BODY).status_code == 200
            assert not second.done()
            gateway.engine("a").behaviour.token_seconds = 0
            first.read()
            assert second.result().status_code == 200


@pytest.mark.fault("E8")
def test_while_memory_is_short_new_work_is_refused_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes, `GET` and `DELETE` answer all the time."""
    monkeypatch.setattr(memory, "EVERY_S", 0.05)
    (tmp_path / "memory.max").write_text(str(1000 * MIB))
    used = tmp_path / "memory.current"
    used.write_text(str(100 * MIB))
    files = MemoryReader(tmp_path, tmp_path / "no", tmp_path / "no")
    with run_fake(FakeEngine("a"), memory_reader=files) as gateway, gateway.client() as client:

        def status() -> int:
            return client.post("/v1/completions", json=BODY).status_code

        assert status() == 200
        used.write_text(str(800 * MIB))
        assert until(lambda: status() == 503)
        refused(client.post("/v1/completions", json=BODY), 503, "gateway_overloaded")
        for path in ("/livez", "/readyz", "/health", "/v1/models", "/metrics"):
            assert client.get(path).status_code == 200, path
        assert client.delete("/v1/handoffs/none").status_code == 404
        assert "baton_memory_available_bytes 2.097152e+08" in client.get("/metrics").text
        used.write_text(str(100 * MIB))
        assert until(lambda: status() == 200)


@pytest.mark.fault("E11")
def test_the_gateways_event_loop_lag_is_measured() -> None:
    with run_fake(FakeEngine("a")) as gateway, gateway.client() as client:

        def seen() -> float:
            wanted = "baton_event_loop_lag_seconds_count "
            lines = client.get("/metrics").text.splitlines()
            return next(float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted))

        assert until(lambda: seen() >= 1)
