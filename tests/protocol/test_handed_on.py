"""Streams that a drain ends: what they said is left behind as a handoff, and another gateway goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake

from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.http import request as gateway_requests
from baton.relay import run

pytestmark = pytest.mark.fault("A20")

SAID = 4
KEPT = {"a": {"handoff": True}}
"""Its store has a folder, which the next gateway finds."""
TEXT = {"model": "a", "prompt": [1, 2, 3], "max_tokens": 9, "stream": True}
MESSAGES = [{"role": "user", "content": "5 6"}]
CHAT = {"model": "a", "messages": MESSAGES, "max_tokens": 9, "stream": True}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, what is left behind is written in time."""
    monkeypatch.setattr(run, "LEFT_WITHIN_S", 30)
    monkeypatch.setattr(gateway_requests, "LEAVE_WITHIN_S", 60)


@dataclass
class Draining:
    """A gateway that cuts off what runs, as at the end of a drain, before the fifth token."""

    gateway: FakeGateway

    def stream(self, path: str, body: dict[str, Any], **headers: str) -> tuple[list[Any], dict[str, Any]]:
        """The chunks of a stream that is cut off, and the error that it ends with."""
        with httpx.Client(base_url=self.gateway.url, timeout=30) as client:
            text = client.post(path, json=body, headers=headers).text
        *chunks, last = [event for event in text.split("\n\n") if event]
        assert last.startswith("event: error\n"), text
        error = json.loads(last.partition("data: ")[2])["error"]
        assert error["code"] == "shutting_down"
        return [json.loads(each.partition("data: ")[2]) for each in chunks], error


@contextmanager
def draining(store: Path, **of_engine: Any) -> Iterator[Draining]:
    found: list[FakeGateway] = []
    words = 0

    async def wait(_seconds: float) -> None:
        nonlocal words
        words += bool(engine.active)
        if words == SAID + 1:
            found[0].app.state.gateway.drain.cut()
            await asyncio.sleep(0)

    engine = FakeEngine("a", supports_handoffs=True, behaviour=FakeBehaviour(wait=wait), **of_engine)
    with run_fake(engine, told=KEPT, handoffs={"store": f"file:{store}"}) as gateway:
        found.append(gateway)
        yield Draining(gateway)


@contextmanager
def after(store: Path, **of_engine: Any) -> Iterator[FakeGateway]:
    engine = FakeEngine("a", supports_handoffs=True, **of_engine)
    with run_fake(engine, told=KEPT, handoffs={"store": f"file:{store}"}) as gateway:
        yield gateway


def outcomes(gateway: FakeGateway) -> dict[str, float]:
    """How many streams were handed on, by what became of them."""
    prefix = 'baton_streams_handed_on_total{outcome="'
    lines = httpx.get(f"{gateway.metrics_url}/metrics", timeout=30).text.splitlines()
    found = (line.removeprefix(prefix).split('"} ') for line in lines if line.startswith(prefix))
    return {outcome: float(count) for outcome, count in found if float(count)}


def test_a_completion_goes_on_at_the_next_gateway_where_it_was_cut_off(tmp_path: Path) -> None:
    with draining(tmp_path / "store") as first:
        chunks, error = first.stream("/v1/completions", TEXT)
        assert outcomes(first.gateway) == {"left": 1}
    said = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    left = error["handoff"]
    assert (left["said_tokens"], left["said_characters"]) == (SAID, len(said))
    with after(tmp_path / "store") as second, second.client() as client:
        rest = TEXT | {"max_tokens": 9 - SAID, "stream": False, "prompt": ""}
        answer = client.post("/v1/completions", json=rest, headers={"X-Baton-Handoff": left["id"]})
        assert second.engine("a").bodies[-1]["prompt"] == [1, 2, 3, *map(int, said.split())]
        assert answer.headers["x-baton-resumed"] == "1"
        assert outcomes(second) == {"went_on": 1}
        assert client.get(f"/v1/handoffs/{left['id']}").json()["expires_at"] == left["expires_at"]


def test_a_chat_goes_on_without_a_message_and_is_one_answer_after(tmp_path: Path) -> None:
    with draining(tmp_path / "store") as first:
        chunks, error = first.stream("/v1/chat/completions", CHAT)
    left = error["handoff"]
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert len(said) == left["said_characters"]
    with after(tmp_path / "store") as second, second.client() as client:
        rest = CHAT | {"stream": False, "messages": [], "max_tokens": 2}
        rest["handoff"] = {"from": left["id"], "save": True}
        answer = client.post("/v1/chat/completions", json=rest).json()
        prompt = second.engine("a").bodies[-1]["prompt"]
        assert len(prompt) == answer["handoff"]["tokens"] - 2
        kept = client.get(f"/v1/handoffs/{answer['handoff']['id']}/messages").json()["data"]
    assert [message["role"] for message in kept] == ["user", "assistant"]
    whole = " ".join(map(str, prompt[-SAID:])) + " " + answer["choices"][0]["message"]["content"]
    assert kept[1]["content"] == whole


def test_one_that_goes_on_may_be_cut_off_again(tmp_path: Path) -> None:
    with draining(tmp_path / "store") as first:
        _, error = first.stream("/v1/chat/completions", CHAT)
    with draining(tmp_path / "store") as second:
        begun = error["handoff"]["id"]
        _, error = second.stream("/v1/chat/completions", CHAT | {"messages": [], "handoff": {"from": begun}})
        assert outcomes(second.gateway) == {"left": 1}
    assert error["handoff"]["said_tokens"] == SAID
    with after(tmp_path / "store") as third, third.client() as client:
        rest = CHAT | {"stream": False, "messages": [], "handoff": {"from": error["handoff"]["id"]}}
        answer = client.post("/v1/chat/completions", json=rest)
        assert answer.headers["x-baton-resumed"] == "2"


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (
            "/v1/chat/completions",
            CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
            "a call of a tool may have begun",
        ),
        (
            "/v1/chat/completions",
            CHAT
            | {"continue_final_message": True, "add_generation_prompt": False}
            | {"messages": [*MESSAGES, {"role": "assistant", "content": "7"}]},
            "its answer began in a message",
        ),
    ],
)
def test_what_may_not_be_exact_is_not_handed_on_and_says_why(
    tmp_path: Path, path: str, body: dict[str, Any], why: str
) -> None:
    with draining(tmp_path / "store") as first:
        _, error = first.stream(path, body)
        assert error["handoff"] == {"id": None, "reason": why}
        assert outcomes(first.gateway) == {"inexact": 1}


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/completions", TEXT, {"X-Baton-Handoff": "off"}),
        ("/v1/completions", TEXT | {"n": 2}, {}),
        ("/v1/completions", TEXT | {"prompt": ["1 2", "3"]}, {}),
        ("/v1/responses", {"model": "a", "input": "1 2", "max_output_tokens": 9, "stream": True}, {}),
    ],
    ids=["off", "several answers", "several prompts", "responses"],
)
def test_others_end_as_before(
    tmp_path: Path, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    """Those of clients that want nothing kept, too."""
    with draining(tmp_path / "store") as first:
        _, error = first.stream(path, body, **headers)
        assert "handoff" not in error
        assert outcomes(first.gateway) == {}


def test_what_was_no_chat_goes_on_as_none(tmp_path: Path) -> None:
    with draining(tmp_path / "store") as first:
        _, error = first.stream("/v1/completions", TEXT)
    with after(tmp_path / "store") as gateway, gateway.client() as client:
        body = CHAT | {"messages": [], "handoff": {"from": error["handoff"]["id"]}}
        refused = client.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
