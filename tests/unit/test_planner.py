"""The planner loads where loading is faster, and notices within a few requests when that changes."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import Throughput, TransferReport, TransferRequest, TransferWatch
from baton.library.handoff import Handoff, StoredImage
from baton.relay.cost import Choice, Decision, LoadCost
from baton.relay.plan import key_for_engine
from baton.relay.report import source_outcome
from baton.telemetry.metrics import TransferMetrics
from baton_kv.contract import Transfer, TransferFailure, TransferOutcome

MIB = 1024 * 1024
TOKENS, SIZE = 1000, 20 * MIB


def record() -> Handoff:
    return Handoff(
        tenant="local", model="a", weights="w", created_at=0, ttl_s=60, expires_at=60,
        tokens=array("i", range(TOKENS)), bytes=SIZE,
    )  # fmt: skip


def ask(planner: LoadCost, engine: FakeEngine, bytes_per_s: float) -> Choice:
    """One request: what is loaded of it takes as long as the store is slow."""
    decision = planner.decide(engine, record())
    if decision.loads:
        size = SIZE if decision.limit is None else SIZE * decision.limit // TOKENS
        engine.throughput.loaded(size, size / bytes_per_s)
    return decision.choice


def engine_that_prefills(tokens_per_s: float) -> FakeEngine:
    engine = FakeEngine("a")
    engine.throughput.prefilled(TOKENS, TOKENS / tokens_per_s)
    return engine


def test_a_context_with_an_image_costs_its_encoding_too() -> None:
    engine, seen = engine_that_prefills(tokens_per_s=100_000), record()
    for _ in range(2):
        engine.throughput.loaded(SIZE, 0.04)
    assert LoadCost().decide(engine, seen).choice is Choice.RECOMPUTE
    image = {"digest": "0" * 64, "media_type": "image/png", "width": 1, "height": 1, "bytes": 1}
    seen.images.append(StoredImage(**image, offset=10, length=4, target=[1]))  # type: ignore[arg-type]  # plain values
    decision = LoadCost().decide(engine, seen)
    assert (decision.choice, decision.prefill_s) == (Choice.LOAD, pytest.approx(0.06))
    assert LoadCost().decide(engine, seen, 10).prefill_s == pytest.approx(0.0001), "before the image"


def test_the_source_is_named_to_load_it_or_to_save_only_what_continues_it() -> None:
    source, target = record(), record()
    load, recompute = Decision(Choice.LOAD), Decision(Choice.RECOMPUTE, 0)
    a_little = Decision(Choice.RECOMPUTE, 50)
    for decision, saved, named in (
        (load, None, True),
        (recompute, None, False),
        (recompute, target, True),
        (a_little, None, True),
    ):
        assert key_for_engine(source, decision, saved) == (source.key if named else None)
    assert key_for_engine(None, None, target) is None
    moved = source.model_copy(update={"exact": False})
    assert key_for_engine(moved, recompute, target) is None, "nothing may share files with moved KV unseen"
    assert key_for_engine(moved, load, target) == moved.key


@pytest.mark.parametrize(
    ("loaded", "outcome"), [(50, "recomputed"), (TOKENS - 1, "loaded"), (TOKENS, "loaded")]
)
def test_what_is_loaded_to_measure_is_told_as_loaded_if_it_was_all(loaded: int, outcome: str) -> None:
    """A few tokens of a long context are all of a short one, and of one with sliding windows."""
    source = record()
    report = TransferReport(loaded=loaded, cached=loaded)
    told = source_outcome(source, report, Decision(Choice.RECOMPUTE, 50, 0.02, 0.01))
    reason = "slower_to_load" if outcome == "recomputed" else None
    assert (told["outcome"], told["reason"], told["loaded_tokens"]) == (outcome, reason, loaded)


def test_where_a_little_cannot_be_loaded_all_is_to_see_whether_the_store_is_still_slow() -> None:
    """Windowed layers have the blocks of a context's end alone: a prefix of it is never loaded."""
    engine, planner = engine_that_prefills(1000), LoadCost()
    for _ in range(3):
        engine.throughput.loaded(SIZE, SIZE / 5e6)
    few = TOKENS // 20
    assert [planner.decide(engine, record()).limit for _ in range(8)] == [0, few, 0, few, 0, few, 0, None]
    engine.throughput.loaded(SIZE, SIZE / 5e6)
    assert [planner.decide(engine, record()).limit for _ in range(2)] == [0, few]


def test_what_was_thought_is_loaded_however_slow_the_store_is() -> None:
    """Thought anew it may be another thought; and what that would cost is told as it is."""
    engine, planner = engine_that_prefills(1000), LoadCost()
    for _ in range(3):
        engine.throughput.loaded(SIZE, SIZE / 5e6)
    thought = record().model_copy(update={"latent_steps": 40})
    assert planner.decide(engine, record()).choice is Choice.RECOMPUTE
    assert planner.decide(engine, thought).prefill_s is None, "no step has been seen yet"
    engine.throughput.latent_computed(10, 0.5)
    decision = planner.decide(engine, thought)
    assert (decision.choice, decision.limit) == (Choice.LOAD, None)
    assert decision.prefill_s == pytest.approx((TOKENS - 40) / 1000 + 40 * 0.05)


