"""What an engine computes before its first client."""

from __future__ import annotations

from baton.engines.vllm.engine import PREFILL, prefill


def test_a_prompt_has_the_ids_there_are_and_none_that_stand_for_something() -> None:
    assert prefill(1000, 49152, {None}) == list(range(1, PREFILL + 1))
    assert prefill(1000, 49152, {None, 3}) == [1, 2, *range(4, PREFILL + 1)]
    assert prefill(5, 49152, set()) == [1, 2, 3, 4, 5]
    small = prefill(1000, 100, {7})
    assert (set(small), len(small)) == (set(range(1, 100)) - {7}, PREFILL - 2)
