"""What automatic handoffs look up, load, save and drop, with a stand-in for the engine's part."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.library_machines import Clocks, House, audits_of

from baton.config.groups import HandoffSettings
from baton.engines.backend import Operation
from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferRequest
from baton.errors import HandoffNotFound
from baton.library.handoff import Handoff, HandoffState, key_of, new_id
from baton.library.here.records import Edit
from baton.library.index import SHARED_FOR_S, SUPERSEDED_FOR_S, HandoffIndex
from baton.library.library import Library
from baton.library.tiers import Here
from baton.relay.automatic import SEEN, TRIED, AutomaticHandoffs, SaveRule
from baton.relay.cost import LoadCost
from baton.telemetry.metrics import HandoffMetrics
from baton_kv.contract import TransferFailure
from baton_kv.stores.file import FileStore

ENGINE = FakeEngine("a", supports_handoffs=True)
LEAST = 64


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path, Clocks())


class Gateway:
    """Automatic handoffs of one gateway, and the engine's part of their requests."""

    def __init__(self, house: House, **settings: Any) -> None:
        settings = {"auto": "on", "auto_min_tokens": LEAST} | settings
        self.house = house
        self.handoffs: Library = house.handoffs(**settings)
        self.metrics = HandoffMetrics(CollectorRegistry())
        limits = HandoffSettings(**settings)
        self.automatic = AutomaticHandoffs(
            self.handoffs,
            LoadCost(),
            self.metrics,
            limits,
            {},
            SaveRule(LEAST),
            audits_of(self.handoffs, limits),
        )

    async def ask(
        self,
        prompt: list[int],
        said: list[int] | None = None,
        *,
        tenant: str = "local",
        operation: Operation = Operation.CHAT,
        engine: FakeEngine = ENGINE,
        miss: TransferFailure | None = None,
        saves: bool = True,
        body: dict[str, Any] | None = None,
    ) -> TransferRequest | None:
        """One request, whose KV the engine saves at once."""
        request = self.automatic.request(engine, operation, body or {}, tenant)
        transfer = request.choose(prompt, loads=True, saves=saves) if request is not None else None
        if request is None or transfer is None:
            return None
        report = transfer.report
        report.prompt_ids, report.output_ids, report.miss = prompt, said or [], miss
        if transfer.save is not None:
            FileStore(self.house.folder / "store").put(transfer.save, [b"k" * 100])
        request.ended(transfer)
        await asyncio.gather(*self.handoffs.background.running)
        return transfer

    async def finds(self, prompt: list[int], tenant: str = "local") -> int:
        match, _ = self.automatic.find(ENGINE, tenant, prompt)
        return match.tokens if match is not None else 0


def tokens(count: int, begin: int = 0) -> list[int]:
    return list(range(begin, begin + count))


async def test_a_conversation_is_loaded_as_far_as_it_was_saved(house: House) -> None:
    gateway = Gateway(house)
    first = await gateway.ask(tokens(100), tokens(20, 100))
    assert first is not None
    assert (first.load, first.save is not None) == (None, True)
    second = await gateway.ask([*tokens(120), *tokens(100, 500)], tokens(10, 900))
    assert second is not None
    assert (second.load, second.limit) == (first.save, 120)
    third = await gateway.ask([*tokens(120), *tokens(100, 500), *tokens(10, 900), 7])
    assert third is not None
    assert (third.load, third.limit) == (second.save, 230)


