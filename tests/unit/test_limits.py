from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from baton.api.limits import read_json, strip_steering
from baton.errors import BatonError, InvalidJson, InvalidRequest, UnsupportedMediaType
from baton.setting_groups import LimitSettings

LIMITS = LimitSettings(body_depth=8)


async def parse(body: bytes, content_type: str = "application/json") -> dict[str, Any]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", content_type.encode())]
    return await read_json(Request({"type": "http", "headers": headers}, receive), LIMITS)


def run(body: bytes, content_type: str = "application/json") -> dict[str, Any]:
    return asyncio.run(parse(body, content_type))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", InvalidJson),
        (b"{", InvalidJson),
        (b"[]", InvalidJson),
        (b'"text"', InvalidJson),
        (b'{"a": NaN}', InvalidJson),
        (b'{"a": Infinity}', InvalidJson),
        (b'{"a": "\xff"}', InvalidJson),
        (b'{"a": "\\ud800"}', InvalidJson),
        (b"[" * 100_000, InvalidRequest),
        (b'{"a":' * 9 + b"1" + b"}" * 9, InvalidRequest),
        (b'{"a": ' + b"[" * 8 + b"]" * 8 + b"}", InvalidRequest),
    ],
)
def test_what_is_no_json_object_or_too_deep_is_refused(body: bytes, error: type[BatonError]) -> None:
    with pytest.raises(error):
        run(body)


def test_a_body_at_the_depth_limit_passes() -> None:
    assert run(b'{"a":' * 8 + b"1" + b"}" * 8)


def test_many_shallow_containers_are_not_depth() -> None:
    assert len(run(json.dumps({"a": [[1]] * 1000}).encode())["a"]) == 1000


@pytest.mark.parametrize(
    "content_type", ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonx"]
)
def test_only_json_is_taken(content_type: str) -> None:
    with pytest.raises(UnsupportedMediaType):
        run(b"{}", content_type)


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.x+json"]
)
def test_json_by_any_of_its_names_is_taken(content_type: str) -> None:
    assert run(b'{"a": 1}', content_type) == {"a": 1}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.text("xyz", max_size=3), json_values, max_size=3))
def test_what_passes_is_what_was_sent(value: dict[str, Any]) -> None:
    assert run(json.dumps(value).encode()) == value


def test_steering_fields_are_dropped_wherever_they_stand() -> None:
    body: dict[str, Any] = {
        "prompt": "x",
        "kv_transfer_params": {"do_remote_prefill": True},
        "ec_transfer_params": "a string where a dict belongs",
        "cache_salt": "mine",
        "vllm_xargs": {"kv_transfer_params": "smuggled", "other": 1},
    }
    assert strip_steering(body) == [
        "kv_transfer_params",
        "ec_transfer_params",
        "cache_salt",
        "kv_transfer_params",
    ]
    assert body == {"prompt": "x", "vllm_xargs": {"other": 1}}
