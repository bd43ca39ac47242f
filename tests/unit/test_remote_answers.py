"""Whatever a server elsewhere sends, its answer is passed on or refused, and nothing else happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engines.backend import Operation
from baton.engines.elsewhere.answers import (
    EventSplitter,
    Names,
    ServerEvent,
    StreamReader,
    TokenCount,
    parsed_json,
    refusal,
)
from baton.engines.elsewhere.server import whole_reply
from baton.errors import BatonError, RemoteFailed
from baton.telemetry.ids import RequestContext

NAMES = (
    "model",
    "response",
    "message",
    "usage",
    "handoff",
    "error",
    "type",
    "code",
    "choices",
    "param",
    "delta",
)
NUMBERS = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["far", "near", "error"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from((*NAMES, *NUMBERS, "message", "request_id")) | st.text(), inner, max_size=5
        )
    ),
    max_leaves=12,
)
STREAMS = (Operation.COMPLETIONS, Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES)


@settings(max_examples=300, deadline=None)
@given(VALUES, st.sampled_from(STREAMS), st.sampled_from(["", "error", "message_stop"]), st.booleans())
def test_any_event_is_passed_on_or_refused(value: Any, operation: Operation, name: str, hides: bool) -> None:
    context = RequestContext("id")
    reader = StreamReader(operation, Names("far", "near", "near"), TokenCount(context), hides)
    failure: BatonError | None = None
    told = ""
    try:
        told = reader.passed_on(ServerEvent(name, json.dumps(value)))
    except BatonError as error:
        failure = error
    if failure is not None:
        body = failure.body("id")
        assert body["error"]["request_id"] == "id"
        json.dumps(body, allow_nan=False)
        assert len(failure.code) <= 64
    assert told == "" or told.endswith("\n\n")
    for line in (line for line in told.splitlines() if line.startswith("data: ")):
        json.loads(line[6:], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert "\n\n" not in told[:-2]
    assert 0 <= context.prompt_tokens <= 10**9
    assert 0 <= context.generated_tokens <= 10**9


@settings(max_examples=300, deadline=None)
@given(VALUES | st.binary(), st.integers(100, 999), st.dictionaries(st.just("retry-after"), st.text()))
def test_any_refusal_is_an_error_of_ours(value: Any, status: int, headers: dict[str, str]) -> None:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    error = refusal("near", status, headers, body)
    assert 400 <= error.status <= 599
    assert len(error.code) <= 64
    assert isinstance(error.body("id")["error"]["message"], str)
    json.dumps(error.body("id"), allow_nan=False)
    assert error.retry_after_s is None or 1 <= error.retry_after_s <= 3600


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=200) | st.text(alphabet="data: event\r\n\ufeff{}", max_size=120).map(str.encode),
    st.data(),
)
def test_events_do_not_depend_on_how_their_bytes_are_cut(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    def events(parts: list[bytes]) -> list[ServerEvent] | str:
        splitter, found = EventSplitter(1 << 20), list[ServerEvent]()
        try:
            for part in parts:
                found += splitter.feed(part)
        except RemoteFailed:
            return "refused"
        return found

    assert events(pieces) == events([stream])
    found = events([stream])
    if isinstance(found, list):
        assert events(["".join(map(str, found)).encode()]) == found


@pytest.mark.parametrize("text", ["a\nevent: forged\ndata: 1", "[DONE]\n\ndata: 2"])
def test_no_event_of_a_server_becomes_two(text: str) -> None:
    told = str(ServerEvent("", text))
    assert EventSplitter(1000).feed(told.encode())[0].data == text


@dataclass
class Whole:
    """The answer of a server elsewhere, which has come."""

    body: bytes
    media_type: str = "application/json"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    async def read(self, _most: int, *, take: Callable[[int], None]) -> bytes:
        take(len(self.body))
        return self.body


@pytest.mark.fault("I12")
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
async def test_numbers_that_no_json_holds_become_null(number: str) -> None:
    body = f'{{"model": "far", "data": [{{"embedding": [0.5, {number}]}}]}}'.encode()
    for there in ("far", "near"):
        reply = await whole_reply(
            Whole(body),  # type: ignore[arg-type]  # as much of an answer as is read
            1000,
            Names(there, "near", "asked"),
            TokenCount(RequestContext("id")),
        )
        told = json.loads(reply.body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert told["data"] == [{"embedding": [0.5, None]}]
    whole = b'{"model":  "far", "data": [0.5]}'
    reply = await whole_reply(
        Whole(whole), 1000, Names("far", "far", "far"), TokenCount(RequestContext("id"))
    )  # type: ignore[arg-type]  # as above
    assert reply.body == whole, "what is JSON goes on byte by byte"


def test_halves_of_a_character_are_passed_on_and_depth_is_refused_beside_them() -> None:
    """Servers in JavaScript cut an emoji in two events, as `\\ud83d` and `\\ude00`."""
    for half in ("\\ud83d", "\\uDE00", "\\\\ud83d"):
        event = ServerEvent("", f'{{"choices": [{{"delta": {{"content": "a{half}"}}}}]}}')
        reader = StreamReader(
            Operation.CHAT, Names("near", "near", "near"), TokenCount(RequestContext("id")), hides_usage=False
        )
        assert reader.passed_on(event) == str(event)
    deep = '["\\ud83d",' + "[" * 500 + "]" * 500 + "]"
    with pytest.raises(ValueError, match="recursion limit"):
        parsed_json(deep.encode())