async def test_a_context_is_found_while_its_record_is_being_written(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(house)
    create, found = Here.create, list[int]()
    loop = asyncio.get_running_loop()

    def late(storage: Here, record: Handoff, edit: Edit) -> bool:
        found.append(asyncio.run_coroutine_threadsafe(gateway.finds(tokens(100)), loop).result(10))
        return create(storage, record, edit)

    monkeypatch.setattr(Here, "create", late)
    await gateway.ask(tokens(100))
    assert found == [100]


async def test_only_the_last_context_of_a_conversation_is_kept(house: House) -> None:
    gateway = Gateway(house)
    for turns in (1, 2, 3):
        await gateway.ask(tokens(100 * turns))
    assert await gateway.finds(tokens(300)) == 300
    house.clocks.pass_(SUPERSEDED_FOR_S + 1)
    gateway.handoffs.upkeep.drop_expired()
    await asyncio.gather(*gateway.handoffs.background.running)
    assert len(list((house.folder / "store").rglob("*.kv"))) == 1
    assert await gateway.finds(tokens(100)) == 100, "of the last one, whose prefix it is"


def left_automatically(count: int, *, life_s: int = 3600, created_at: int = 0) -> Handoff:
    return Handoff(
        id=new_id(automatic=True), tenant="local", model="a", weights="w", created_at=created_at, ttl_s=life_s,
        expires_at=3600, tokens=array("i", tokens(count)), bytes=1, state=HandoffState.READY, automatic=True,
        cache_key="k",
    )  # fmt: skip


@pytest.mark.parametrize("here", [("short", "long"), ("short",), ()])
def test_a_context_is_found_until_one_that_continues_it_is_on_this_machine(here: tuple[str, ...]) -> None:
    now = 0.0
    short, long = left_automatically(200), left_automatically(300)
    index = HandoffIndex(
        lambda: now, is_elsewhere=lambda record: ("long" if record is long else "short") not in here
    )
    for record in (short, long):
        index.add(record, 3600)
        index.publish(record)

    def found(usable: Callable[[Handoff], bool]) -> Handoff | None:
        match = index.prefixes.find("local", "w", tokens(400), usable)
        return match.record if match is not None else None

    assert found(lambda _: True) is long
    assert found(lambda record: record is not long) is (short if here == ("short",) else None)
    assert index.keyed("local", "k") == [long], "the last one of its conversation"
    now = SUPERSEDED_FOR_S + 1
    assert index.expired() == [], "another machine may have no more of it"
    index.publish(long)  # it is not longer for it
    now = SHARED_FOR_S + 1
    assert index.expired() == [short]


def test_contexts_that_others_continue_are_evicted_first_and_live_no_longer_for_it() -> None:
    now = 0.0
    idle, short, long = (left_automatically(count, created_at=at) for at, count in enumerate((100, 200, 300)))
    idle.tokens[0] = 7
    index = HandoffIndex(lambda: now, is_elsewhere=lambda record: record is long)
    for record, life_s in ((idle, 3600), (short, 300), (long, 3600)):
        index.add(record, life_s)
        index.publish(record)
    assert index.by_eviction("local") == [short, idle, long]
    now = 301
    assert index.expired() == [short]


async def test_a_handoff_that_a_client_named_is_found_and_never_dropped(house: House) -> None:
    gateway = Gateway(house)
    named = gateway.handoffs.begin(ENGINE, "local")
    FileStore(house.folder / "store").put(named.key, [b"k"])
    gateway.handoffs.end(named, TransferRequest(), tokens(100))
    await gateway.handoffs.settled(named, 5)
    await asyncio.gather(*gateway.handoffs.background.running)
    found = await gateway.ask(tokens(200))
    assert found is not None
    assert (found.load, found.limit) == (named.key, 100)
    house.clocks.pass_(SUPERSEDED_FOR_S + 1)
    assert await gateway.handoffs.get(named.id, "local") is named


async def test_clients_do_not_see_them(house: House) -> None:
    gateway = Gateway(house)
    transfer = await gateway.ask(tokens(100))
    assert transfer is not None
    assert transfer.save is not None
    assert await gateway.handoffs.page("local", limit=10, after=None) == ([], False)
    with pytest.raises(HandoffNotFound):
        await gateway.handoffs.get(transfer.save.partition("/")[2], "local")


async def test_another_tenant_finds_nothing(house: House) -> None:
    gateway = Gateway(house)
    await gateway.ask(tokens(100), tenant="one")
    assert await gateway.finds(tokens(100), "two") == 0
    other = await gateway.ask(tokens(100), tenant="two")
    assert other is not None
    assert other.load is None
    assert other.save is not None
    assert other.save.startswith(key_of("two", ""))


async def test_a_restarted_gateway_and_one_beside_it_find_them_too(house: House) -> None:
    await Gateway(house).ask(tokens(100))
    assert await Gateway(house).finds(tokens(100)) == 100
    one, two = Gateway(house), Gateway(house)
    await one.ask(tokens(100, 1000))
    assert await two.finds(tokens(100, 1000)) == 0
    await two.handoffs.holdings.refresh()
    assert await two.finds(tokens(100, 1000)) == 100


@pytest.mark.parametrize("miss", [TransferFailure.MISSING, TransferFailure.CORRUPT])
async def test_kv_that_is_gone_is_not_looked_for_again(house: House, miss: TransferFailure) -> None:
    gateway = Gateway(house)
    await gateway.ask(tokens(100))
    again = await gateway.ask(tokens(150), miss=miss, saves=False)
    assert again is not None
    assert again.load is not None
    assert await gateway.finds(tokens(150)) == 0


async def test_an_engine_that_cannot_load_another_s_kv_does_not_try_again(house: House) -> None:
    gateway, other = Gateway(house), FakeEngine("b", supports_handoffs=True)
    await gateway.ask(tokens(100))
    tried = await gateway.ask(tokens(150), engine=other, miss=TransferFailure.INCOMPATIBLE, saves=False)
    assert tried is not None
    assert tried.load is not None
    assert await gateway.ask(tokens(150), engine=other, saves=False) is None
    assert await gateway.finds(tokens(150)) == 100, "the engine that saved it finds it"


async def test_load_loads_and_saves_nothing(house: House) -> None:
    await Gateway(house).ask(tokens(100))
    gateway = Gateway(house, auto="load")
    found = await gateway.ask(tokens(300))
    assert found is not None
    assert (found.load is not None, found.save) == (True, None)
    assert await gateway.ask(tokens(300, 7000)) is None


async def test_off_and_engines_without_handoffs_do_nothing(house: House) -> None:
    assert Gateway(house, auto="off").automatic.request(ENGINE, Operation.CHAT, {}, "local") is None
    plain, on = FakeEngine("plain"), Gateway(house).automatic
    assert on.request(plain, Operation.CHAT, {}, "local") is None
    assert on.request(ENGINE, Operation.TOKENIZE, {}, "local") is None
    assert on.request(ENGINE, Operation.COMPLETIONS, {"use_beam_search": True}, "local") is None


async def test_an_engine_s_own_mode_comes_before_that_of_all(house: House) -> None:
    gateway = Gateway(house)
    own = dataclasses.replace(gateway.automatic, modes={"a": "off"})
    assert own.request(ENGINE, Operation.CHAT, {}, "local") is None


async def test_a_token_that_no_model_has_is_left_to_the_engine_to_refuse(house: House) -> None:
    gateway = Gateway(house)
    await gateway.ask(tokens(100))
    assert await gateway.ask([2**40] * 100) is None


async def test_too_little_that_is_new_is_not_saved(house: House) -> None:
    gateway = Gateway(house)
    await gateway.ask(tokens(100))
    few = await gateway.ask([*tokens(100), *tokens(LEAST - 1, 500)])
    assert few is not None
    assert few.least == LEAST
    assert await gateway.finds([*tokens(100), *tokens(LEAST - 1, 500)]) == 100
    await gateway.ask([*tokens(100), *tokens(LEAST, 500)])
    assert await gateway.finds([*tokens(100), *tokens(LEAST, 500)]) == 100 + LEAST


MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.mark.parametrize(
    ("operation", "body", "ttl_s"),
    [
        (Operation.MESSAGES, {"system": [{"type": "text", "text": "a"} | MARK]}, 300),
        (Operation.MESSAGES, {"system": "a", "tools": [{"name": "look"} | HOUR]}, 3600),
        (
            Operation.MESSAGES,
            {"messages": [{"role": "user", "content": [{"text": "a"} | MARK | HOUR]}]},
            3600,
        ),
        (Operation.MESSAGES, {"messages": [{"content": [MARK, HOUR, MARK]}]}, 3600),
        (Operation.MESSAGES, MARK, 300),
        (Operation.MESSAGES, {"cache_control": {"ttl": ["odd"]}}, 300),
        (Operation.CHAT, {"prompt_cache_key": "a"}, 7200),
        (Operation.RESPONSES, {"prompt_cache_retention": "24h"}, 7200),
    ],
)
async def test_a_context_is_saved_for_clients_that_ask_in_the_words_of_other_servers(
    house: House, operation: Operation, body: dict[str, Any], ttl_s: int
) -> None:
    gateway = Gateway(house, auto="load", ttl_s=7200)
    await gateway.ask(tokens(100), operation=operation, body=body)
    assert await gateway.finds(tokens(100)) == 100
    house.clocks.pass_(ttl_s - 1)
    assert await gateway.finds(tokens(100)) == 100
    house.clocks.pass_(2)
    assert await gateway.finds(tokens(100)) == 0


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        (Operation.MESSAGES, {"system": "a", "tools": None, "messages": [{"content": "a"}, "odd"]}),
        (Operation.MESSAGES, {"cache_control": None, "prompt_cache_key": "a"}),
        (Operation.CHAT, {"prompt_cache_retention": "in_memory", **MARK}),
    ],
)
async def test_what_is_no_wish_saves_nothing(
    house: House, operation: Operation, body: dict[str, Any]
) -> None:
    gateway = Gateway(house, auto="load")
    assert await gateway.ask(tokens(100), operation=operation, body=body) is None


