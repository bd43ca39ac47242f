"""`prompt_cache_diagnostics` on the wire, with fake engines: why a prompt missed, in every API, whole and streamed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.gateways import FakeGateway, run_fake
from support.handoff_requests import leave, post

from baton.engines.backend import Operation
from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferReport
from baton.library.handoff import Context, Handoff, HandoffState, new_id
from baton.relay.automatic import AutomaticRequest
from baton.relay.report import MARKS, MISSES, REASONS, Miss
from baton.telemetry.ids import RequestContext
from baton_kv.contract import TransferFailure

WORDS = " ".join(map(str, range(1, 200)))
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": WORDS, "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 2},
    "/v1/responses": {"input": WORDS, "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 2},
}
FIELD = "prompt_cache_diagnostics"
MISSED = {"type": "cache_miss", "reason": "no_candidate", "cache_missed_tokens": 199}


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    engines = FakeEngine("a", supports_handoffs=True), FakeEngine("plain")
    with run_fake(*engines, handoffs={"auto_min_tokens": 64}) as gateway:
        yield gateway


def told(gateway: FakeGateway, path: str, *, stream: bool, **more: Any) -> list[Any]:
    """The diagnostics of an answer, or in every event of a stream that has some."""
    usage = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    body = {"model": "a"} | ASKED[path] | ({"stream": True} | usage if stream else {}) | more
    answer = post(gateway, body, path)
    assert answer.status_code == 200, answer.text
    if not stream:
        found = answer.json()
        return [found[FIELD]] if FIELD in found else []
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(each) for each in data]
    return [held[FIELD] for each in events if FIELD in (held := each.get("response") or each)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_every_api_says_why_a_prompt_missed(gateway: FakeGateway, path: str, stream: bool) -> None:
    assert told(gateway, path, stream=stream) == [MISSED]
    gateway.engine("a").behaviour.cached_tokens = 64
    assert told(gateway, path, stream=stream) == [{"type": "cache_hit"}]
    assert told(gateway, path, stream=stream, model="plain") == [], "nothing is looked for there"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_a_request_that_names_a_handoff_is_told_of_that_one(
    gateway: FakeGateway, path: str, stream: bool
) -> None:
    left = leave(gateway)
    (found,) = told(gateway, path, stream=stream, handoff={"from": left})
    assert (found["type"], found["reason"]) == ("cache_miss", "kv_gone"), found
    assert found["comparison_reusable_tokens"] in (0, 6)
    assert told(gateway, path, stream=stream, handoff={"save": True}) == [], "it continues none"


@pytest.mark.parametrize("path", ASKED)
def test_who_wants_nothing_automatic_is_told_nothing(gateway: FakeGateway, path: str) -> None:
    with gateway.client(headers={"X-Baton-Handoff": "off"}) as client:
        answer = client.post(path, json={"model": "a"} | ASKED[path])
    assert answer.status_code == 200
    assert FIELD not in answer.text
    usage_unasked = post(gateway, {"model": "a", "stream": True} | ASKED[path], path)
    assert (FIELD in usage_unasked.text) == ("completions" not in path)


def test_openai_s_own_client_reads_it(gateway: FakeGateway) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as sdk:
        found = sdk.responses.create(model="a", input=WORDS, max_output_tokens=2)
        chat = sdk.chat.completions.create(model="a", messages=ASKED["/v1/chat/completions"]["messages"])
        assert found.prompt_cache_diagnostics is not None
        assert found.prompt_cache_diagnostics.to_dict() == MISSED
        assert getattr(chat, FIELD) == MISSED
        gateway.engine("a").behaviour.cached_tokens = 64
        again = sdk.responses.create(model="a", input=WORDS, max_output_tokens=2)
    assert again.prompt_cache_diagnostics is not None
    assert again.prompt_cache_diagnostics.type == "cache_hit"


def stored(gateway: FakeGateway, tokens: list[int], seconds: float = 60, **more: Any) -> Handoff:
    """Put a context with KV into the index."""
    now, record_id = time.time(), new_id(automatic=True)
    facts = {"tenant": "local", "model": "a", "weights": "fake", "created_at": now, "ttl_s": 60}
    facts |= {"expires_at": now + 60, "state": HandoffState.READY, "bytes": 4096, "automatic": True}
    record = Handoff.model_validate(facts | {"id": record_id} | more)
    record.fill(tokens, Context(), [])
    index = gateway.app.state.gateway.library.index
    index.add(record, seconds)
    index.publish(record)
    return record


def reason(gateway: FakeGateway, **more: Any) -> dict[str, Any]:
    (found,) = told(gateway, "/v1/completions", stream=False, **more)
    assert isinstance(found, dict)
    return found


def test_what_is_stored_and_not_used_says_exactly_why(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [*range(1, 200)]
    record = stored(gateway, prompt[:40] + [7] * 100)
    below = {"type": "cache_miss", "reason": "below_minimum", "cache_missed_tokens": 159}
    assert reason(gateway) == below | {"comparison_reusable_tokens": 40}
    library = gateway.app.state.gateway.library
    library.index.drop(record)
    record = stored(gateway, prompt[:150])
    longest = {"comparison_reusable_tokens": 150, "cache_missed_tokens": 49}
    assert reason(gateway) == {"type": "cache_miss", "reason": "not_used"} | longest
    throughput = gateway.engine("a").throughput
    with monkeypatch.context() as patched:
        patched.setattr(throughput, "load_s", lambda _size: 9.0)
        patched.setattr(throughput, "prefill_s", lambda _tokens, _steps=0: 1.0)
        patched.setattr(throughput, "loads", 2)  # fewer decide nothing
        assert reason(gateway) == {"type": "cache_miss", "reason": "slower_to_load"} | longest
    with monkeypatch.context() as patched:
        patched.setattr(library, "is_here", lambda _record: False)
        assert reason(gateway) == MISSED | {"reason": "not_here"}
    automatic = gateway.app.state.gateway.relay.automatic
    automatic.incompatible["a", record.id] = None
    assert reason(gateway) == MISSED | {"reason": "kv_incompatible"}
    automatic.incompatible.clear()
    library.index.expire_in(record, -1)
    assert reason(gateway) == MISSED | {"reason": "expired"}


@pytest.mark.parametrize("failure", TransferFailure)
def test_a_load_that_failed_says_so(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, failure: TransferFailure
) -> None:
    """Whatever the engine reports is one of the reasons that the reference names."""
    monkeypatch.setattr(gateway.app.state.gateway.library, "kv_gone", lambda _record: None)
    relay = gateway.app.state.gateway.relay
    engine = gateway.engine("a")
    for lost in (0, 5):
        stored(gateway, [*range(1, 150)])
        request = relay.automatic.request(engine, Operation.COMPLETIONS, {}, "local")
        assert isinstance(request, AutomaticRequest)
        transfer = request.choose([*range(1, 200)], loads=True, saves=False)
        assert transfer is not None
        assert isinstance(transfer.report, TransferReport)
        transfer.report.miss, transfer.report.lost = failure, lost
        request.ended(transfer)
        found = request.diagnostics(RequestContext("r", prompt_tokens=199))
        assert found is not None
        wanted = Miss.LOAD_FAILED if lost else Miss(REASONS.get(failure, Miss.NOT_USED))
        assert (found["reason"], found["comparison_reusable_tokens"]) == (wanted, 149)


def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed(gateway: FakeGateway) -> None:
    engine = gateway.engine("a")
    request = gateway.app.state.gateway.relay.automatic.request(engine, Operation.COMPLETIONS, {}, "local")
    request.choose([*range(1, 200)], loads=False, saves=False)
    found = request.diagnostics(RequestContext("r", prompt_tokens=199))
    assert found == MISSED | {"reason": "prompt_logprobs"}
    nobody_looked = gateway.app.state.gateway.relay.automatic.request(engine, Operation.CHAT, {}, "local")
    assert nobody_looked.diagnostics(RequestContext("r", prompt_tokens=9)) is None


def test_every_reason_is_described() -> None:
    assert set(MISSES) == set(Miss)
    assert set(REASONS.values()) <= set(Miss)
    assert set(MARKS) == {Operation.COMPLETIONS, Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES}
