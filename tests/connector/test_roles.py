"""The two roles together, on tensors: an entry is loaded exactly, or not at all."""

from __future__ import annotations

import pytest
import torch
from connector.role_engines import BLOCK, PROMPT, Engine
from support.memory_store import MemoryStore

from baton_kv.contract import (
    new_key,
    params_to_load,
    params_to_save,
    transfer_params,
)
from baton_kv.copies import HostStaging
from baton_kv.format import ImageRef
from baton_kv.messages import StepJobs


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.mark.parametrize("verify", [True, False])
def test_blocks_saved_by_one_engine_are_loaded_by_another(store: MemoryStore, verify: bool) -> None:
    first, second = Engine(store), Engine(store, seed=1, verify=verify)
    key = first.save(params_to_save(), [3, 7, 1, 9])
    assert second.scheduler.matched("b", params_to_load(key), [*PROMPT, 5, 6], 0) == len(PROMPT) - 1
    second.scheduler.allocated("b", ([8, 2, 5, 4, 10],), len(PROMPT) - 1)
    finished = second.run(1)
    assert (finished.loaded, finished.failed) == ({"b"}, set())
    for ours, theirs in zip(first.layers, second.layers, strict=True):
        assert torch.equal(ours[[3, 7, 1, 9]], theirs[[8, 2, 5, 4]])


@pytest.mark.parametrize("in_memory", [True, False], ids=["pool in memory", "pool elsewhere"])
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_only_what_the_engine_lacks_is_loaded(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, verify: bool, in_memory: bool
) -> None:
    """An unverified load into a pool on a device goes through a buffer, so it is a path of its own."""
    first, second = Engine(store), Engine(store, seed=1, verify=verify)
    key = first.save(params_to_save(), [3, 7, 1, 9])
    before = [layer.clone() for layer in second.layers]
    if not in_memory:
        monkeypatch.setattr(HostStaging, "rows", lambda *_: None)
    assert second.scheduler.matched("b", params_to_load(key), [*PROMPT, 5], 2 * BLOCK) == 49 - 32
    second.scheduler.allocated("b", ([8, 2, 5, 4],), 17)
    assert second.run(1).failed == set()
    for ours, theirs, was in zip(first.layers, second.layers, before, strict=True):
        assert torch.equal(theirs[[8, 2]], was[[8, 2]])
        assert torch.equal(theirs[[5, 4]], ours[[1, 9]])


@pytest.mark.parametrize(
    ("prompt", "computed", "matched"),
    [
        ([*PROMPT, 1], 0, 49),
        (PROMPT, 0, 49),
        (PROMPT[:20], 0, 19),
        ([*PROMPT[:20], 7, 7, 7], 0, 20),
        ([7, *PROMPT], 0, 0),
        (PROMPT, 32, 17),
        (PROMPT, 48, 0),  # one token is computed sooner than loaded
        (PROMPT[:48], 32, 0),  # so are 15
        (PROMPT[:49], 32, 16),  # 16 are not
        (PROMPT[:3], 0, 2),  # nor is anything where the engine holds no block before it
        (PROMPT[:20], 32, 0),
        ([5], 0, 0),
    ],
)
def test_the_longest_common_prefix_counts(
    store: MemoryStore, prompt: list[int], computed: int, matched: int
) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6])
    assert engine.scheduler.matched("b", params_to_load(key), prompt, computed) == matched


BIRD, FISH = ImageRef("bird", 10, 20), ImageRef("fish", 10, 20)


@pytest.mark.parametrize(
    ("saved", "asked", "prompt", "matched"),
    [
        ((BIRD,), (BIRD,), [*PROMPT, 1], 49),
        ((BIRD,), (FISH,), [*PROMPT, 1], 10),
        ((BIRD,), (), [*PROMPT, 1], 10),
        ((), (BIRD,), [*PROMPT, 1], 10),
        ((BIRD,), (BIRD,), PROMPT[:30], 10),  # its last token is computed here, and the image with it
        ((BIRD,), (BIRD,), PROMPT[:31], 30),
        ((ImageRef("bird", 0, 5),), (ImageRef("fish", 0, 5),), [*PROMPT, 1], 0),
    ],
)
def test_the_same_token_ids_with_another_image_are_another_context(
    store: MemoryStore,
    saved: tuple[ImageRef, ...],
    asked: tuple[ImageRef, ...],
    prompt: list[int],
    matched: int,
) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6], images=saved)
    assert engine.scheduler.matched("b", params_to_load(key), prompt, 0, asked) == matched


def test_a_limit_within_an_image_ends_before_it(store: MemoryStore) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6], images=(BIRD,))
    params = transfer_params(load=key, limit=25)
    assert engine.scheduler.matched("b", params, PROMPT, 0, (BIRD,)) == 10


def test_asking_again_opens_nothing(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6])
    for _ in range(100):
        assert engine.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 49
        monkeypatch.setattr(store, "open", None)


def test_another_model_s_entry_is_never_used(store: MemoryStore) -> None:
    key = Engine(store).save(params_to_save(), [1, 2, 3, 6])
    other = Engine(store, fingerprint="two")
    assert other.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 0
    assert [told.failure for told in other.scheduler.take_outcomes()] == ["incompatible"]
    assert other.scheduler.take_outcomes() == []
    assert store.exists(key), "it is sound, only not ours"


