from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_geo.raster.pixels.grid import Grid, count_tiles, starts, weights

lengths = st.integers(1, 400)
tiles = st.integers(4, 64).flatmap(lambda tile: st.tuples(st.just(tile), st.integers(0, tile // 2)))


@pytest.mark.parametrize(
    ("length", "tile", "overlap", "expected"),
    [
        (10, 4, 1, [0, 3, 6]),
        (11, 4, 1, [0, 3, 6, 7]),
        (8, 4, 0, [0, 4]),
        (9, 4, 0, [0, 4, 5]),
        (4, 4, 2, [0]),
        (3, 4, 2, [0]),
        (10980, 256, 32, [*range(0, 10724, 224), 10724]),
    ],
)
def test_starts_by_hand(length: int, tile: int, overlap: int, expected: list[int]) -> None:
    """Tiles lie where a person would put them, the last one moved back to the edge."""
    assert starts(length, tile, overlap) == expected


def test_weights_by_hand() -> None:
    """Over an overlap of two pixels the weights go 2:1 and 1:2, and are exactly 1 elsewhere."""
    first, second = weights(6, 4, 2)
    np.testing.assert_allclose(first, [1, 1, 2 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(second, [1 / 3, 2 / 3, 1, 1], rtol=1e-6)
    assert first[0] == second[-1] == 1.0


@given(lengths, tiles)
def test_weights_cover(length: int, tile: tuple[int, int]) -> None:
    """Every pixel has a weight above 0 in each tile that holds it, and they add up to 1."""
    side, overlap = tile
    total = np.zeros(length)
    for start, weight in zip(starts(length, side, overlap), weights(length, side, overlap), strict=True):
        assert (weight > 0).all()
        total[start : start + len(weight)] += weight
    np.testing.assert_allclose(total, 1, atol=1e-6)


@given(lengths, lengths, tiles)
def test_count_tiles(width: int, height: int, tile: tuple[int, int]) -> None:
    """Tiles are counted as they are laid, without laying them."""
    assert count_tiles(width, height, *tile) == len(Grid(width, height, *tile))


def test_count_tiles_of_a_lie() -> None:
    """A header that claims four billion pixels each way is counted at once."""
    assert count_tiles(2**32 - 1, 2**32 - 1, 256, 32) > 10**14
