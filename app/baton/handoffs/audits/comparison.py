"""Compare the log probabilities of a token that was computed from loaded KV and from nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

FAINT = -6.0
"""Tokens whose log probability is lower in both computations do not count: rounding shows in them most."""
LogProbs = Mapping[int, float]
"""Natural log probabilities of the likeliest tokens at one place, by token id."""


@dataclass(frozen=True)
class Comparison:
    """What an audit found.

    Attributes:
        difference: largest difference of a log probability, in nats.
        same_token: whether the likeliest token is the same.
    """

    difference: float
    same_token: bool


def compare(loaded: LogProbs, computed: LogProbs) -> Comparison:
    """Compare the likeliest tokens of two computations of one place.

    A token that only one of them lists differs at least by how far it is above the other's least likely one.

    Args:
        loaded: from loaded KV; not empty.
        computed: with all KV computed; not empty.
    """
    shared = loaded.keys() & computed.keys()
    both = max(
        (
            _distance(loaded[token], computed[token])
            for token in shared
            if not (loaded[token] <= FAINT and computed[token] <= FAINT)
        ),
        default=0.0,
    )
    one = max(_above(loaded, computed), _above(computed, loaded))
    return Comparison(max(both, one), _likeliest(loaded) == _likeliest(computed))


def _above(some: LogProbs, others: LogProbs) -> float:
    """Return by how much tokens that only `some` lists are at least above what `others` gives them."""
    least = max(FAINT, min(others.values()))
    return max(
        (_distance(some[token], least) for token in some.keys() - others.keys() if some[token] > least),
        default=0.0,
    )


def _distance(one: float, other: float) -> float:
    if one == other:  # also of two that are minus infinity
        return 0.0
    return math.inf if math.isnan(one) or math.isnan(other) else abs(one - other)


def _likeliest(values: LogProbs) -> int:
    return max(values, key=lambda token: values[token])
