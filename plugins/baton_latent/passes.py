"""Which tokens of a batch can be computed together, when some wait for the hidden state before them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Pass:
    """One forward pass over parts of a batch.

    Attributes:
        rows: the requests that take part, by their place in the batch.
        starts: for each of them its first token, by its place in the batch.
        ends: for each of them one after its last token.
        seeded: those first tokens that are latent: their input is what the token before them left.
    """

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    seeded: list[int] = field(default_factory=list)

    @property
    def thinking(self) -> list[int]:
        """Those of the requests whose first token here is latent."""
        seeded = set(self.seeded)
        return [row for row, start in zip(self.rows, self.starts, strict=True) if start in seeded]

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.starts, self.ends, strict=True)]


def plan(bounds: Sequence[int], latent: Sequence[int]) -> list[Pass]:
    """Cut a batch into passes: a latent token begins a pass, and ordinary ones go with what is before them.

    Args:
        bounds: `requests + 1` ascending places: request i has the tokens `bounds[i]` to `bounds[i + 1] - 1`.
        latent: ascending places of the latent tokens.

    Returns:
        As many passes as the request with the most parts has; every token is in one of them.
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
                part.seeded.append(start)
    return passes
