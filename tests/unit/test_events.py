"""Events: whose they are, how a client goes on that was cut off, and what a slow one costs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.errors import RateLimited, ShuttingDown
from baton.telemetry import events as module
from baton.telemetry.events import FEEDS, RING, WAITING, Events
from baton.telemetry.metrics import EventMetrics

EVENT = re.compile(r"(?:id: (\S+)\n)?event: (\S+)\ndata: (.*)\n\n")


class Following:
    """A client's stream, read event by event."""

    def __init__(self, stream: AsyncGenerator[str, None]) -> None:
        self._stream = stream
        self._read: list[tuple[str, str, dict[str, Any]]] = []

    async def next(self) -> tuple[str, str, dict[str, Any]]:
        if not self._read:
            text = await asyncio.wait_for(anext(self._stream), 10)
            found = [(head, kind, json.loads(data)) for head, kind, data in EVENT.findall(text)]
            assert "".join(EVENT.split(text)[::4]) == "", "nothing but events"
            self._read += found
        return self._read.pop(0)

    async def kinds(self, count: int) -> list[str]:
        return [(await self.next())[1] for _ in range(count)]

    async def close(self) -> None:
        await self._stream.aclose()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def events(registry: CollectorRegistry) -> Events:
    return Events(EventMetrics(registry), wall=lambda: 1000.25)


def follow(
    events: Events, tenant: str, last: str | None = None, *, key: str = "k", most: int = 8
) -> Following:
    return Following(events.follow(tenant, key, last, most=most))


def tell(events: Events, tenant: str, number: int) -> None:
    events.tell(tenant, "handoff.created", lambda: {"number": number})


async def test_a_tenant_is_told_of_its_own_and_of_what_is_nobodys(events: Events) -> None:
    acme, globex = follow(events, "acme"), follow(events, "globex")
    assert [(await each.next())[1] for each in (acme, globex)] == ["open", "open"]
    tell(events, "acme", 1)
    tell(events, "nobody", 2)
    events.tell_all("engine.state", {"engine": "a"})
    assert await acme.kinds(2) == ["handoff.created", "engine.state"]
    _, kind, data = await globex.next()
    assert (kind, data) == ("engine.state", {"type": "engine.state", "at": 1000.25, "engine": "a"})
    await acme.close()
    await globex.close()


async def test_ids_say_nothing_of_what_others_do(events: Events) -> None:
    """They count within a tenant's feed, whatever else happens."""
    acme = follow(events, "acme")
    first, *_ = await acme.next()
    other = follow(events, "globex")
    await other.next()
    for number in range(50):
        tell(events, "globex", number)
    tell(events, "acme", 0)
    second, *_ = await acme.next()
    assert [int(each.rpartition("-")[2]) for each in (first, second)] == [0, 1]
    await acme.close()
    await other.close()


async def test_a_client_that_was_cut_off_goes_on_after_its_last_event(events: Events) -> None:
    acme = follow(events, "acme")
    await acme.next()
    for number in range(5):
        tell(events, "acme", number)
    ids = [(await acme.next())[0] for _ in range(3)]
    await acme.close()
    tell(events, "acme", 5)
    again = follow(events, "acme", ids[-1])
    opened = await again.next()
    assert opened[:2] == (ids[-1], "open"), "cut off here, it would miss nothing either"
    assert [(await again.next())[2]["number"] for _ in range(3)] == [3, 4, 5]
    await again.close()
    newest = follow(events, "acme", again_id := (await newest_id(events, "acme")))
    assert (await newest.next())[:2] == (again_id, "open")
    await newest.close()


async def newest_id(events: Events, tenant: str) -> str:
    stream = follow(events, tenant)
    found, *_ = await stream.next()
    await stream.close()
    return found


async def test_what_is_not_known_any_more_is_a_reset_and_never_a_gap(events: Events) -> None:
    acme = follow(events, "acme")
    oldest, *_ = await acme.next()
    await acme.close()
    for number in range(RING):
        tell(events, "acme", number)
    whole = follow(events, "acme", oldest)
    assert await whole.kinds(RING + 1) == ["open"] + ["handoff.created"] * RING
    await whole.close()
    tell(events, "acme", RING)
    late = follow(events, "acme", oldest)
    head, kind, data = await late.next()
    assert (kind, data["type"]) == ("reset", "reset")
    assert head == await newest_id(events, "acme")
    await late.close()


