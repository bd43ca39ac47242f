"""Plain pooling, scores and ranks by vLLM's handlers, on a real engine without a plugin."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from support.gateways import RealGateway

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def client(tiny_gateway: RealGateway) -> Iterator[httpx.Client]:
    with tiny_gateway.client("acme") as client:
        yield client


def pooled(client: httpx.Client, **body: object) -> list[float]:
    answer = client.post("/pooling", json={"model": "embed"} | body).raise_for_status().json()
    vector: list[float] = answer["data"][0]["data"]
    return vector


def test_texts_and_token_ids_pool_alike(client: httpx.Client) -> None:
    """A text and its token ids give one vector, the one that `/v1/embeddings` gives."""
    tokens = client.post("/tokenize", json={"model": "embed", "prompt": "the sea"}).json()["tokens"]
    by_text, by_tokens = pooled(client, input="the sea"), pooled(client, input=tokens)
    embedded = client.post("/v1/embeddings", json={"model": "embed", "input": "the sea"}).json()
    assert by_text == by_tokens
    # vLLM writes the nine digits that a float32 needs if orjson is installed, and a double's otherwise.
    assert np.array_equal(np.float32(by_text), np.float32(embedded["data"][0]["embedding"]))
    assert len(by_text) == 64


def test_every_encoding_of_vllms_says_the_same(client: httpx.Client) -> None:
    """Floats, base64 and bytes, as vLLM's clients ask for them."""
    floats = pooled(client, input="the sea")
    packed = client.post(
        "/pooling", json={"model": "embed", "input": "the sea", "encoding_format": "base64"}
    ).json()
    assert struct.unpack(f"<{len(floats)}f", base64.b64decode(packed["data"][0]["data"])) == pytest.approx(
        floats
    )
    raw = client.post("/pooling", json={"model": "embed", "input": "the sea", "encoding_format": "bytes"})
    assert raw.headers["content-type"] == "application/octet-stream"
    assert json.loads(raw.headers["metadata"])["data"][0]["shape"] == [64]
    assert struct.unpack(f"<{len(floats)}f", raw.content) == pytest.approx(floats)


def test_scores_and_ranks_agree(client: httpx.Client) -> None:
    """The document that is the query itself scores 1 and comes first."""
    documents = ["a mountain", "the sea", "a road"]
    for path in ("/score", "/v1/score"):
        body = {"model": "embed", "queries": "the sea", "documents": documents}
        scores = [row["score"] for row in client.post(path, json=body).raise_for_status().json()["data"]]
        assert scores[1] == pytest.approx(1.0, abs=1e-2)
        assert max(scores) == scores[1]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = {"model": "embed", "query": "the sea", "documents": documents, "top_n": 2}
        ranked = client.post(path, json=body).raise_for_status().json()["results"]
        assert ranked[0]["index"] == 1
        assert len(ranked) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", {"model": "embed", "input": "x"}),
        ("/score", {"model": "tiny", "queries": "x", "documents": ["y"]}),
        ("/pooling", {"model": "tiny", "input": "x"}),
    ],
)
def test_what_a_model_cannot_do_is_a_400(client: httpx.Client, path: str, body: dict[str, object]) -> None:
    """Not a 404, and not a failure."""
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "operation_unsupported")


def test_data_for_a_plugin_that_is_not_there_is_a_400(client: httpx.Client) -> None:
    """And says what to send instead."""
    response = client.post("/pooling", json={"model": "embed", "data": {"x": 1}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "data")
