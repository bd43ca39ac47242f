"""Work that is heavy for the processor holds nobody else up: rows E10 and E11 on a real engine."""

from __future__ import annotations

import time

import httpx
import pytest
from support.gateways import RealGateway
from support.steady_requests import asked_all_the_time

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.fault("E11")
def test_a_megabyte_of_text_is_tokenised_off_the_event_loop(tiny_gateway: RealGateway) -> None:
    text = "The water rises, the bridge at kilometre 12 is closed; nobody is hurt. " * 14_000
    with (
        tiny_gateway.client("acme") as client,
        asked_all_the_time(tiny_gateway, "E11, 1 MB of text, five times"),
    ):
        for _ in range(5):
            answer = client.post("/tokenize", json={"model": "tiny", "prompt": text})
            assert answer.status_code == 200
            assert answer.json()["count"] > 100_000
            too_long = client.post("/v1/completions", json={"model": "tiny", "prompt": text, "max_tokens": 1})
            assert (too_long.status_code, too_long.json()["error"]["code"]) == (
                400,
                "context_length_exceeded",
            )


EVIL: dict[str, dict[str, object]] = {
    "a pattern with much choice": {"structured_outputs": {"regex": "(a|b|ab|ba)*c{1,200}(d|e){5,100}"}},
    "an enum of 4,000": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"enum": [f"value {number}" for number in range(4000)]}},
        }
    },
    "a pattern of 300 groups": {"structured_outputs": {"regex": "(a)" * 300}},
    "arrays of arrays": {"structured_outputs": {"json": {"type": "array", "items": {"type": "array"}}}},
    "no grammar": {"structured_outputs": {"grammar": "root ::= ("}},
    "30,000 brackets": {"structured_outputs": {"regex": "(" * 30_000}},
    "(a+)+b": {"structured_outputs": {"regex": "(a+)+b"}},
}


@pytest.mark.fault("E10")
def test_hostile_schemas_and_patterns_end_in_an_answer_or_a_400(tiny_gateway: RealGateway) -> None:
    """And the engine goes on, for this tenant and for others."""
    with tiny_gateway.client("acme") as client, asked_all_the_time(tiny_gateway, "E10"):
        for name, more in EVIL.items():
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4} | more
            began = time.monotonic()
            answer = client.post("/v1/chat/completions", json=body)
            print(f"E10: {name}: {answer.status_code} after {time.monotonic() - began:.2f} s")
            assert answer.status_code in (200, 400), (name, answer.text)
    with tiny_gateway.client("globex") as client:
        fine: httpx.Response = client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2}
        )
        assert fine.status_code == 200