@pytest.mark.parametrize(
    ("tokens", "prefill_s", "load_s"),
    [(2048, 0.051, 0.115), (8192, 0.215, 0.440), (30000, 1.100, 1.687)],
)
def test_what_an_h200_computes_faster_than_it_is_loaded_is_computed(
    tokens: int, prefill_s: float, load_s: float
) -> None:
    """An 8B model's KV at 2.2 GiB/s (`docs/results/gpu.md`); loads as fast as the card's link turn it round."""
    size = tokens * 131_072
    context = record().model_copy(update={"tokens": array("i", range(tokens)), "bytes": size})
    engine, planner = FakeEngine("a"), LoadCost()
    assert planner.decide(engine, context).choice is Choice.LOAD, "nothing is known yet"
    for _ in range(2):
        engine.throughput.loaded(size, load_s)
    engine.throughput.prefilled(tokens, prefill_s)
    decision = planner.decide(engine, context)
    assert (decision.choice, decision.limit) == (Choice.RECOMPUTE, 0)
    assert (decision.load_s, decision.prefill_s) == (pytest.approx(load_s), pytest.approx(prefill_s))
    for _ in range(3):
        engine.throughput.loaded(size, size / (25 * 1024 * MIB))
    assert planner.decide(engine, context).choice is Choice.LOAD


def test_what_is_not_known_yet_is_loaded() -> None:
    assert LoadCost().decide(FakeEngine("a"), record()).choice is Choice.LOAD


def test_a_store_that_turns_slow_is_left_alone_within_five_requests_and_taken_back_within_five() -> None:
    engine, planner = engine_that_prefills(1500), LoadCost()
    assert [ask(planner, engine, 2000 * MIB) for _ in range(5)] == [Choice.LOAD] * 5
    slow = [ask(planner, engine, 5e6) for _ in range(5)]
    assert slow[-1] is Choice.RECOMPUTE
    assert [ask(planner, engine, 5e6) for _ in range(20)] == [Choice.RECOMPUTE] * 20
    fast = [ask(planner, engine, 2000 * MIB) for _ in range(5)]
    assert fast[-1] is Choice.LOAD


