"""Moves through both roles, on tensors: to the right place, apart from others, and lost where they cannot be."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from connector.role_engines import BLOCK, Engine
from support.memory_store import MemoryStore

from baton_kv.contract import (
    TransferFailure,
    params_to_load,
    params_to_save,
    transfer_params,
)
from baton_kv.fingerprint import moved_fingerprint
from baton_kv.format import ImageRef
from baton_kv.joins.packing import SlabPacking
from baton_kv.joins.rotation import KeyMover, Rotation
from baton_kv.messages import Gap

HEAD = 4
SALT = "of this request alone"
PARTS = [list(range(100, 150)), [*range(100, 104), *range(200, 240)], [*range(100, 104), *range(300, 350)]]
JOINED = [*PARTS[0], *PARTS[1][4:], *PARTS[2][4:], 1, 2]
ANGLES = numpy.linspace(0, 3, 512)[:, None] * numpy.ones((1, HEAD // 2))


class Mover(Engine):
    """An engine that moves KV; its slabs hold all keys of a block, then all values."""

    def __init__(self, store: MemoryStore, seed: int = 0) -> None:
        super().__init__(store, seed=seed)
        self.scheduler = type(self.scheduler)(store, b"s" * 32, "one", BLOCK, most_computed=20)
        places = numpy.arange(BLOCK * HEAD).reshape(BLOCK, HEAD)
        table = numpy.hstack([numpy.cos(ANGLES), numpy.sin(ANGLES)]).astype("f4")
        packing = SlabPacking(places, places + BLOCK * HEAD, torch.float32)
        self.computed: list[tuple[Gap, ...]] = []
        self.worker.enable_moves(
            KeyMover(packing, Rotation(table, halves=True), 3),
            lambda gaps, _: self.computed.append(tuple(gaps)),
        )

    def kept(self, layer: int, blocks: list[int]) -> tuple[Any, Any]:
        """Keys and values of some blocks, each `[heads, tokens, values]`."""
        slabs = self.layers[layer][blocks].permute(1, 0, 2, 3).reshape(2, len(blocks), 2, BLOCK * HEAD)
        halves = (slabs[:, :, half].reshape(2, -1, HEAD) for half in (0, 1))
        return tuple(half.numpy() for half in halves)  # type: ignore[return-value]  # two of them


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def saved(engine: Mover) -> list[str]:
    blocks = [[3, 7, 1, 9], [2, 4, 6], [8, 10, 5, 11]]
    return [engine.save(params_to_save(), held, part) for held, part in zip(blocks, PARTS, strict=True)]


def moves(keys: list[str]) -> list[dict[str, Any]]:
    """All of each later part behind what all begin with, but its last token."""
    found, at = [], len(PARTS[0])
    for key, part in zip(keys[1:], PARTS[1:], strict=True):
        found.append({"key": key, "start": 4, "tokens": len(part) - 5, "to": at})
        at += len(part) - 4
    return found


def asked(keys: list[str], **more: Any) -> dict[str, Any]:
    return transfer_params(load=keys[0], moved=moves(keys), apart=SALT, **more)


def test_keys_are_rotated_to_their_place_and_values_stay(store: MemoryStore) -> None:
    first, second = Mover(store), Mover(store, seed=1)
    keys, table = saved(first), [11, 3, 9, 1, 7, 5, 2, 4, 6]
    stop = len(JOINED) - 3
    assert second.scheduler.matched("b", asked(keys), JOINED, 0, salt=f"tenant/{SALT}") == stop
    second.scheduler.allocated("b", (table,), stop)
    finished = second.run(1)
    (outcome,) = finished.outcomes
    assert (outcome.failure, outcome.moved, outcome.computed) == (None, 39 + 49, 1 + 1)
    assert [gap.tokens for gap in second.computed[0]] == [(149,), (239,)] or len(second.computed[0]) == 2
    for layer in range(3):
        found, held = second.kept(layer, table)
        for part, blocks, start, count, to in (
            (0, [3, 7, 1, 9], 0, 49, 0),
            (1, [2, 4, 6], 4, 39, 50),
            (2, [8, 10, 5, 11], 4, 49, 90),
        ):
            theirs, values = first.kept(layer, blocks)
            turned = (ANGLES[to : to + count] - ANGLES[start : start + count])[None]
            one, other = numpy.split(theirs[:, start : start + count], 2, axis=2)
            expected = numpy.concatenate(
                [
                    one * numpy.cos(turned) - other * numpy.sin(turned),
                    other * numpy.cos(turned) + one * numpy.sin(turned),
                ],
                axis=2,
            )
            assert found[:, to : to + count] == pytest.approx(expected, abs=1e-5), part
            assert numpy.array_equal(held[:, to : to + count], values[:, start : start + count])


@pytest.mark.parametrize("salt", [None, "another", SALT[:-1]])
def test_nothing_is_moved_for_a_request_that_shares_its_prefix_cache(
    store: MemoryStore, salt: str | None
) -> None:
    engine = Mover(store)
    keys = saved(engine)
    assert engine.scheduler.matched("b", asked(keys), JOINED, 0, salt=salt) == 0
    outcome = engine.scheduler.take_outcomes()[-1]
    assert outcome.failure is TransferFailure.MALFORMED


def test_what_holds_moved_kv_says_so_and_is_loaded_apart_alone(store: MemoryStore) -> None:
    """Also what only shares its files."""
    engine = Mover(store)
    keys, table = saved(engine), [11, 3, 9, 1, 7, 5, 2, 4, 6]
    stop = engine.scheduler.matched("a", asked(keys), JOINED, 0, salt=SALT)
    engine.scheduler.allocated("a", (table,), stop)
    engine.run(1)
    blended = engine.save(asked(keys, save=True), table, JOINED)
    assert engine.scheduler.matched("b", params_to_load(blended), [*JOINED, 9], 0) == 0
    refused = engine.scheduler.take_outcomes()[-1]
    assert refused.failure is TransferFailure.INCOMPATIBLE
    apart = transfer_params(load=blended, apart=SALT)
    kept = len(JOINED) - 1  # the last token of a context has no KV
    assert engine.scheduler.matched("c", apart, [*JOINED, 9], 0, salt=SALT) == kept
    none = transfer_params(load=blended, apart=SALT, limit=0, save=True)
    assert engine.scheduler.matched("a", none, [*JOINED, 9], 0, salt=SALT) == 0
    heir = engine.save(none, table, [*JOINED, 9])
    assert engine.scheduler.matched("d", params_to_load(heir), [*JOINED, 9, 8], 0) == 0, "it shares files"
    exact = engine.save(params_to_save(), table, JOINED)
    assert engine.scheduler.matched("e", params_to_load(exact), [*JOINED, 9], 0) == kept
    assert moved_fingerprint("one") != "one"


def test_gaps_of_one_join_are_computed_in_one_step(store: MemoryStore) -> None:
    """So that no step takes long; those of requests that have ended are not computed at all."""
    engine = Mover(store)
    keys, table = saved(engine), [11, 3, 9, 1, 7, 5, 2, 4, 6]
    for name in "bcd":
        stop = engine.scheduler.matched(name, asked(keys), JOINED, 0, salt=SALT)
        engine.scheduler.allocated(name, (table,), stop)
    jobs = engine.scheduler.step()
    engine.worker.start(jobs)
    engine.worker._load_thread.submit(int).result()  # all loads have ended
    counts = []
    for _ in range(2):
        engine.worker.poll()
        counts.append(len(engine.computed))
    assert counts == [1, 2]
    engine.worker._given_up.add("d")
    finished = engine.worker.poll()
    assert (finished.failed, len(engine.computed)) == ({"d"}, 2)
    assert finished.outcomes[0].failure is TransferFailure.GIVEN_UP


def test_a_part_that_is_gone_ends_what_is_moved_and_is_named(store: MemoryStore) -> None:
    engine = Mover(store)
    keys = saved(engine)
    store.delete(keys[2])
    stop = engine.scheduler.matched("b", asked(keys, tag="t"), JOINED, 0, salt=SALT)
    assert stop == 50 + 39
    outcome = engine.scheduler.take_outcomes()[-1]
    assert (outcome.key, outcome.failure, outcome.tag) == (keys[2], TransferFailure.MISSING, "t")
    engine.scheduler.allocated("b", ([11, 3, 9, 1, 7, 5],), stop)
    store.delete(keys[1])
    finished = engine.run(1)
    assert (finished.failed, finished.outcomes[0].key) == ({"b"}, keys[1]), (
        "the request's own is not at fault"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 10**40}, {"tokens": 10**40}, {"to": 10**40}, {"to": 3}, {"start": 44}, {"tokens": 0},
        {"key": "acme/nothing-under-this-key"}, {"more": 1}, {"start": -1}, {"to": 75},
    ],
)  # fmt: skip
def test_whatever_a_client_names_raises_nothing(store: MemoryStore, wrong: dict[str, Any]) -> None:
    engine = Mover(store)
    keys = saved(engine)
    first, second = moves(keys)
    hostile = transfer_params(load=keys[0], moved=[first | wrong, second], apart=SALT)
    assert engine.scheduler.matched("b", hostile, JOINED, 0, salt=SALT) <= len(JOINED) - 1
    assert engine.scheduler.matched("c", asked(keys), [7, *JOINED], 0, salt=SALT) == 0


@pytest.mark.parametrize(
    ("theirs", "ours", "stop"),
    [
        ([(10, 4)], [(56, 4)], 139),  # the same image in its place
        ([(10, 4)], [(56, 5)], 49),  # another length
        ([(10, 4)], [], 49),
        ([], [(56, 4)], 49),
        ([], [(48, 3)], 48),  # within the first context and what is computed behind it
        ([(41, 4)], [(87, 4)], 49),  # it does not end within what is moved
    ],
)
def test_images_are_moved_whole_or_not_at_all(
    store: MemoryStore, theirs: list[tuple[int, int]], ours: list[tuple[int, int]], stop: int
) -> None:
    engine = Mover(store)
    keys = saved(engine)
    held = tuple(ImageRef("one", *each) for each in theirs)
    keys[1] = engine.save(params_to_save(), [2, 4, 6], PARTS[1], images=held)
    given = tuple(ImageRef("one", *each) for each in ours)
    assert engine.scheduler.matched("b", asked(keys), JOINED, 0, given, SALT) == stop
