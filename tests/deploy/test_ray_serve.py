"""Gateways with fake engines as replicas of a real Ray Serve, on two nodes, behind its HAProxy."""

from __future__ import annotations

import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from support.ray_cluster import RayCluster, with_ray
from support.watched_streams import wait_for

pytestmark = [with_ray, pytest.mark.timeout(240)]
FAKE = "support.ray_replicas:fake"
ENVIRONMENT = {
    "BATON_AUTH__ALLOW_UNAUTHENTICATED": "true",
    "BATON_ENGINES": json.dumps(
        [{"name": name, "model": "fake", "handoff": True} for name in ("alpha", "slow")]
    ),
    "BATON_RESPONSES__BUDGET": "0",
    "BATON_DRAIN_DELAY_S": "5",
    "BATON_DRAIN_TIMEOUT_S": "6",
    "BATON_ADMISSION__ENGINE_REQUESTS": "8",
    "BATON_LOG_FORMAT": "json",
}
ASK = {"model": "alpha", "prompt": "one two three", "max_tokens": 3}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with RayCluster(tmp_path_factory.mktemp("ray") / "log", ENVIRONMENT) as running:
        running.run(FAKE, replicas=2, per_node=1)
        wait_for_both(running)
        yield running


def wait_for_both(cluster: RayCluster) -> None:
    """HAProxy asks a replica twice before it sends requests there."""
    with cluster.client() as client:

        def nodes() -> set[str]:
            heads = [{"x-session-id": str(number)} for number in range(16)]
            return {client.get("/v1/models", headers=head).headers["x-node"] for head in heads}

        wait_for(lambda: nodes() == {"one", "two"}, 20)


def streamed(cluster: RayCluster, session: str, tokens: int) -> tuple[str, list[str]]:
    """The replica that answered, and the lines of a stream of so many tokens, ten a second."""
    body = {"model": "slow", "prompt": "a " * tokens, "max_tokens": tokens, "stream": True}
    with (
        cluster.client() as client,
        client.stream("POST", "/v1/completions", json=body, headers={"x-session-id": session}) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        return answer.headers["x-replica"], [line for line in answer.iter_lines() if line]


def test_a_session_stays_on_one_replica_and_sessions_are_spread(cluster: RayCluster) -> None:
    with cluster.client() as client:
        seen = {
            session: {
                client.post("/v1/completions", json=ASK, headers={"x-session-id": session}).headers["x-node"]
                for _ in range(6)
            }
            for session in map(str, range(24))
        }
    assert {len(nodes) for nodes in seen.values()} == {1}
    assert min(Counter(node for nodes in seen.values() for node in nodes).values()) >= 4, seen


def test_an_answer_has_one_request_id_which_the_log_has_too(cluster: RayCluster) -> None:
    with cluster.client() as client:
        answer = client.post("/v1/completions", json=ASK, headers={"x-request-id": "client-4711"})
    assert answer.headers.get_list("x-request-id") == ["client-4711"]
    assert "server" not in answer.headers
    wait_for(lambda: any('"client-4711"' in line for line in cluster.written()), 20)
    (found,) = (line for line in cluster.written() if '"client-4711"' in line)
    line = json.loads(found)
    assert line["replica"] == answer.headers["x-replica"]


def test_the_page_of_metrics_has_every_replica_s_series(cluster: RayCluster) -> None:
    with cluster.client() as client:
        assert client.get("/metrics").status_code == 404, "clients do not see it"
        for session in map(str, range(8)):
            client.post("/v1/completions", json=ASK, headers={"x-session-id": session})

    def shown() -> set[str]:
        page = httpx.get(f"{cluster.metrics_url}/metrics").text
        return set(re.findall(r'baton_tenant_requests_total\{code_class="2xx",replica="(\w+)"', page))

    wait_for(lambda: len(shown()) == 2, 20)
    page = httpx.get(f"{cluster.metrics_url}/metrics").text
    assert page.count("# TYPE baton_engine_up gauge") == 1
    assert len(re.findall(r'baton_engine_up\{engine="alpha",replica="\w+"\} 1.0', page)) == 2


def test_haproxy_s_own_ports_are_for_this_machine(cluster: RayCluster) -> None:
    addresses = {each.address for card in psutil.net_if_addrs().values() for each in card if each.family == 2}
    others = addresses - {"127.0.0.1"}
    for port in cluster.closed:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
        for address in others:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=2)


def test_a_client_that_leaves_ends_its_work(cluster: RayCluster) -> None:
    body = {"model": "slow", "prompt": "a " * 300, "max_tokens": 300, "stream": True}
    with cluster.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())

    def disconnects() -> bool:
        page = httpx.get(f"{cluster.metrics_url}/metrics").text
        return re.search(r"baton_client_disconnects_total\{\S+ [1-9]", page) is not None

    wait_for(disconnects, 20)


def test_a_gateway_whose_engines_are_lost_is_replaced(cluster: RayCluster) -> None:
    with cluster.client() as client:
        client.get("/lose")
        wait_for(lambda: cluster.tell("running") == 1, 60)
        wait_for(lambda: cluster.tell("running") == 2, 60)
    wait_for_both(cluster)


def test_a_replica_that_is_scaled_away_loses_no_stream(cluster: RayCluster) -> None:
    """Short ones end whole, one that is too long ends with an error event; new requests go on meanwhile."""
    with ThreadPoolExecutor(20) as pool:
        short = [pool.submit(streamed, cluster, str(number), 60) for number in range(8)]
        long = [pool.submit(streamed, cluster, str(number), 400) for number in range(8)]
        time.sleep(1)
        cluster.run(FAKE, replicas=1, per_node=1)
        with cluster.client() as client:
            for number in range(200):
                answer = client.post("/v1/completions", json=ASK, headers={"x-session-id": str(number)})
                assert answer.status_code == 200, answer.text
        ended = [stream.result() for stream in short]
        assert {lines[-1] for _, lines in ended} == {"data: [DONE]"}
        assert len({replica for replica, _ in ended}) == 2
        left = answer.headers["x-replica"]
        for replica, lines in (stream.result() for stream in long):
            if replica == left:
                assert lines[-1] == "data: [DONE]"
            else:
                assert lines[-2] == "event: error", lines[-3:]
                assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"


def test_replicas_come_and_go_with_the_gateways_queues(cluster: RayCluster) -> None:
    cluster.run(
        FAKE, replicas=1, max_replicas=2, per_node=1, upscale_delay_s=1, downscale_delay_s=2, target_load=0.5
    )
    assert cluster.tell("running") == 1
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(streamed, cluster, str(number), 200) for number in range(16)]
        wait_for(lambda: cluster.tell("running") == 2, 60)
        assert {stream.result()[1][-1] for stream in streams} == {"data: [DONE]"}
    wait_for(lambda: cluster.tell("running") == 1, 60)
