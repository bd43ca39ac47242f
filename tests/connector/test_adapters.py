"""KV that was computed with a LoRA adapter is loaded with the same one alone, and never without its name."""

from __future__ import annotations

from typing import Any

import pytest
from connector.role_engines import PROMPT, Engine
from support.memory_store import MemoryStore

from baton_kv.contract import Malformed, TransferFailure, parse, transfer_params
from baton_kv.fingerprint import adapter_fingerprint, moved_fingerprint

USED: dict[str, dict[str, str] | None] = {
    "none": None,
    "a": {"name": "a", "digest": "1" * 64},
    "a changed": {"name": "a", "digest": "2" * 64},
    "b, a copy of a": {"name": "b", "digest": "1" * 64},
}
BLOCKS = [3, 7, 1, 9]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def name_of(used: dict[str, str] | None) -> str | None:
    return used["name"] if used is not None else None


@pytest.mark.fault("B19")
@pytest.mark.parametrize("saved", USED)
@pytest.mark.parametrize("asked", USED)
def test_only_the_same_name_and_digest_load_what_was_saved(
    store: MemoryStore, saved: str, asked: str
) -> None:
    first, second = Engine(store), Engine(store, seed=1)
    with_, by = USED[saved], USED[asked]
    key = first.save(transfer_params(save="x/" + "k" * 32, adapter=with_), BLOCKS, adapter=name_of(with_))
    params = transfer_params(load=key, adapter=by)
    found = second.scheduler.matched("b", params, [*PROMPT, 5], 0, adapter=name_of(by))
    assert found == (len(PROMPT) - 1 if saved == asked else 0)
    failures = [each.failure for each in second.scheduler.take_outcomes()]
    assert failures == ([] if saved == asked else [TransferFailure.INCOMPATIBLE])


@pytest.mark.fault("B19")
@pytest.mark.parametrize(("told", "used"), [("a", None), ("none", "a"), ("a", "b"), ("b, a copy of a", "a")])
def test_parameters_of_another_adapter_than_vllm_computes_with_move_nothing(
    store: MemoryStore, told: str, used: str | None
) -> None:
    engine, right = Engine(store), USED[told]
    key = engine.save(transfer_params(save="x/" + "k" * 32, adapter=right), BLOCKS, adapter=name_of(right))
    assert (
        engine.scheduler.matched("b", transfer_params(load=key, adapter=right), PROMPT, 0, adapter=used) == 0
    )
    (outcome,) = (each for each in engine.scheduler.take_outcomes() if each.request_id == "b")
    assert outcome.failure is TransferFailure.MALFORMED
    held, answer = engine.scheduler.finished(
        "c",
        transfer_params(save="x/" + "l" * 32, adapter=right),
        tokens=PROMPT,
        prompt=len(PROMPT) - 1,
        computed=len(PROMPT),
        block_ids=(BLOCKS,),
        whole=True,
        adapter=used,
    )
    assert (held, answer) == (False, None)


def test_what_continues_an_adapter_s_context_shares_its_files_and_is_its_own(store: MemoryStore) -> None:
    engine, used = Engine(store), USED["a"]
    first = engine.save(transfer_params(save="x/" + "k" * 32, adapter=used), BLOCKS, adapter="a")
    params = transfer_params(save="x/" + "l" * 32, load=first, adapter=used)
    longer = [*PROMPT, *range(40)]
    assert engine.scheduler.matched("a", params, longer, 0, adapter="a") == len(PROMPT) - 1
    second = engine.save(params, [3, 7, 1, 9, 4, 5], longer, adapter="a")
    for by, found in (("a", len(longer) - 1), ("b, a copy of a", 0)):
        wanted = transfer_params(load=second, adapter=USED[by])
        assert engine.scheduler.matched(by, wanted, longer, 0, adapter=name_of(USED[by])) == found


def test_replaced_base_weights_are_others_for_adapters_too(store: MemoryStore) -> None:
    engine, used = Engine(store), USED["a"]
    key = engine.save(transfer_params(save="x/" + "k" * 32, adapter=used), BLOCKS, adapter="a")
    engine.scheduler.renew()
    assert engine.scheduler.matched("b", transfer_params(load=key, adapter=used), PROMPT, 0, adapter="a") == 0


@pytest.mark.parametrize(
    "adapter",
    [
        {},
        {"name": "a"},
        {"name": "", "digest": "1" * 64},
        {"name": "a", "digest": "1" * 63},
        {"name": "a", "digest": "G" * 64},
        {"name": "a", "digest": "1" * 64, "path": "/f"},
        {"name": "a" * 129, "digest": "1" * 64},
        "a",
    ],
)
def test_an_adapter_that_is_not_told_apart_is_malformed(adapter: Any) -> None:
    assert isinstance(parse({"baton_kv": {"adapter": adapter}}), Malformed)


def test_each_fact_makes_another_fingerprint() -> None:
    found = {
        adapter_fingerprint(base, name, digest)
        for base in ("x", "y")
        for name in ("a", "b", "a b")
        for digest in ("1" * 64, "2" * 64)
    }
    assert len(found) == 12
    assert not found & {"x", "y", moved_fingerprint("x")}
