"""Property-based requests on every route of the gateway's own document, on real engines (FAULTS row F1).

The engines run a tiny random model with a short context: what is tried is the gateway and vLLM's request handling.
"""

from __future__ import annotations

import collections
import re
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.gateways import RealGateway

pytestmark = pytest.mark.engine
EMBED_PATHS = ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank")
INPUT_PATHS = ("/v1/embeddings", "/v1/responses", "/pooling", "/classify")
LIMIT_FIELDS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
LEAKS = re.compile(
    r"/(?:root|home|usr|opt|tmp)/|0x[0-9a-f]{6,}|Traceback|site-packages|instance of [A-Z]|object (?:is not|has no) "
    r"|\b[A-Z]\w+(?:Error|Exception)\b"
)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("examples", [6, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.fault("F1")
def test_no_request_gets_a_5xx_or_an_undocumented_answer(tiny_gateway: RealGateway, examples: int) -> None:
    with tiny_gateway.client("acme") as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    schema.config.update(base_url=tiny_gateway.url)
    counts: dict[str, collections.Counter[int]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == "/v1/events":
            continue  # a stream without an end, and without a parameter
        label = f"{operation.method.upper()} {operation.path}"
        counts[label] = _try(operation, tiny_gateway, examples)
    for label, statuses in counts.items():
        print(f"{label}: {statuses.total()} cases, {dict(sorted(statuses.items()))}")
    assert len(counts) >= 21
    assert all(
        statuses.total() >= (examples if label.startswith("POST") else 1)
        for label, statuses in counts.items()
    )
    assert any(200 in statuses for label, statuses in counts.items() if label == "POST /v1/completions")
    assert httpx.get(f"{tiny_gateway.url}/readyz").status_code == 200


def _try(operation: Any, gateway: RealGateway, examples: int) -> collections.Counter[int]:
    statuses: collections.Counter[int] = collections.Counter()
    headers = {"Authorization": f"Bearer {gateway.keys['acme']}"}

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), data=strategies.data())
    def run(case: Any, data: strategies.DataObject) -> None:
        if isinstance(case.body, dict):
            _steer(case, data)
        response = case.call(base_url=gateway.url, timeout=60, headers=headers)
        statuses[response.status_code] += 1
        assert response.status_code < 500, f"{case.as_curl_command()}\n{response.text}"
        case.validate_response(response, checks=CONFORMANCE)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert not LEAKS.search(error["message"]), error

    run()
    return statuses


CONFORMANCE = [status_code_conformance, content_type_conformance, response_schema_conformance]


def _steer(case: Any, data: strategies.DataObject) -> None:
    """Bring most cases past the first check: a served model, few fields at once, words to work on.

    Without this nearly every case ends at the first of its many wrong fields.
    """
    if data.draw(strategies.sampled_from(range(8))) == 5:
        return
    kept = data.draw(strategies.sets(strategies.sampled_from(sorted(case.body) or [""]), max_size=3))
    for field in set(case.body) - kept:
        del case.body[field]
    words = strategies.text(min_size=1, max_size=40)
    sound: dict[str, Any] = {"model": "embed" if case.path.endswith(EMBED_PATHS) else "tiny"}
    if case.path in LIMIT_FIELDS:  # or most cases would run to the end of the context
        sound[LIMIT_FIELDS[case.path]] = data.draw(strategies.integers(1, 8))
    if "chat" in case.path or "messages" in case.path:
        sound["messages"] = [{"role": "user", "content": data.draw(words)}]
    elif case.path.endswith(("/score", "/rerank")):
        sound["queries" if case.path.endswith("/score") else "query"] = data.draw(words)
        sound["documents"] = data.draw(strategies.lists(words, min_size=1, max_size=3))
    elif case.path == "/detokenize":
        sound["tokens"] = data.draw(strategies.lists(strategies.integers(0, 49151), max_size=9))
    else:
        sound["input" if case.path in INPUT_PATHS else "prompt"] = data.draw(words)
    case.body = sound | case.body | {"model": sound["model"]}