async def test_what_agents_share_that_begin_together_is_saved_once(house: House) -> None:
    gateway = Gateway(house)
    requests = [
        gateway.automatic.request(ENGINE, Operation.CHAT, {}, tenant)
        for tenant in ("local", "local", "other")
    ]
    prompts = [[*tokens(600), *tokens(50, 1000 * number)] for number in (1, 2, 3)]
    chosen = [
        request.choose(prompt, loads=True, saves=True)
        for request, prompt in zip(requests, prompts, strict=True)
        if request is not None
    ]
    assert [transfer is not None for transfer in chosen] == [True, False, True]


async def test_a_context_that_lives_longer_is_not_given_up_for_a_shorter_life(house: House) -> None:
    gateway = Gateway(house)
    await gateway.ask(tokens(100))
    await gateway.ask(tokens(300), operation=Operation.MESSAGES, body=MARK)
    house.clocks.pass_(301)
    assert await gateway.finds(tokens(300)) == 100


async def test_an_engine_whose_kv_differs_supersedes_nothing_of_another(house: House) -> None:
    gateway, other = Gateway(house), FakeEngine("b", supports_handoffs=True)
    await gateway.ask(tokens(100))
    await gateway.ask(tokens(300), engine=other, miss=TransferFailure.INCOMPATIBLE)
    house.clocks.pass_(SUPERSEDED_FOR_S + 1)
    found = await gateway.ask(tokens(350), miss=TransferFailure.INCOMPATIBLE, saves=False)
    assert found is not None
    assert found.limit == 300
    found = await gateway.ask(tokens(350), saves=False)
    assert found is not None
    assert found.limit == 100, "its own, behind the one that it could not load"


