"""The async client does what the sync one does; the logic is the same, the I/O is its own."""

from __future__ import annotations

import asyncio
import inspect

import httpx
import pytest
from support.gateways import FakeGateway

from baton_client import (
    AsyncBaton,
    AsyncConversation,
    AsyncHandoffs,
    Baton,
    ConnectionLost,
    Conversation,
    Handoffs,
    NotFound,
)


async def test_chats_and_handoffs(gateway: FakeGateway) -> None:
    async with AsyncBaton(gateway.url, retries=0) as baton:
        answer = await baton.chat("a", "11", label="mine", max_tokens=1)
        assert answer.handoff is not None
        assert await baton.handoffs.get(answer.handoff) == answer.handoff
        assert await baton.handoffs.find("mine") == answer.handoff
        assert await baton.handoffs.find("another's") is None
        assert (await baton.handoffs.wait(answer.handoff)).state == "ready"
        assert (await baton.handoffs.change(answer.handoff, pin=True)).pin
        made = await baton.handoffs.create("a", prompt="1 2")
        assert [one.id async for one in baton.handoffs.list()] == [made.id, answer.handoff.id]
        assert await baton.handoffs.delete(made)
        assert not await baton.handoffs.delete(made)
        with pytest.raises(NotFound):
            await baton.chat("a", "12", start=made)


async def test_a_text_is_told_piece_by_piece(gateway: FakeGateway) -> None:
    pieces: list[str] = []
    async with AsyncBaton(gateway.url, retries=0) as baton:
        assert [card["id"] for card in await baton.models()] == ["a", "same", "other", "plain"]
        async with baton.conversation("a") as talk:
            answer = await talk.say("one two", told=pieces.append, max_tokens=3)
            assert (answer.text, pieces) == ("one two one", ["one", " two", " one"])
            assert talk.handoff == (answer.handoff.id if answer.handoff else "")
        async with baton.conversation("plain", save=False) as talk:
            await talk.say("one", max_tokens=1)
            await talk.say("two", max_tokens=1)
    assert len(gateway.engine("plain").bodies[-1]["messages"]) == 3


async def test_a_conversation_with_forks_that_speak_at_once(gateway: FakeGateway) -> None:
    async with AsyncBaton(gateway.url, retries=0) as baton:
        async with baton.conversation("a", system="9") as talk:
            await talk.say("11", max_tokens=1)
            forks = [talk.fork() for _ in range(3)]
            answers = await asyncio.gather(*(fork.say("12", max_tokens=1) for fork in forks))
            assert {answer.source.id for answer in answers if answer.source} == {talk.handoff}
        assert (
            len([one async for one in baton.handoffs.list()]) == 1 + 3
        )  # the forks' own, and where they began
        for fork in forks:
            async with fork:
                await fork.say("13", max_tokens=1)
        assert [one async for one in baton.handoffs.list()] == []


async def test_a_conversation_that_is_cancelled_cleans_up(gateway: FakeGateway) -> None:
    async with AsyncBaton(gateway.url, retries=0) as baton:
        said = asyncio.Event()

        async def talk_on() -> None:
            async with baton.conversation("a") as talk:
                await talk.say("11", max_tokens=1)
                said.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(talk_on())
        await said.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [one async for one in baton.handoffs.list()] == []


async def test_an_exception_is_not_hidden(gateway: FakeGateway) -> None:
    async with AsyncBaton(gateway.url, retries=0) as baton:

        async def fail() -> None:
            async with baton.conversation("a") as talk:
                await talk.say("11", max_tokens=1)
                baton._driver._http.base_url = httpx.URL("http://127.0.0.1:1")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as caught:
            await fail()
        assert "will expire" in caught.value.__notes__[0]


async def test_it_is_asked_again_as_the_sync_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def paused(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("baton_client.driver.asyncio.sleep", paused)
    async with AsyncBaton("http://127.0.0.1:1") as baton:
        with pytest.raises(ConnectionLost, match="Check base_url"):
            await baton.chat("a", "11")
    assert len(pauses) == 2


@pytest.mark.parametrize(
    ("sync", "asynchronous"),
    [(Baton, AsyncBaton), (Handoffs, AsyncHandoffs), (Conversation, AsyncConversation)],
)
def test_both_have_the_same_methods_with_the_same_parameters(sync: type, asynchronous: type) -> None:
    def parameters(kind: type) -> dict[str, list[tuple[str, object]]]:
        return {
            name: [(each.name, each.default) for each in inspect.signature(method).parameters.values()]
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert parameters(sync) == parameters(asynchronous)
