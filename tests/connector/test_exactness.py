"""Two hundred ways to start from an entry, on real weights in fp32: each answers as a full prefill does.

The engine that prefills everything has no prefix cache; the one that starts from entries has seen none
of these contexts. What was prefilled is the schedulers' own count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.offline_engines import OWN, Answer, OfflineEngine, prompt

from baton_kv.contract import PARAMS_KEY, params_to_save

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(600)]
ARGS = {"max_model_len": 4224, "max_num_seqs": 20, "block_size": 32}
SAID = 8
LENGTHS = (
    *(1, 2, 3, 7, 15, 26, 27, 28, 31, 32, 33, 59, 60, 63, 64, 65, 91, 92, 95, 96, 97),
    *(120, 123, 127, 128, 129, 160, 200, 251, 256, 300, 319, 400, 511, 512, 640, 800, 1100, 2000, 4000),
)
"""Of A's prompt; with the five tokens A says, many of A's contexts end at a block's end or beside it."""
Case = tuple[list[int], int, dict[str, Any] | None]


@dataclass
class Matrix:
    """Every case so far.

    Attributes:
        kinds: how many there were of each kind.
        reused: how many of them did not prefill what was handed over.
        worst: largest difference of a log-probability.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    reused: int = 0
    worst: float = 0.0

    def add(self, kind: str, relayed: list[Answer], plain: list[Answer], reused: list[int]) -> None:
        """Hold answers against those of a full prefill, and what was reused against what was handed over."""
        for one, other, count in zip(relayed, plain, reused, strict=True):
            assert one["tokens"] == other["tokens"], kind
            gaps = [abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True)]
            self.worst = max(self.worst, *gaps)
            assert one["cached"] == count, kind
            self.kinds[kind] += 1
            self.reused += count > 0


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return Matrix()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exact") / "store"


@pytest.fixture(scope="module")
def first(store: Path) -> Iterator[OfflineEngine]:
    pool = 768 * 1024 * 1024
    with OfflineEngine(store, enable_prefix_caching=False, kv_cache_memory_bytes=pool, **ARGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def second(store: Path) -> Iterator[OfflineEngine]:
    """Start an engine with a small pool, so that a large batch is preempted, and small chunks of prefill."""
    pool = 224 * 1024 * 1024
    with OfflineEngine(
        store, enable_prefix_caching=True, max_num_batched_tokens=192, kv_cache_memory_bytes=pool, **ARGS
    ) as engine:
        yield engine


@dataclass
class Left:
    """What A left behind: its whole context, how to start from it, and a full prefill's answer."""

    context: list[int]
    params: dict[str, Any]
    plain: Answer

    @property
    def asked(self) -> Case:
        return ([*self.context, *OWN], SAID, self.params)


@pytest.fixture(scope="module")
def left(first: OfflineEngine) -> list[Left]:
    found = []
    for length in LENGTHS:
        asked = prompt(length, seed=length)
        (answer,) = first.ask((asked, 5, params_to_save()))
        context = asked + answer["tokens"]
        (plain,) = first.ask(([*context, *OWN], SAID, None))
        assert first.computed == len(context) + len(OWN)
        first.saved(answer["params"])
        found.append(Left(context, answer["params"], plain))
    return found


@pytest.mark.fault("D7")
def test_a_handoff_is_exact_on_the_same_engine(
    first: OfflineEngine, left: list[Left], matrix: Matrix
) -> None:
    for one in left:
        answers = first.ask(one.asked)
        matrix.add("same engine", answers, [one.plain], [len(one.context) - 1])
        assert first.computed == len(OWN) + 1


@pytest.mark.fault("D7")
def test_a_handoff_is_exact_on_a_cold_engine_with_small_chunks_among_plain_requests(
    second: OfflineEngine, left: list[Left], matrix: Matrix
) -> None:
    for one in left:
        foreign = prompt(40, seed=5000 + len(one.context))
        relayed, _ = second.ask(one.asked, (foreign, SAID, None))
        matrix.add("other engine", [relayed], [one.plain], [len(one.context) - 1])
        assert second.computed == len(OWN) + 1 + len(foreign)


