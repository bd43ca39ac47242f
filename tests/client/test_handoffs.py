"""`Baton.handoffs`, at a gateway with fake engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gateways import FakeGateway, run_fake

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeEngine
from baton_client import Baton, HandoffFailed, HandoffNotReady, NotAllowed, NotFound
from baton_client.call import Call, Pause, Reply, Script
from baton_client.retries import Retries
from baton_client.scripts import until_ready


def test_a_handoff_is_created_shown_changed_and_deleted(baton: Baton) -> None:
    made = baton.handoffs.create("a", prompt="1 2 3", label="first")
    assert (made.state, made.tokens, made.label) == ("ready", 3, "first")
    assert baton.handoffs.get(made) == made
    changed = baton.handoffs.change(made.id, label="second", pin=True)
    assert (changed.label, changed.pin) == ("second", True)
    assert baton.handoffs.change(made, pin=False).label == "second"
    assert baton.handoffs.delete(made)
    assert not baton.handoffs.delete(made)
    with pytest.raises(NotFound):
        baton.handoffs.get(made.id)


def test_what_one_says_is_read_back(baton: Baton) -> None:
    sent = {"role": "user", "content": "4"}
    answer = baton.chat("a", [sent], save=True, max_tokens=1)
    assert answer.handoff is not None
    said = baton.handoffs.messages(answer.handoff)
    assert said.data == (sent, {"role": "assistant", "content": answer.text})
    assert (said.text, said.complete, said.why) == (None, True, None)
    assert baton.handoffs.messages(baton.handoffs.create("a", prompt="1 2").id).text == "1 2"


def test_one_is_brought_into_memory(baton: Baton) -> None:
    """Fake engines store no KV, and say so."""
    made = baton.handoffs.create("a", prompt="1 2")
    told = baton.handoffs.warm(made)
    assert (told["id"], told["state"]) == (made.id, "done")
    assert [(row["engine"], row["reason"]) for row in told["data"]] == [("a", "kv_gone"), ("same", "kv_gone")]
    assert [row["engine"] for row in baton.handoffs.warm(made.id, model="same")["data"]] == ["same"]
    with pytest.raises(NotFound):
        baton.handoffs.warm("nothing")


def test_the_engines_are_listed(baton: Baton) -> None:
    assert [each.name for each in baton.engines()] == ["a", "same", "other", "plain"]
    first = baton.engines()[0]
    assert (first.kind, first.state, first.why, first.models) == ("generate", "ready", None, ("a",))
    assert {"generate", "handoffs", "latent"} <= set(first.can)


def test_one_is_made_from_a_chat_from_token_ids_or_from_another(baton: Baton) -> None:
    from_ids = baton.handoffs.create("a", prompt=[1, 2])
    from_other = baton.handoffs.create("a", prompt="3", start=from_ids)
    assert (from_other.parent, from_other.tokens) == (from_ids.id, 3)
    from_chat = baton.handoffs.create("a", messages=[{"role": "user", "content": "4"}], ttl_s=9)
    assert from_chat.expires_at - from_chat.created_at == pytest.approx(9, abs=1)


def test_several_are_joined_ahead_and_in_a_chat(baton: Baton) -> None:
    parts = [baton.handoffs.create("a", prompt=text) for text in ("1 2", "3")]
    joined = baton.handoffs.create("a", start=parts, order="any", join="moved")
    assert joined.exact, "the fake moves nothing"
    assert (joined.tokens, joined.parents) == (3, tuple(part.id for part in parts))
    answer = baton.chat("a", "4", start=(parts[0].id, parts[1]), save=True, max_tokens=1)
    assert answer.handoff is not None
    assert answer.handoff.parents == joined.parents


def test_one_of_another_model_is_translated(baton: Baton) -> None:
    left = baton.handoffs.create("a", prompt=[1, 2])
    made = baton.handoffs.create("other", start=left, translate=True)
    assert (made.translated_from, made.model, made.tokens) == (left.id, "other", 2)
    answer = baton.chat("other", "4", start=left, translate=True, max_tokens=1)
    assert answer.source is not None
    assert answer.source.exact


@pytest.mark.parametrize("given", [{}, {"prompt": "1", "messages": "1"}])
def test_a_context_is_a_prompt_or_messages(baton: Baton, given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="either"):
        baton.handoffs.create("a", **given)


def test_the_list_goes_over_all_pages_and_the_newest_of_a_label_is_found(baton: Baton) -> None:
    made = [baton.handoffs.create("a", prompt="1", label=f"number {i % 60}") for i in range(105)]
    assert [one.id for one in baton.handoffs.list()] == [one.id for one in reversed(made)]
    found = baton.handoffs.find("number 3")
    assert found is not None
    assert found.id == made[63].id
    assert baton.handoffs.find("number 60") is None


def test_a_pending_handoff_is_waited_for() -> None:
    with (
        run_fake(FakeEngine("a", supports_handoffs=True), handoffs={"wait_s": 0.05}) as gateway,
        Baton(gateway.url, retries=0) as baton,
    ):
        gateway.engine("a").behaviour.token_seconds = 0.4
        made = baton.handoffs.create("a", prompt="1 2")
        assert made.state == "pending"
        with pytest.raises(HandoffNotReady, match="still pending after"):
            baton.handoffs.wait(made, timeout_s=0.05)
        assert baton.handoffs.wait(made, timeout_s=10).state == "ready"


def test_one_that_failed_is_not_waited_for() -> None:
    """The gateway shows it as failed until it goes."""

    def played(script: Script[object]) -> list[Call[object] | Pause]:
        steps = [next(script)]
        while True:
            reply = Reply(200, {}, shown) if isinstance(steps[-1], Call) else None
            steps.append(script.send(reply))

    names = ("id", "model", "tokens", "images", "latent_steps", "bytes", "pin", "created_at", "expires_at")
    row = ", ".join(f'"{name}": 1' for name in names)
    shown = ('{"state": "failed", "parent": null, "label": null, ' + row + "}").encode()
    with pytest.raises(HandoffFailed, match="create it again"):
        played(until_ready("h", 5, Retries()))


def test_the_key_is_sent(tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.json", "acme")
    engine = FakeEngine("a", supports_handoffs=True)
    with run_fake(engine, auth={"keys_file": tmp_path / "keys.json"}) as gateway:
        with Baton(gateway.url, key, retries=0) as baton:
            assert list(baton.handoffs.list()) == []
        with Baton(gateway.url, retries=0) as nobody, pytest.raises(NotAllowed, match="API key"):
            nobody.handoffs.create("a", prompt="1")


def test_an_id_cannot_lead_to_another_route(gateway: FakeGateway, baton: Baton) -> None:
    with pytest.raises(NotFound):
        baton.handoffs.get("../models")
