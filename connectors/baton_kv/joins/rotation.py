"""Rotate keys from one position to another, as rotary position embeddings would have (arXiv:2104.09864)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from baton_kv.joins.packing import SlabPacking

Floats = NDArray[numpy.float32]


@dataclass(frozen=True)
class Turn:
    """The rotation of some tokens, each by its own angles.

    Attributes:
        cos: factor of each pair's own value, `[tokens, pairs]`.
        sin: factor of each pair's other value, `[tokens, pairs]`.
    """

    cos: Floats
    sin: Floats


class Rotation:
    """The rotary position embedding of a model.

    The engine rotates with a table of cosines and sines that is rounded to the model's dtype, so the rotation
    is undone and done again by that table, not by the exact angles.

    Args:
        table: cosines then sines of each position, `[positions, 2 * pairs]`.
        halves: whether a pair is the same place of the first and second half (NeoX); otherwise neighbours.
        by_values: whether the keys that will be rotated lie in memory value by value, not token by token.
    """

    def __init__(self, table: Floats, *, halves: bool, by_values: bool = False) -> None:
        keep = numpy.asfortranarray if by_values else numpy.ascontiguousarray
        self._cos, self._sin = (keep(part.astype(numpy.float32)) for part in numpy.split(table, 2, axis=1))
        self._halves = halves

    @property
    def positions(self) -> int:
        """Return the number of positions that the table has."""
        return len(self._cos)

    def turn(self, start: int, to: int, tokens: int) -> Turn:
        """Return the rotation of so many tokens from position `start` to position `to`.

        Raises:
            ValueError: the table is too short for them.
        """
        if max(start, to) + tokens > self.positions:
            raise ValueError(f"there are {self.positions} positions")
        cos, sin = self._cos[start : start + tokens], self._sin[start : start + tokens]
        new_cos, new_sin = self._cos[to : to + tokens], self._sin[to : to + tokens]
        length = cos * cos + sin * sin  # not 1 in a rounded table, or one that scales
        turned, sideways = new_cos * cos + new_sin * sin, new_sin * cos - new_cos * sin
        return Turn(numpy.divide(turned, length), numpy.divide(sideways, length))

    def apply(self, keys: Floats, turn: Turn) -> None:
        """Rotate keys `[heads, tokens, head size]` in place; values behind the rotated ones stay."""
        pairs = turn.cos.shape[1]
        if self._halves:
            one, other = keys[..., :pairs], keys[..., pairs : 2 * pairs]
        else:
            one, other = keys[..., 0 : 2 * pairs : 2], keys[..., 1 : 2 * pairs : 2]
        turned = one * turn.cos - other * turn.sin
        other[...] = other * turn.cos + one * turn.sin
        one[...] = turned


@dataclass(frozen=True)
class KeyMover:
    """The way in which one engine's keys are moved.

    Attributes:
        packing: where a slab holds its keys and values.
        rotation: the model's position embedding.
        layers: number of the model's layers; those behind hold hidden states, which are not moved.
    """

    packing: SlabPacking
    rotation: Rotation
    layers: int