@pytest.mark.parametrize("step", [600.0, -600.0, 86_400.0])
async def test_a_step_of_the_clock_takes_no_context_away_and_keeps_none_longer(
    house: House, step: float
) -> None:
    gateway = Gateway(house, ttl_s=60)
    await gateway.ask(tokens(100))
    house.clocks.wall += step
    gateway.handoffs.upkeep.drop_expired()
    assert await gateway.finds(tokens(100)) == 100
    house.clocks.pass_(61)
    assert await gateway.finds(tokens(100)) == 0


async def test_kv_that_was_evicted_no_longer_hides_what_is_there(house: House) -> None:
    gateway = Gateway(house)
    await gateway.ask(tokens(100))
    evicted = await gateway.ask([*tokens(100), *tokens(100, 700)], operation=Operation.MESSAGES, body=MARK)
    assert evicted is not None
    assert evicted.save is not None
    FileStore(house.folder / "store").delete(evicted.save)
    await gateway.handoffs.upkeep.forget_evicted()
    assert await gateway.finds([*tokens(100), *tokens(100, 700)]) == 100


async def test_deleting_a_handoff_deletes_what_was_kept_of_it_automatically(house: House) -> None:
    gateway = Gateway(house)
    await gateway.ask(tokens(100))
    named = gateway.handoffs.begin(ENGINE, "local")
    FileStore(house.folder / "store").put(named.key, [b"k"])
    gateway.handoffs.end(named, TransferRequest(), tokens(200))
    await gateway.handoffs.settled(named, 5)
    await asyncio.gather(*gateway.handoffs.background.running)
    await gateway.ask(tokens(300))
    await gateway.ask([*tokens(150), *tokens(100, 900)])
    await gateway.handoffs.delete(named)
    assert await gateway.finds(tokens(300)) == 150, "of another context that only begins like it"


