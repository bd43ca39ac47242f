"""Plan the forward passes of a batch whose latent tokens need the hidden state of the token before. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Pass:
    """One forward pass over a part of a batch.

    Attributes:
        rows: indices of the requests that take part.
        starts: index of each request's first token in the batch.
        ends: index after each request's last token.
        latent: those of `starts` that are latent tokens, whose input is the seed of the token before.
    """

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    latent: list[int] = field(default_factory=list)

    @property
    def latent_tokens(self) -> list[tuple[int, int]]:
        """Return row and index of each latent token, in order."""
        latent = set(self.latent)
        return [(row, start) for row, start in zip(self.rows, self.starts, strict=True) if start in latent]

    @property
    def latent_rows(self) -> list[int]:
        """Return those of `rows` whose first token is latent."""
        return [row for row, _ in self.latent_tokens]

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.starts, self.ends, strict=True)]


def plan(bounds: Sequence[int], latent: Sequence[int]) -> list[Pass]:
    """Split a batch into passes: a latent token begins a new pass, the tokens after it are in the same pass.

    Args:
        bounds: `requests + 1` ascending indices; request i has the tokens `bounds[i]` to `bounds[i + 1] - 1`.
        latent: ascending indices of the latent tokens.

    Returns:
        As many passes as the request with the most parts needs; every token is in exactly one.
    """
    passes: list[Pass] = []
    for row, (first, end) in enumerate(pairwise(bounds)):
        inside = latent[bisect_left(latent, first) : bisect_left(latent, end)]
        cuts = [first, *(place for place in inside if place > first), end]
        for number, (start, stop) in enumerate(pairwise(cuts)):
            if stop == start:
                continue
            if number == len(passes):
                passes.append(Pass())
            part = passes[number]
            part.rows.append(row)
            part.starts.append(start)
            part.ends.append(stop)
            if number or start in inside:
                part.latent.append(start)
    return passes
