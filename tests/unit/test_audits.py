"""What audits compute again, when, what they compare, and what becomes of KV that led to another answer."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.library_machines import Clocks, House, becomes

from baton.config.groups import HandoffSettings
from baton.engines.backend import EngineState
from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferReport, TransferRequest
from baton.errors import EngineRestarting
from baton.library.handoff import Handoff, key_of, new_id
from baton.relay import audit as service
from baton.relay.audit import MOST, Audit, AuditQueue, Audits, compare
from baton.telemetry.metrics import AuditMetrics, AuditResult
from baton_kv.stores.file import FileStore

PROMPT = [11, 12, 13]
SAID = {11: 0.0}
"""What the fake engine answers to that prompt, of which it is sure."""


@pytest.mark.parametrize(
    ("loaded", "computed", "difference", "same"),
    [
        ({1: -0.1, 2: -3.0}, {1: -0.1, 2: -3.0}, 0.0, True),
        ({1: -0.1, 2: -3.0}, {1: -0.2, 2: -2.5}, 0.5, True),
        ({1: -0.70, 2: -0.69}, {1: -0.69, 2: -0.70}, 0.01, False),
        ({1: -0.1, 2: -3.0}, {3: -0.1, 4: -3.0}, 2.9, False),  # at least: what is not listed is below -3
        ({1: -0.1, 2: -3.0}, {1: -0.1, 3: -3.0}, 0.0, True),
        ({1: -0.1, 2: -math.inf}, {1: -0.1, 2: -math.inf}, 0.0, True),
        ({1: math.nan}, {1: -0.1}, math.inf, True),
        ({1: -0.1, 2: -12.0}, {1: -0.1, 2: -13.0}, 0.0, True),  # too unlikely to count
        ({1: -0.1, 2: -12.0}, {1: -0.1, 2: -3.0}, 9.0, True),
        ({1: -0.1, 2: -12.0}, {1: -0.1, 3: -5.0}, 1.0, True),
    ],
)
def test_two_computations_differ_by_their_largest_difference(
    loaded: dict[int, float], computed: dict[int, float], difference: float, same: bool
) -> None:
    found = compare(loaded, computed)
    assert (found.difference, found.same_token) == (pytest.approx(difference), same)


class Bench:
    """Audits of one gateway whose fake engine has answered from loaded KV."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.house = House(folder, Clocks())
        settings = {"audit": 1.0} | settings
        self.handoffs = self.house.handoffs(**settings)
        self.registry = CollectorRegistry()
        self.audits = Audits(HandoffSettings(**settings), self.handoffs, AuditMetrics(self.registry))
        self.engine = FakeEngine("a", supports_handoffs=True, state=EngineState.READY)

    def note(
        self,
        record: Handoff,
        first_token: dict[int, float],
        *,
        save: str | None = None,
        over: bool = True,
        **report: Any,
    ) -> TransferRequest:
        report = {"prompt_ids": PROMPT, "loaded": 2, "first_token": first_token} | report
        transfer = TransferRequest(load=record.key, save=save, audited=True, report=TransferReport(**report))
        if over:
            transfer.report.save_over.set()
        self.audits.note(self.engine, record, transfer)
        return transfer

    def counted(self, result: AuditResult) -> float:
        return self.registry.get_sample_value("baton_handoff_audits_total", {"result": result.value}) or 0

    async def until(self, result: AuditResult, number: int = 1) -> None:
        await becomes(lambda: self.counted(result) >= number)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(service, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(service, "GIVE_WAY_EVERY_S", 0.005)
    return Bench(tmp_path)


async def test_an_answer_that_is_computed_alike_is_a_match_and_shown(bench: Bench) -> None:
    record = await bench.house.left(bench.handoffs)
    async with bench.audits.running():
        bench.note(record, SAID)
        await bench.until(AuditResult.MATCH)
        await becomes(lambda: record.public()["audit"])
        await asyncio.sleep(0.1)
    audit: Any = record.public()["audit"]
    assert (audit["result"], audit["difference"], audit["same_token"]) == ("match", 0, True)
    assert (record.bytes, bench.engine.forgets) == (10, 0)
    (computed,) = bench.engine.transfers
    assert (computed.prompt, computed.computed, computed.moves_kv) == (PROMPT, True, False)


async def test_after_a_mismatch_the_kv_is_in_quarantine_and_the_prefix_cache_empty(bench: Bench) -> None:
    record = await bench.house.left(bench.handoffs)
    async with bench.audits.running():
        bench.note(record, {12: -0.1, 13: -3.0})
        await bench.until(AuditResult.MISMATCH)
        quarantine = bench.house.folder / "store" / "quarantine"
        await becomes(lambda: record.bytes == 0 and quarantine.exists() and bench.engine.forgets)
        await asyncio.sleep(0.2)
    store = FileStore(bench.house.folder / "store")
    assert (record.bytes, bench.engine.forgets) == (0, 1)
    assert not store.exists(record.key)
    assert len(list(quarantine.iterdir())) == 1
    elsewhere = await bench.house.handoffs().get(record.id, "local")
    audit: Any = elsewhere.public()["audit"]
    assert (audit["result"], elsewhere.bytes) == ("mismatch", 0)


async def test_what_begins_like_it_and_what_was_made_of_it_is_moved_away_too(bench: Bench) -> None:
    """A branch may hold a copy of the wrong KV, and so may what the audited request has saved."""
    begins = list(range(40))
    record, branch = [await bench.house.left(bench.handoffs, tokens=begins) for _ in range(2)]
    other = await bench.house.left(bench.handoffs, tokens=begins[::-1])
    store = FileStore(bench.house.folder / "store")
    saved = key_of("local", new_id(automatic=True))
    store.put(saved, [b"k"])
    async with bench.audits.running():
        bench.note(record, {12: -0.1, 13: -3.0}, save=saved)
        await bench.until(AuditResult.MISMATCH)
    assert [each.bytes > 0 for each in (record, branch, other)] == [False, False, True]
    assert not any(store.exists(key) for key in (record.key, branch.key, saved))
    assert store.exists(other.key)


async def test_every_engine_of_the_same_weights_forgets_its_prefixes(bench: Bench) -> None:
    """Another one may have loaded the same KV before."""
    engines = [FakeEngine("b", supports_handoffs=True), FakeEngine("c", supports_handoffs=True, weights="x")]
    record = await bench.house.left(bench.handoffs)
    for engine in engines:
        bench.audits.note(engine, record, TransferRequest())
    async with bench.audits.running():
        bench.note(record, {12: -0.1, 13: -3.0})
        await bench.until(AuditResult.MISMATCH)
    assert [each.forgets for each in (bench.engine, *engines)] == [1, 1, 0]


async def test_a_save_is_waited_for_before_its_request_is_audited(bench: Bench) -> None:
    record = await bench.house.left(bench.handoffs)
    async with bench.audits.running():
        saving = bench.note(record, SAID, save="tenant/auto-saved", over=False)
        await asyncio.sleep(0.1)
        assert bench.engine.transfers == []
        saving.report.save_over.set()
        await bench.until(AuditResult.MATCH)


async def test_a_handoff_that_is_gone_is_computed_no_more(bench: Bench) -> None:
    record = await bench.house.left(bench.handoffs)
    bench.note(record, SAID)
    await bench.handoffs.delete(record)
    async with bench.audits.running():
        await bench.until(AuditResult.DROPPED)
    assert bench.engine.transfers == []


async def test_an_audit_that_waits_too_long_is_dropped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.relay.audit.WAITS_S", 0.05)
    record = await bench.house.left(bench.handoffs)
    bench.engine.active = 1
    async with bench.audits.running():
        bench.note(record, SAID)
        await bench.until(AuditResult.DROPPED)
    assert bench.engine.transfers == [], "it was never computed"


async def test_a_difference_within_the_tolerance_is_a_match(tmp_path: Path, bench: Bench) -> None:
    strict = Bench(tmp_path / "strict", audit_tolerance=0.01)
    for each, result in ((bench, AuditResult.MATCH), (strict, AuditResult.MISMATCH)):
        record = await each.house.left(each.handoffs)
        async with each.audits.running():
            each.note(record, {11: -0.1})
            await each.until(result)
        audit: Any = record.public()["audit"]
        assert (audit["result"], audit["difference"]) == (result, pytest.approx(0.1))


@pytest.mark.parametrize(
    "report",
    [{"loaded": None}, {"loaded": 0}, {"lost": 2}, {"first_token": {}}],
    ids=lambda report: str(report),
)
async def test_only_answers_from_loaded_kv_are_audited(bench: Bench, report: dict[str, Any]) -> None:
    record = await bench.house.left(bench.handoffs)
    async with bench.audits.running():
        bench.note(record, **({"first_token": SAID} | report))
        await asyncio.sleep(0.1)
    assert bench.engine.transfers == []


async def test_a_busy_engine_is_left_alone_until_it_is_idle(bench: Bench) -> None:
    record = await bench.house.left(bench.handoffs)
    bench.engine.active = 1
    async with bench.audits.running():
        bench.note(record, SAID)
        await asyncio.sleep(0.1)
        assert bench.engine.transfers == []
        bench.engine.active = 0
        await bench.until(AuditResult.MATCH)


async def test_a_client_s_request_takes_precedence_and_an_audit_that_never_ends_is_dropped(
    bench: Bench,
) -> None:
    record = await bench.house.left(bench.handoffs)
    bench.engine.behaviour.token_seconds = 5

    async with bench.audits.running():
        bench.note(record, SAID)
        for before in range(service.MOST_TRIES):
            await becomes(lambda: bench.engine.active == 1)
            bench.engine.active += 1
            await becomes(lambda before=before: bench.engine.aborted > before)  # type: ignore[misc]
            bench.engine.active -= 1
        await bench.until(AuditResult.DROPPED)
    assert bench.engine.active == 0


async def test_an_engine_that_fails_costs_the_audit_and_nothing_else(bench: Bench) -> None:
    record = await bench.house.left(bench.handoffs)
    bench.engine.behaviour.call_error = EngineRestarting()
    async with bench.audits.running():
        bench.note(record, SAID)
        await bench.until(AuditResult.DROPPED)
        bench.engine.behaviour.call_error = None
        bench.note(record, SAID)
        await bench.until(AuditResult.MATCH)
    assert record.bytes == 10


async def test_more_audits_than_can_wait_are_dropped_and_counted(bench: Bench) -> None:
    record = await bench.house.left(bench.handoffs)
    for _ in range(MOST + 3):
        bench.note(record, SAID)
    assert bench.counted(AuditResult.DROPPED) == 3


def test_an_engine_that_never_rests_does_not_hold_the_others_up() -> None:
    queue = AuditQueue()
    record = Handoff(tenant="t", model="a", weights="w", created_at=0, ttl_s=1, expires_at=1)
    busy, idle = (FakeEngine(name, state=EngineState.READY) for name in ("busy", "idle"))
    busy.active = 1
    for engine in (busy, idle):
        queue.add(Audit(engine, record, TransferRequest()))
    assert queue.take() is None, "it may have ended a request just now"
    taken = queue.take()
    assert taken is not None
    assert (taken.engine, len(queue)) == (idle, 1)


@pytest.mark.parametrize(
    ("share", "drawn", "chosen"), [(0, 0.0, False), (1, 0.999, True), (0.01, 0.02, False)]
)
def test_the_share_of_the_settings_is_audited(
    tmp_path: Path, share: float, drawn: float, chosen: bool
) -> None:
    settings = HandoffSettings(audit=share)
    handoffs = House(tmp_path, Clocks()).handoffs()
    audits = Audits(settings, handoffs, AuditMetrics(CollectorRegistry()), draw=lambda: drawn)
    assert audits.chosen() is chosen