def test_handoffs_without_kv_do_not_keep_it_from_looking_again() -> None:
    engine, planner = engine_that_prefills(1500), LoadCost()
    for _ in range(3):
        engine.throughput.loaded(SIZE, SIZE / 5e6)
    gone = record()
    gone.bytes = 0
    limits = []
    for _ in range(4):
        planner.decide(engine, gone)
        limits.append(planner.decide(engine, record()).limit)
    assert limits == [0, TOKENS // 20, 0, TOKENS // 20]


def test_a_store_that_hangs_and_then_fails_counts_as_slow() -> None:
    engine, planner = engine_that_prefills(1500), LoadCost()
    for _ in range(3):
        assert ask(planner, engine, 2000 * MIB) is Choice.LOAD
    engine.throughput.load_failed(SIZE, 0.001)
    assert planner.decide(engine, record()).choice is Choice.LOAD, "a quick failure tells nothing"
    for _ in range(2):
        engine.throughput.load_failed(SIZE, 30.0)
    assert planner.decide(engine, record()).choice is Choice.RECOMPUTE


def test_one_slow_load_changes_nothing() -> None:
    engine, planner = engine_that_prefills(1500), LoadCost()
    for _ in range(5):
        ask(planner, engine, 2000 * MIB)
    ask(planner, engine, 5e6)
    assert [ask(planner, engine, 2000 * MIB) for _ in range(5)] == [Choice.LOAD] * 5


def test_while_it_computes_it_loads_a_little_now_and_then() -> None:
    engine, planner = engine_that_prefills(1500), LoadCost()
    for _ in range(3):
        engine.throughput.loaded(SIZE, SIZE / 5e6)
    limits = [planner.decide(engine, record()).limit for _ in range(4)]
    assert limits == [0, TOKENS // 20, 0, TOKENS // 20]


@pytest.mark.parametrize("seconds", [(5.0,), (0.01, 5.0), (5.0, 0.01), (0.01, 5.0, 0.02)])
def test_one_slow_load_among_the_first_decides_nothing(seconds: tuple[float, ...]) -> None:
    engine, planner = engine_that_prefills(1500), LoadCost()
    for each in seconds:
        engine.throughput.loaded(SIZE, each)
    assert planner.decide(engine, record()).choice is Choice.LOAD


def test_a_step_may_take_as_long_as_its_latent_steps() -> None:
    """All of a prompt's latent steps may be within one step of it, and it does not hang meanwhile."""
    throughput = Throughput()
    watch = TransferWatch(throughput, TransferMetrics(CollectorRegistry(), "a"))
    assert watch.longest_latent_s == 0
    relay = TransferRequest(latent_steps=200)
    watch.add("one", relay)
    watch.add("two", TransferRequest(latent_steps=900))  # is over: nobody holds it any more
    assert watch.longest_latent_s == 200, "a second each, as long as none was seen"
    watch.latent_computed(10, 0.3)
    assert watch.longest_latent_s == pytest.approx(6)
    del relay
    assert watch.longest_latent_s == 0


def test_kv_is_moved_unless_computing_it_is_known_to_be_faster() -> None:
    """Then once in a while, so that a change is noticed."""
    engine, planner = engine_that_prefills(1000), LoadCost()
    assert planner.moves(engine, 800), "nothing is known yet"
    for _ in range(3):
        engine.throughput.moved(800, 0.1)
    assert planner.moves(engine, 800)
    for _ in range(3):
        engine.throughput.moved(800, 8.0)
    assert [planner.moves(engine, 800) for _ in range(8)] == [*[False] * 7, True]
    for _ in range(3):
        engine.throughput.moved(800, 0.1)
    assert planner.moves(engine, 800)


def test_the_handoff_whose_kv_saves_most_time_comes_first() -> None:
    engine, planner = FakeEngine("a"), LoadCost()
    long, gone, large = record(), record(), record()
    gone.bytes, large.bytes = 0, 100 * SIZE
    assert planner.saving(engine, long) == planner.saving(engine, large) == TOKENS, (
        "tokens, until it is known"
    )
    assert planner.saving(engine, gone) == 0
    engine.throughput.prefilled(TOKENS, 1.0)
    engine.throughput.loaded(SIZE, 0.1)
    assert planner.saving(engine, long) == pytest.approx(0.9)
    assert planner.saving(engine, large) == 0, "it takes longer to load than to compute"


def test_an_engine_saves_until_the_end_of_the_last_save_is_reported() -> None:
    """It must not be stopped before: a request may have its answer, and its KV is still being written."""
    watch = TransferWatch(Throughput(), TransferMetrics(CollectorRegistry(), "a"))
    loading, saving = TransferRequest(load="k"), TransferRequest(save="k")
    watch.add("one", loading)
    assert not watch.saving
    watch.add("two", saving)
    assert watch.saving
    watch.transferred([TransferOutcome("r", "k", Transfer.SAVE, tag="two")])
    assert not watch.saving
    watch.add("three", given_up := TransferRequest(save="k"))
    assert watch.saving
    del given_up
    assert not watch.saving, "nobody waits for it any more"


def test_what_was_resident_of_loads_is_counted() -> None:
    registry = CollectorRegistry()
    watch = TransferWatch(FakeEngine("a").throughput, TransferMetrics(registry, "a"))
    load = TransferOutcome("r", "k", Transfer.LOAD, tokens=9, bytes=900, seconds=0.1)
    watch.transferred([load, replace(load, resident=900), replace(load, resident=300)])
    counted = registry.get_sample_value("baton_handoff_resident_bytes_total", {"engine": "a"})
    moved = {"engine": "a", "direction": "load"}
    assert (counted, registry.get_sample_value("baton_handoff_bytes_total", moved)) == (1200, 2700)


def test_moves_are_measured_by_themselves() -> None:
    """They are slower than loads, whose rate decides on other handoffs."""
    engine = FakeEngine("a")
    watch = TransferWatch(engine.throughput, TransferMetrics(CollectorRegistry(), "a"))
    moved = TransferOutcome(
        "r", "k", Transfer.LOAD, tokens=900, moved=500, computed=100, bytes=9, seconds=0.9
    )
    request = TransferRequest()
    watch.add("tag", request)
    watch.transferred([replace(moved, tag="tag")])
    assert (engine.throughput.loads, engine.throughput.move_s(1000)) == (0, pytest.approx(1.5))
    report = request.report
    assert (report.loaded, report.moved, report.computed) == (900, 500, 100)
    watch.transferred([replace(moved, failure=TransferFailure.CORRUPT, seconds=90.0)])
    assert engine.throughput.move_s(1000) == pytest.approx(1.5), "a failed one moved nothing"


def test_kv_of_another_machine_is_computed_where_fetching_it_takes_longer() -> None:
    engine = engine_that_prefills(tokens_per_s=10_000)
    for _ in range(2):
        decision = LoadCost().decide(engine, record(), fetch_s=0.2)
        told = decision.public()["estimated_fetch_ms"]
        assert (decision.choice, decision.limit, told) == (Choice.RECOMPUTE, 0, 200.0), "it was not fetched"
        engine.throughput.loaded(SIZE, 0.01)
    assert "estimated_fetch_ms" not in LoadCost().decide(engine, record()).public()