@pytest.mark.parametrize(
    "last",
    ["", "x", "-", "-1", "5-5", "{feed}-", "{feed}--1", "{feed}-2", "{feed}-99999999999999999999999999", "{feed}-\u00b2", "{feed}- 1", "{feed}-0x0", "{other}-0", "\n", "a" * 5000],
)  # fmt: skip
async def test_an_id_that_is_none_of_the_tenants_own_is_a_reset(events: Events, last: str) -> None:
    other = await newest_id(events, "globex")
    acme = await newest_id(events, "acme")
    feeds = {"feed": acme.rpartition("-")[0], "other": other.rpartition("-")[0]}
    stream = follow(events, "acme", last.format(**feeds))
    _, kind, _ = await stream.next()
    assert kind == ("open" if not last else "reset")
    await stream.close()


@pytest.mark.fault("E21")
async def test_a_client_that_does_not_read_is_dropped_and_costs_others_nothing(
    events: Events, registry: CollectorRegistry
) -> None:
    slow, quick = follow(events, "acme"), follow(events, "acme")
    begin, *_ = await slow.next()
    await quick.next()
    for number in range(2 * WAITING):
        tell(events, "acme", number)
        assert (await quick.next())[2]["number"] == number
    with pytest.raises(StopAsyncIteration):
        await slow.next()
    assert registry.get_sample_value("baton_event_streams_dropped_total") == 1
    assert registry.get_sample_value("baton_event_streams") == 1
    resumed = follow(events, "acme", begin)
    assert await resumed.kinds(2 * WAITING + 1) == ["open"] + ["handoff.created"] * 2 * WAITING
    await quick.close()
    await resumed.close()
    print(f"E21: waiting for a client that does not read: at most {WAITING} events")


@pytest.mark.fault("E21")
async def test_a_key_has_so_many_streams_and_a_closed_one_leaves_room(events: Events) -> None:
    mine = [follow(events, "acme", key="one", most=2) for _ in range(2)]
    for each in mine:
        await each.next()
    with pytest.raises(RateLimited, match="event_streams"):
        await follow(events, "acme", key="one", most=2).next()
    other = follow(events, "acme", key="two", most=2)
    await other.next()
    await mine[0].close()
    again = follow(events, "acme", key="one", most=2)
    await again.next()
    for each in (mine[1], other, again):
        await each.close()
    assert not events._streams


async def test_a_stream_that_nobody_began_to_read_holds_nothing(
    events: Events, registry: CollectorRegistry
) -> None:
    await follow(events, "acme", most=1).close()
    stream = follow(events, "acme", most=1)
    await stream.next()
    await stream.close()
    assert registry.get_sample_value("baton_event_streams") == 0


async def test_the_end_of_the_gateway_ends_every_stream_with_a_last_event(events: Events) -> None:
    stream = follow(events, "acme")
    await stream.next()
    tell(events, "acme", 1)
    events.close()
    events.close()
    assert await stream.kinds(2) == ["handoff.created", "end"]
    with pytest.raises(StopAsyncIteration):
        await stream.next()
    with pytest.raises(ShuttingDown):
        await follow(events, "acme").next()


async def test_feeds_are_bounded_and_those_that_are_listened_to_stay(events: Events) -> None:
    listened = follow(events, "listened")
    await listened.next()
    for number in range(2 * FEEDS):
        await newest_id(events, f"tenant-{number}")
    assert len(events._feeds) <= FEEDS
    tell(events, "listened", 1)
    assert (await listened.next())[1] == "handoff.created"
    await listened.close()


async def test_a_stream_ends_with_its_key(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)
    known = True
    stream = events.follow("acme", "key", None, most=8, valid=lambda: known)
    await anext(stream)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.03)
    assert not reading.done()
    known = False
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(reading, 20)


async def test_a_tenant_that_nobody_listens_for_costs_nothing(events: Events) -> None:
    def never() -> dict[str, Any]:
        raise AssertionError("nobody asked")

    events.tell("acme", "handoff.created", never)
    assert not events._feeds


@pytest.mark.fault("F11")
async def test_no_text_of_a_tenant_or_a_model_ends_an_event(events: Events) -> None:
    hostile = "a\n\nevent: engine.state\ndata: {}\r\n\rid: 9\u2028\x00\ud800</script>"
    stream = follow(events, "acme")
    await stream.next()
    events.tell("acme", "handoff.created", lambda: {"label": hostile})
    _, kind, data = await stream.next()
    assert (kind, data["label"]) == ("handoff.created", hostile)
    await stream.close()


def test_the_limits_are_those_that_the_documentation_names() -> None:
    assert (module.RING, module.WAITING) == (512, 256)
