"""The context that shares most tokens with a prompt is found as if all were compared, of one tenant and model."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from baton.images.image import with_distinct_images
from baton.library.handoff import BLOCK, Handoff, PrefixMatch, common_tokens
from baton.library.prefixes import PrefixIndex
from baton_kv.format import ImageRef


def record(tokens: Sequence[int], tenant: str = "a", weights: str = "w", **more: object) -> Handoff:
    fields = {"model": "m", "created_at": 0, "ttl_s": 60, "expires_at": 60} | more
    return Handoff(tenant=tenant, weights=weights, tokens=array("i", tokens), **fields)  # type: ignore[arg-type]


def find(index: PrefixIndex, prompt: Sequence[int], tenant: str = "a") -> PrefixMatch | None:
    return index.find(tenant, "w", prompt, lambda _record: True)


def longest(records: list[Handoff], prompt: Sequence[int]) -> int:
    """By comparing all; what is shorter than a block does not count."""
    shared = [len([*_equal(each.tokens, prompt)]) for each in records]
    return max((count for count in shared if count >= BLOCK), default=0)


def _equal(ours: Sequence[int], theirs: Sequence[int]) -> Sequence[int]:
    count = 0
    while count < min(len(ours), len(theirs)) and ours[count] == theirs[count]:
        count += 1
    return ours[:count]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_prefix_is_found_among_trees_of_contexts(seed: int) -> None:
    dice, index = random.Random(seed), PrefixIndex()
    records: list[Handoff] = []
    for _ in range(40):
        parent = dice.choice(records).tokens if records and dice.random() < 0.8 else array("i")
        kept = parent[: dice.randrange(len(parent) + 1)] if parent else parent
        grown = [*kept, *(dice.randrange(3) for _ in range(dice.randrange(1, 120)))]
        records.append(record(grown))
        index.add(records[-1])
    for _ in range(60):
        gone = dice.random() < 0.3 and len(records) > 1
        if gone:
            index.remove(records.pop(dice.randrange(len(records))))
        base = dice.choice(records).tokens
        prompt = [*base[: dice.randrange(len(base) + 1)], *(dice.randrange(3) for _ in range(50))]
        found, best = find(index, prompt), longest(records, prompt)
        # Behind the last block that they share, only the newest are compared.
        assert (found.tokens if found is not None else 0) in range(best // BLOCK * BLOCK, best + 1)
        if found is not None:
            assert found.record in records
            assert list(found.record.tokens[: found.tokens]) == prompt[: found.tokens]


def test_another_tenant_and_other_weights_are_never_found() -> None:
    index, tokens = PrefixIndex(), list(range(100))
    index.add(record(tokens, tenant="b"))
    index.add(record(tokens, weights="v"))
    assert find(index, tokens) is None
    assert find(index, tokens, tenant="b") is not None


def test_what_is_removed_leaves_nothing() -> None:
    index = PrefixIndex()
    records = [record(range(length)) for length in (10, 32, 33, 64, 100)]
    for each in (*records, records[0]):
        index.add(each)
    for each in (*records, records[0]):
        index.remove(each)
    assert find(index, range(100)) is None
    assert (index._scopes, index._chains) == ({}, {})


def test_a_context_is_passed_over_that_may_not_be_used() -> None:
    index, short, long = PrefixIndex(), record(range(64)), record(range(200))
    index.add(short)
    index.add(long)
    found = index.find("a", "w", range(200), lambda each: each is short)
    assert found is not None
    assert (found.record, found.tokens) == (short, 64)


def test_a_match_says_whether_it_continues_and_whether_others_share_as_much() -> None:
    index = PrefixIndex()
    first, second = record([*range(64), *[1] * 64]), record([*range(64), *[2] * 64])
    index.add(first)
    alone = find(index, [*range(64), 9])
    assert alone is not None
    assert (alone.alone, alone.continues) == (True, False)
    index.add(second)
    shared = find(index, [*range(64), 9])
    assert shared is not None
    assert (shared.alone, shared.record) == (False, second), "the newest"
    whole = find(index, [*first.tokens, 9])
    assert whole is not None
    assert (whole.alone, whole.continues, whole.record) == (True, True, first)
    later = record([*first.tokens, *[3] * 64])
    index.add(later)
    whole = index.find("a", "w", [*later.tokens, 9], lambda each: each is not later)
    assert whole is not None
    assert (whole.alone, whole.continues, whole.record) == (True, True, first), "of one conversation"


def test_each_context_is_asked_about_once_however_many_blocks_are_shared() -> None:
    index = PrefixIndex()
    turns = [record(range(length)) for length in range(200, 2000, 200)]
    for each in turns:
        index.add(each)
    asked: list[Handoff] = []

    def first_alone(each: Handoff) -> bool:
        asked.append(each)
        return each is turns[0]

    found = index.find("a", "w", range(2000), first_alone)
    assert found is not None
    assert (found.record, found.tokens) == (turns[0], 200)
    assert len(asked) == len(turns)


def test_the_contexts_that_another_continues() -> None:
    index = PrefixIndex()
    chain = [record(range(length)) for length in (40, 96, 130)]
    fork = record([*range(96), *[7] * 40])
    for each in (*chain, fork):
        index.add(each)
    assert index.continued_by(chain[2]) == chain[:2]
    assert index.continued_by(fork) == chain[:2]
    assert index.continued_by(chain[0]) == []
    assert list(index.continuing(chain[1])) == [chain[2], fork]
    assert list(index.continuing(fork)) == []


def test_tokens_are_compared_whatever_holds_them() -> None:
    for length in (0, 1, 2, 31, 64, 1000):
        tokens = list(range(length))
        assert common_tokens(array("i", tokens), tokens) == length
        for place in {0, length // 2, length - 1} & set(range(length)):
            other = [*tokens[:place], -1, *tokens[place + 1 :]]
            assert common_tokens(array("i", tokens), other) == place
    index = PrefixIndex()
    index.add(record(range(40)))
    with pytest.raises(OverflowError):
        find(index, [2**40] * 40)


@pytest.mark.parametrize("length", [1, 3, 40])
def test_contexts_are_shared_up_to_the_first_image_that_differs(length: int) -> None:
    """All images have the same placeholders, so the token ids alone are equal."""
    text, placeholder = list(range(50)), 7
    ids = [*text, *[placeholder] * length, *text, *[placeholder] * length, *text]
    places = (len(text), 2 * len(text) + length)

    def images(*names: str) -> list[ImageRef]:
        return [ImageRef(name, at, length) for name, at in zip(names, places, strict=True)]

    index = PrefixIndex()
    index.add(record(ids, positions=images("one", "two")))
    for names, shared in (
        (("one", "two"), len(ids)),
        (("one", "other"), places[1]),
        (("other", "two"), places[0]),
        (("two", "one"), places[0]),
    ):
        match = find(index, with_distinct_images(ids, images(*names)))
        assert match is not None
        assert match.tokens == shared, names
    match = find(index, ids)
    assert match is not None
    assert match.tokens == places[0], "a text that spells the placeholders is no image"
