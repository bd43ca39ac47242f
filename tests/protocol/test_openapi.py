"""The gateway's own document shows vLLM's full schemas, and every route keeps to it."""

from __future__ import annotations

from typing import Any

import pytest
from support.gateways import FakeGateway, run_fake

from baton.engines.fake.engine import FakeEngine
from baton.http import openapi
from baton.http.middleware.gate import PUBLIC_PATHS


@pytest.fixture
def document(fake_gateway: FakeGateway) -> dict[str, Any]:
    with fake_gateway.client() as client:
        loaded: dict[str, Any] = client.get("/openapi.json").json()
        return loaded


@pytest.mark.parametrize(
    ("path", "schema", "field"),
    [
        ("/v1/completions", "CompletionRequest", "structured_outputs"),
        ("/v1/chat/completions", "ChatCompletionRequest", "response_format"),
        ("/v1/responses", "ResponsesRequest", "max_output_tokens"),
        ("/v1/messages", "AnthropicMessagesRequest", "stop_sequences"),
    ],
)
def test_a_route_shows_the_full_request_schema(
    document: dict[str, Any], path: str, schema: str, field: str
) -> None:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    vllm = {"$ref": f"#/components/schemas/{schema}"}
    wish = {"handoff": {"$ref": "#/components/schemas/BatonHandoff"}}
    assert body["allOf"][:2] == [vllm, {"type": "object", "properties": wish}]
    ours = [field for part in body["allOf"][2:] for field in part["properties"]]
    assert ours == (["images"] if path == "/v1/completions" else [])
    (header,) = document["paths"][path]["post"]["parameters"]
    assert (header["name"], header["in"]) == ("X-Baton-Handoff", "header")
    assert field in document["components"]["schemas"][schema]["properties"]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    known = document["components"]["schemas"]

    def walk(value: object) -> None:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                assert reference.removeprefix("#/components/schemas/") in known
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(document)


def test_every_operation_documents_its_errors_in_the_one_shape(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            refused = operation["responses"].get("401")
            assert (refused is None) == (path in PUBLIC_PATHS) == (operation.get("security") == []), path
            for status, response in operation["responses"].items():
                if status >= "400" and path not in PUBLIC_PATHS:
                    schema = response["content"]["application/json"]["schema"]
                    if path == "/mcp":  # whose protocol has errors of its own too
                        schema = schema.get("anyOf", [schema])[0]
                    assert schema == {"$ref": "#/components/schemas/BatonError"}, path
    assert document["security"] == [{"key": []}]


def test_a_handoff_is_as_the_document_says() -> None:
    with run_fake(FakeEngine("a", supports_handoffs=True)) as gateway, gateway.client() as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        made = client.post("/v1/handoffs", json={"model": "a", "prompt": "1 2"}).json()
        listed = client.get("/v1/handoffs").json()
    assert set(schemas["BatonHandoffObject"]["properties"]) == set(made)
    assert set(schemas["BatonHandoffList"]["properties"]) == set(listed)


def test_a_document_that_could_not_be_written_is_written_for_the_next_request(
    fake_gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example because the process had no thread left."""

    async def fails(*_: object) -> bytes:
        raise RuntimeError("can't start new thread")

    with fake_gateway.client() as client:
        with monkeypatch.context() as patched:
            patched.setattr(openapi, "in_own_thread", fails)
            assert client.get("/openapi.json").status_code == 500
        assert client.get("/openapi.json").status_code == 200
