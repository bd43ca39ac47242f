"""What a handoff's context says, and what its row in the list tells beside the handoff object."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.event_streams import Following
from support.gateways import FakeGateway, Held, run_fake
from support.handoff_requests import TEXT, first_handoff, leave, post
from support.raw_requests import wait_for

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeBehaviour, FakeEngine

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "11"}
ROW = {"tier", "uses", "last_used_at", "last_outcome", "last_reason"}


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with run_fake(FakeEngine("a", supports_handoffs=True), FakeEngine("b", weights="others")) as running:
        yield running


def chat(gateway: FakeGateway, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"model": "a", "messages": list(messages), "max_tokens": 2} | more
    answer = post(gateway, body, CHAT)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def messages(gateway: FakeGateway, handoff: str) -> dict[str, Any]:
    with gateway.client() as client:
        answer = client.get(f"/v1/handoffs/{handoff}/messages")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_chats_messages_are_shown_with_its_last_answer(gateway: FakeGateway) -> None:
    system = {"role": "system", "content": "5"}
    answer = chat(gateway, system, HI, handoff={"save": True})
    said = answer["choices"][0]["message"]["content"]
    shown = messages(gateway, answer["handoff"]["id"])
    assert shown == {
        "object": "list",
        "handoff": answer["handoff"]["id"],
        "data": [system, HI, {"role": "assistant", "content": said}],
        "text": None,
        "complete": True,
        "why": None,
    }
    again = chat(gateway, {"role": "user", "content": "22"}, handoff={"from": shown["handoff"], "save": True})
    told = messages(gateway, again["handoff"]["id"])["data"]
    assert [each["role"] for each in told] == ["system", "user", "assistant", "user", "assistant"]
    assert told[:3] == shown["data"]


def test_a_context_that_ends_with_a_message_has_no_answer(gateway: FakeGateway) -> None:
    answer = chat(gateway, HI, handoff={"save": {"scope": "prompt"}})
    assert messages(gateway, answer["handoff"]["id"])["data"] == [HI]


def test_a_plain_text_is_text(gateway: FakeGateway) -> None:
    shown = messages(gateway, leave(gateway))
    assert (shown["data"], shown["text"], shown["complete"]) == ([], "11 12 13 11 12 13", True)


def test_a_chat_after_a_text_shows_both(gateway: FakeGateway) -> None:
    answer = chat(gateway, HI, handoff={"from": leave(gateway), "save": True})
    shown = messages(gateway, answer["handoff"]["id"])
    assert [each["role"] for each in shown["data"]] == ["user", "assistant"]
    assert shown["text"].startswith("11 12 13 11 12 13 ")


def test_tools_and_names_of_messages_stay(gateway: FakeGateway) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    sent = [HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    sent.append({"role": "tool", "content": "7", "tool_call_id": "c1"})
    answer = chat(gateway, *sent, handoff={"save": True})
    assert messages(gateway, answer["handoff"]["id"])["data"][:3] == sent


def test_what_no_engine_can_read_is_said_to_be_missing(gateway: FakeGateway) -> None:
    """An operator has stopped the engine: the messages are there, tokens are no text."""
    talk, text = chat(gateway, HI, handoff={"save": True})["handoff"]["id"], leave(gateway)
    whole = chat(gateway, HI, handoff={"save": {"scope": "prompt"}})["handoff"]["id"]
    with gateway.client() as client, Following(gateway.url) as following:
        client.post("/v1/engines/a/stop")
        following.wait_for_state("a", "stopped")
    shown = messages(gateway, talk)
    assert (shown["data"], shown["complete"]) == ([HI], False)
    assert shown["why"] == "The last answer is not known while no engine of the weights of 'a' is ready here."
    shown = messages(gateway, text)
    assert (shown["data"], shown["text"], shown["complete"]) == ([], None, False)
    assert shown["why"].startswith("The text is not known")
    assert messages(gateway, whole)["complete"] is True


@pytest.mark.fault("D12")
def test_anothers_messages_are_answered_as_unknown(tmp_path: Path) -> None:
    keys = {name: create_key(tmp_path / "keys.json", name) for name in ("acme", "globex")}
    with run_fake(
        FakeEngine("a", supports_handoffs=True), auth={"keys_file": tmp_path / "keys.json"}
    ) as gateway:

        def ask(name: str, method: str, path: str, **options: Any) -> httpx.Response:
            with gateway.client(headers={"Authorization": f"Bearer {keys[name]}"}) as client:
                return client.request(method, path, **options)

        left = ask("acme", "POST", "/v1/completions", json=TEXT | {"handoff": {"save": True}})
        path = f"/v1/handoffs/{left.json()['handoff']['id']}/messages"
        assert ask("acme", "GET", path).status_code == 200
        theirs, unknown = ask("globex", "GET", path), ask("globex", "GET", "/v1/handoffs/nothing/messages")
        assert theirs.status_code == unknown.status_code == 404
        for answer in (theirs, unknown):
            answer.headers.pop("date")
        said = [each.text.replace(each.headers["x-request-id"], "") for each in (theirs, unknown)]
        assert said[0] == said[1]
        assert httpx.get(f"{gateway.url}{path}").status_code == 401


@pytest.mark.parametrize("name", ["%2e%2e%2f", "%00", "x" * 5000, "%F0%9F%92%A9", "a%0d%0ab", "-", "*"])
def test_an_id_that_is_none_is_not_found(gateway: FakeGateway, name: str) -> None:
    with gateway.client() as client:
        assert client.get(f"/v1/handoffs/{name}/messages").status_code == 404


def test_a_pending_handoffs_messages_come_later() -> None:
    held = Held()
    engine = FakeEngine("a", supports_handoffs=True, behaviour=FakeBehaviour(token_seconds=1, wait=held))
    # The head of a stream without an event yet goes out with its first comment.
    with run_fake(engine, edge={"keep_alive_s": 0.02}) as gateway, gateway.client() as client:
        with client.stream(
            "POST", "/v1/completions", json=TEXT | {"stream": True, "handoff": {"save": True}}
        ) as stream:
            pending = first_handoff(gateway)
            with gateway.client() as other:
                refused = other.get(f"/v1/handoffs/{pending}/messages")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "handoff_pending")
            assert refused.headers["retry-after"]
            held.release()
            stream.read()
        assert client.get(f"/v1/handoffs/{pending}/messages").status_code == 200


def test_who_was_answered_finds_the_messages_while_the_kv_is_still_being_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held()
    monkeypatch.setattr("baton.library.saving.Saving._kv_known", lambda *_: held(1))
    with run_fake(FakeEngine("a", supports_handoffs=True)) as gateway, gateway.client() as client:
        monkeypatch.setattr("baton.relay.run.SETTLE_WITHIN_S", 0.0)
        answer = chat(gateway, HI, handoff={"save": True})
        path = f"/v1/handoffs/{answer['handoff']['id']}"
        assert client.get(path).json()["state"] == "pending"
        assert len(messages(gateway, answer["handoff"]["id"])["data"]) == 2
        held.release()
        wait_for(lambda: client.get(path).json()["state"] == "ready", "it was never saved")


def test_a_row_tells_how_its_handoff_was_used(gateway: FakeGateway) -> None:
    first = leave(gateway, handoff={"save": {"label": "x"}})
    with gateway.client() as client:

        def row(where: str = "list") -> dict[str, Any]:
            if where == "list":
                found: dict[str, Any] = client.get("/v1/handoffs").json()["data"][-1]
                return found
            shown: dict[str, Any] = client.get(f"/v1/handoffs/{first}").json()
            return shown

        assert {name: row()[name] for name in ROW} == {
            "tier": None,
            "uses": 0,
            "last_used_at": None,
            "last_outcome": None,
            "last_reason": None,
        }
        for _ in range(2):
            post(gateway, TEXT | {"handoff": {"from": first}})
        used = row()
        assert (used["uses"], used["last_outcome"], used["last_reason"]) == (2, "recomputed", "kv_gone")
        assert abs(used["last_used_at"] - time.time()) < 60
        assert row("alone") == used
        changed = client.patch(f"/v1/handoffs/{first}", json={"label": "y", "pin": True}).json()
        assert changed == used | {"label": "y", "pin": True}
        made = client.post("/v1/handoffs", json={"model": "a", "prompt": "1 2"}).json()
        assert not ROW & set(made), "an answer to who made it has the handoff object alone"
