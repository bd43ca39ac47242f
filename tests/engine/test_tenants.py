"""What tenants may see of one another on a shared engine, and what a pooling engine answers."""

from __future__ import annotations

import base64
import json
import time

import httpx
import numpy
import pytest
from support.gateways import RealGateway
from support.relay_requests import once_saved
from support.trace_collector import Collector

pytestmark = pytest.mark.engine
PROMPT = "A prompt of several blocks, so that its prefix is worth caching. " * 8


def cached_tokens(gateway: RealGateway, tenant: str, **fields: object) -> int:
    with gateway.client(tenant) as client:
        sent = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1} | fields
        usage = client.post("/v1/completions", json=sent).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found


def test_tenants_share_an_engine_but_not_its_prefix_cache(tiny_gateway: RealGateway) -> None:
    assert cached_tokens(tiny_gateway, "acme") == 0
    assert cached_tokens(tiny_gateway, "acme") > 0
    assert cached_tokens(tiny_gateway, "globex") == 0
    assert cached_tokens(tiny_gateway, "globex", cache_salt="acme") > 0
    assert cached_tokens(tiny_gateway, "globex") > 0


def test_without_a_key_the_engine_is_out_of_reach(tiny_gateway: RealGateway) -> None:
    with tiny_gateway.client() as client:
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}).status_code == 401
        assert client.get("/readyz").status_code == 200
        assert "acme" not in client.get("/metrics").text


def test_the_client_s_trace_goes_on_in_the_engine(tiny_gateway: RealGateway, collector: Collector) -> None:
    """W3C trace context in, vLLM's span with the engine's times out."""
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    sent = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    with tiny_gateway.client("acme") as client:
        client.headers["traceparent"] = f"00-{trace}-{parent}-01"
        request_id = client.post("/v1/completions", json=sent).headers["x-request-id"]
    deadline = time.monotonic() + 20
    while not (found := [span for span in collector.spans if span.trace_id.hex() == trace]):
        assert time.monotonic() < deadline, f"none of {len(collector.spans)} spans is of this trace"
        time.sleep(0.05)
    (span,) = found
    told = {item.key: item.value for item in span.attributes}
    assert span.parent_span_id.hex() == parent
    assert request_id in told["gen_ai.request.id"].string_value
    assert told["gen_ai.usage.completion_tokens"].int_value == 2
    assert told["gen_ai.latency.time_to_first_token"].double_value > 0


def test_embeddings_come_from_the_pooling_engine(tiny_gateway: RealGateway) -> None:
    with tiny_gateway.client("acme") as client:
        answer = client.post("/v1/embeddings", json={"model": "embed", "input": ["one", "two", "one"]})
        assert answer.status_code == 200, answer.text
        first, second, third = (item["embedding"] for item in answer.json()["data"])
        assert len(first) == 64
        assert first != second
        assert first == pytest.approx(third, abs=1e-2)
        refused = client.post("/v1/completions", json={"model": "embed", "prompt": "x"})
        assert refused.json()["error"]["code"] == "operation_unsupported"


def test_packed_embeddings_say_how_they_are_read(tiny_gateway: RealGateway) -> None:
    sent = {"model": "embed", "input": ["one", "two"]}
    with tiny_gateway.client("acme") as client:
        plain = client.post("/v1/embeddings", json=sent).json()["data"]
        packed = client.post("/v1/embeddings", json=sent | {"encoding_format": "bytes"})
        coded = client.post("/v1/embeddings", json=sent | {"encoding_format": "base64"}).json()["data"]
    assert packed.headers["content-type"] == "application/octet-stream"
    parts = json.loads(packed.headers["metadata"])["data"]
    for part, item, text in zip(parts, plain, coded, strict=True):
        raw = packed.content[part["start"] : part["end"]]
        assert numpy.frombuffer(raw, numpy.float32) == pytest.approx(item["embedding"], abs=1e-2)
        assert base64.b64decode(text["embedding"])[:4] == raw[:4]


def relayed(gateway: RealGateway, tenant: str, handoff: dict[str, object]) -> httpx.Response:
    with gateway.client(tenant) as client:
        sent = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return client.post("/v1/completions", json=sent | {"return_token_ids": True, "handoff": handoff})


@pytest.mark.fault("D5")
def test_another_tenants_handoff_is_answered_like_an_unknown_one(tiny_gateway: RealGateway) -> None:
    left = once_saved(tiny_gateway, relayed(tiny_gateway, "acme", {"save": True}).json()["handoff"], "acme")
    assert (left["state"], left["bytes"] > 0) == ("ready", True)
    told = []
    for guess in (left["id"], "A" * len(left["id"])):
        stolen = relayed(tiny_gateway, "globex", {"from": guess})
        told.append((stolen.status_code, stolen.json()["error"] | {"request_id": ""}))
    assert told[0] == told[1]
    assert told[0][0] == 404


@pytest.mark.chaos
@pytest.mark.timeout(400)  # two starts, where it is the first to ask for the gateway
def test_a_handoff_outlives_the_gateway(tiny_gateway: RealGateway) -> None:
    left = relayed(tiny_gateway, "acme", {"save": {"label": "kept"}}).json()["handoff"]
    before = relayed(tiny_gateway, "acme", {"from": left["id"]}).json()
    tiny_gateway.restart()
    after = relayed(tiny_gateway, "acme", {"from": left["id"]}).json()
    assert after["handoff"]["source"]["outcome"] == "loaded"
    assert after["handoff"]["source"]["loaded_tokens"] == left["tokens"] - 1
    assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    assert relayed(tiny_gateway, "globex", {"from": left["id"]}).status_code == 404