@pytest.mark.fault("D7")
def test_handoffs_are_exact_in_a_chain(
    first: OfflineEngine, second: OfflineEngine, left: list[Left], matrix: Matrix
) -> None:
    for one in left:
        middle = [*one.context, *prompt(9, seed=9)]
        key = one.params[PARAMS_KEY]["load"]
        (answer,) = second.ask((middle, 4, params_to_save(load=key)))
        second.saved(answer["params"])
        whole = [*middle, *answer["tokens"]]
        relayed = first.ask(([*whole, *OWN], SAID, answer["params"]))
        assert first.computed == len(OWN) + 1
        plain = first.ask(([*whole, *OWN], SAID, None))
        matrix.add("chain", relayed, plain, [len(whole) - 1])


@pytest.mark.fault("D7")
def test_sixteen_handoffs_at_once_are_exact(first: OfflineEngine, left: list[Left], matrix: Matrix) -> None:
    one = next(one for one in left if len(one.context) > 500)
    own = [prompt(length, seed=700 + length) for length in range(3, 19)]
    plain = first.ask(*[(one.context + mine, SAID, None) for mine in own])
    relayed = first.ask(*[(one.context + mine, SAID, one.params) for mine in own])
    matrix.add("fan-out", relayed, plain, [len(one.context) - 1] * 16)
    assert first.computed == sum(len(mine) + 1 for mine in own)


@pytest.mark.fault("D7")
def test_a_handoff_is_exact_when_blocks_are_preempted_and_reallocated(
    first: OfflineEngine, second: OfflineEngine, left: list[Left], matrix: Matrix
) -> None:
    """More at once than the pool holds: the scheduler preempts, and a preempted request is loaded again.

    The pool holds 151 blocks. With their answers the 20 requests need 160 beside the context's, also where
    those that came late share the blocks that the first one loaded.
    """
    one = next(one for one in left if len(one.context) > 400)
    own = [prompt(30, seed=800 + number) for number in range(20)]
    second.forget_prefixes()
    plain = first.ask(*[(one.context + mine, 200, None) for mine in own])
    relayed = second.ask(*[(one.context + mine, 200, one.params) for mine in own])
    assert second.preempted > 0
    for answer in relayed:  # after a preemption more may be resident than was handed over
        assert answer["cached"] >= len(one.context) - 1
        answer["cached"] = len(one.context) - 1
    matrix.add("preempted", relayed, plain, [len(one.context) - 1] * 20)


@pytest.mark.fault("D7")
def test_a_handoff_is_exact_after_its_entry_is_deleted(
    first: OfflineEngine, store: Path, left: list[Left], matrix: Matrix
) -> None:
    for one in left[10:18]:
        path = store / "entries" / f"{one.params[PARAMS_KEY]['load']}.kv"
        aside = path.rename(store / "aside")
        matrix.add("evicted", first.ask(one.asked), [one.plain], [0])
        assert first.computed == len(one.context) + len(OWN)
        aside.rename(path)


@pytest.mark.fault("D7")
def test_a_handoff_is_exact_after_a_restart(store: Path, left: list[Left], matrix: Matrix) -> None:
    with OfflineEngine(store, enable_prefix_caching=True, **ARGS) as third:
        for one in left:
            matrix.add("restart", third.ask(one.asked), [one.plain], [len(one.context) - 1])
            assert third.computed == len(OWN) + 1
    cases = sum(matrix.kinds.values())
    print(f"{dict(matrix.kinds)}: {cases} cases, 0 mismatches, {matrix.reused} reused", end=", ")
    print(f"largest difference of a log-probability {matrix.worst:.1e}")
    assert cases >= 200
    assert matrix.reused >= 0.9 * cases
    assert matrix.worst < 2e-3