async def test_a_fault_of_the_look_up_costs_no_answer(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway(house)
    request = gateway.automatic.request(ENGINE, Operation.CHAT, {}, "local")
    assert request is not None

    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(gateway.automatic.handoffs, "longest_prefix", broken)
    assert request.choose(tokens(100), loads=True, saves=True) is None
    request.ended(TransferRequest())


class TestSaveRule:
    def test_conversations_and_long_prompts_are_saved_others_when_they_come_again(self) -> None:
        rule = SaveRule(64)
        assert rule.is_worth_saving("a", tokens(100), None, conversation=True)
        assert rule.is_worth_saving("a", tokens(64 * 8, 1000), None, conversation=False)
        assert not rule.is_worth_saving("a", tokens(100, 5000), None, conversation=False)
        assert rule.is_worth_saving("a", tokens(100, 5000), None, conversation=False)
        assert not rule.is_worth_saving("b", tokens(100, 5000), None, conversation=False)

    def test_contexts_that_nobody_continues_are_no_longer_saved(self) -> None:
        rule = SaveRule(64)
        for _ in range(TRIED):
            rule.saved("a")
        assert not rule.is_worth_saving("a", tokens(100), None, conversation=True)
        assert rule.is_worth_saving("a", tokens(100), None, conversation=True), "it came again"
        assert rule.is_worth_saving("b", tokens(100), None, conversation=True), "another tenant"
        for _ in range(TRIED // 8):
            rule.used("a")
        assert rule.is_worth_saving("a", tokens(100, 900), None, conversation=True)

    def test_an_agent_s_next_prompt_is_saved_however_soon_it_comes(self) -> None:
        """It holds all of the one before, whose own context may differ: a call is written as the template says."""
        rule = SaveRule(64, clock=lambda: 0.0)
        assert rule.is_worth_saving("a", tokens(1051), None, conversation=True)
        sibling = [*tokens(1040), *tokens(100, 5000)]
        assert not rule.is_worth_saving("a", sibling, None, conversation=True)
        assert rule.is_worth_saving("a", tokens(1233), None, conversation=True)
        assert rule.is_worth_saving("a", tokens(1500), None, conversation=True)
        assert not rule.is_worth_saving("a", tokens(1400), None, conversation=True), (
            "begun with the one before"
        )

    @pytest.mark.fault("E20")
    def test_one_tenants_prompts_are_not_forgotten_for_anothers(self) -> None:
        """A flood of others' prompts kept a tenant's own from being seen again."""
        rule = SaveRule(64)
        assert not rule.is_worth_saving("a", tokens(100), None, conversation=False)
        for number in range(SEEN + 1):
            rule.is_worth_saving("flood", tokens(70, number), None, conversation=False)
        assert rule.is_worth_saving("a", tokens(100), None, conversation=False)
        assert rule._seen._count == sum(map(len, rule._seen._tenants.values())) == SEEN
