"""Batches are cut so that every latent token finds what the token before it left."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from baton_latent.passes import Pass, plan


def test_a_batch_without_latent_tokens_is_one_pass() -> None:
    assert plan([0, 5, 6], []) == [Pass([0, 1], [0, 5], [5, 6], [])]


def test_requests_with_different_numbers_of_steps_share_passes() -> None:
    passes = plan([0, 4, 6, 7], [2, 3, 6])  # two words, two steps; two words; a step whose seed is older
    assert passes == [
        Pass([0, 1, 2], [0, 4, 6], [2, 6, 7], [6]),
        Pass([0], [2], [3], [2]),
        Pass([0], [3], [4], [3]),
    ]


def test_what_follows_a_run_goes_with_its_last_step() -> None:
    assert plan([0, 9], [3, 4])[-1] == Pass([0], [4], [9], [4])


@given(st.lists(st.lists(st.booleans(), max_size=12), max_size=6))
def test_every_token_is_computed_once_and_after_what_it_needs(requests: list[list[bool]]) -> None:
    bounds = [0]
    for request in requests:
        bounds.append(bounds[-1] + len(request))
    latent = [place for place, thinks in enumerate(chain.from_iterable(requests)) if thinks]
    passes = plan(bounds, latent)
    order: dict[int, int] = {}
    for number, part in enumerate(passes):
        for row, start, end in zip(part.rows, part.starts, part.ends, strict=True):
            assert bounds[row] <= start < end <= bounds[row + 1]
            for place in range(start, end):
                assert place not in order
                order[place] = number
            assert not set(range(start + 1, end)) & set(latent), "a latent token begins a pass"
        assert set(part.latent) == set(part.starts) & set(latent)
    assert sorted(order) == list(range(bounds[-1]))
    for place in latent:
        if place not in bounds:
            assert order[place - 1] < order[place]
    most = max((sum(request) for request in requests), default=0)
    assert len(passes) <= most + 1