@pytest.mark.fault("B17")
def test_kv_of_weights_that_were_replaced_is_neither_used_nor_saved(store: MemoryStore) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6])
    assert engine.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 49
    assert engine.scheduler.matched("c", params_to_save(), PROMPT, 0) == 0
    engine.scheduler.take_outcomes()
    engine.scheduler.renew()
    assert engine.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 0, "it was planned before"
    assert engine.scheduler.matched("d", params_to_load(key), PROMPT, 0) == 0
    assert [told.failure for told in engine.scheduler.take_outcomes()] == ["incompatible"]
    ended = {"prompt": 49, "computed": 50, "block_ids": ([1, 2, 3, 6],), "whole": True}
    held, _ = engine.scheduler.finished("c", params_to_save(), tokens=PROMPT, **ended)
    assert not held, "it has begun with the weights from before"
    assert [told.failure for told in engine.scheduler.take_outcomes()] == ["not_whole"]
    again = engine.save(params_to_save(), [1, 2, 3, 6])
    assert engine.scheduler.matched("e", params_to_load(again), PROMPT, 0) == 49
    assert Engine(store).scheduler.matched("b", params_to_load(again), PROMPT, 0) == 0, (
        "its weights are others"
    )


def test_an_entry_that_turns_bad_between_look_and_load_costs_only_its_reuse(store: MemoryStore) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6])
    assert engine.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 49
    with store.open(key) as entry:
        data = bytearray(entry.read(0, len(entry)))
    data[-1] ^= 1
    store.put(key, [data])
    engine.scheduler.allocated("b", ([8, 9, 10, 11],), 49)
    finished = engine.run(1)
    assert finished.loaded == {"b"}, "the request must be released"
    assert finished.failed == {"b"}
    assert engine.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 0, "it must not be offered again"
    assert not store.exists(key)
    assert len(store.quarantined) == 1


def test_another_entry_put_in_its_place_between_look_and_load_is_refused(store: MemoryStore) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6])
    assert engine.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 49
    other = Engine(store, seed=5)
    assert other.save(params_to_save(key), [1, 2, 3, 6], tokens=[*PROMPT[:10], 9, *PROMPT[11:]]) == key
    engine.scheduler.allocated("b", ([8, 9, 10, 11],), 49)
    finished = engine.run(1)
    assert finished.failed == {"b"}
    assert store.exists(key), "it is sound, only not the one looked at"


def test_what_was_never_loaded_is_never_saved(store: MemoryStore) -> None:
    """A request that is given up while it loads, although it asked to be saved and may have met a stop string."""
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6])
    both = params_to_save(new_key("local"), load=key)
    assert engine.scheduler.matched("b", both, PROMPT, 0) == 49
    engine.scheduler.allocated("b", ([8, 9, 10, 11],), 49)
    ended = engine.scheduler.finished(
        "b", both, tokens=PROMPT, prompt=50, computed=49, block_ids=([8, 9, 10, 11],), whole=True
    )
    assert ended == (False, None)
    jobs = engine.scheduler.step()
    assert (jobs.saves, jobs.given_up) == ([], ["b"])


def test_a_load_given_up_after_its_end_leaves_no_trace(store: MemoryStore) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6])
    assert engine.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 49
    engine.scheduler.allocated("b", ([8, 9, 10, 11],), 49)
    assert engine.run(1).loaded == {"b"}
    engine.worker.start(StepJobs(given_up=["b"]))
    assert (engine.worker._given_up, engine.worker._loading) == (set(), set())


def test_where_no_thread_can_be_started_the_request_is_released(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6])
    assert engine.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 49
    engine.scheduler.allocated("b", ([8, 9, 10, 11],), 49)

    def refuse(*_args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(engine.worker._load_thread, "submit", refuse)
    assert engine.run(1).failed == {"b"}


def test_an_entry_gone_between_look_and_load_is_a_miss(store: MemoryStore) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6])
    assert engine.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 49
    store.delete(key)
    engine.scheduler.allocated("b", ([8, 9, 10, 11],), 49)
    assert engine.run(1).failed == {"b"}


def test_a_load_that_nobody_waits_for_any_more_is_not_gone_on_with(store: MemoryStore) -> None:
    engine = Engine(store)
    key = engine.save(params_to_save(), [1, 2, 3, 6])
    before = [layer.clone() for layer in engine.layers]
    assert engine.scheduler.matched("b", params_to_load(key), PROMPT, 0) == 49
    engine.scheduler.allocated("b", ([8, 9, 10, 11],), 49)
    engine.scheduler.finished(
        "b", params_to_load(key), tokens=PROMPT, prompt=50, computed=0, block_ids=([],), whole=False
    )
    finished = engine.run(1)
    assert (finished.loaded, finished.outcomes[0].failure) == ({"b"}, "given_up")
    assert all(torch.equal(one, other) for one, other in zip(before, engine.layers, strict=True))
    assert engine.worker._given_up == set()
