"""Blend the scores of overlapping tiles into rows of class probabilities, with few rows in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baton_geo.raster.pixels.grid import Floats, Grid, weights


def softmax(scores: Floats) -> Floats:
    """Return probabilities over the first axis: float32, same shape."""
    shifted = scores - scores.max(axis=0)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=0)
    return np.asarray(shifted, np.float32)


class Mosaic:
    """The blended scene: takes tiles in any order and gives finished rows from top to bottom.

    In memory are the rows from the first unfinished row of tiles to the last added tile: about two rows of
    tiles if tiles are added nearly in order.
    """

    def __init__(self, grid: Grid, classes: int) -> None:
        self._grid, self._classes = grid, classes
        self._across = weights(grid.width, grid.tile, grid.overlap)
        self._down = weights(grid.height, grid.tile, grid.overlap)
        self._left = [len(grid.xs)] * len(grid.ys)  # tiles to come, for each row of tiles
        self._row = 0  # first row of tiles with tiles to come
        self._top = 0  # scene row of _sums[0]
        self._sums = np.zeros((0, classes, grid.width), np.float32)

    def add(self, tile: int, scores: Floats) -> None:
        """Blend in one tile.

        Args:
            tile: number of the tile.
            scores: logits, shape (classes, tile, tile), float32.
        """
        row, column = self._grid.place(tile)
        down, across = self._down[row], self._across[column]
        probabilities = softmax(scores[:, : len(down), : len(across)])
        probabilities *= down[:, None] * across
        y, x = self._grid.ys[row] - self._top, self._grid.xs[column]
        self._make_room(y + len(down))
        self._sums[y : y + len(down), :, x : x + len(across)] += probabilities.transpose(1, 0, 2)
        self._left[row] -= 1

    def skip(self, tile: int) -> None:
        """Count a tile whose pixels are all nodata as done."""
        row, _ = self._grid.place(tile)
        self._left[row] -= 1
        self._make_room(self._grid.ys[row] - self._top + len(self._down[row]))

    def finished(self) -> Iterator[tuple[int, Floats]]:
        """Yield rows that no later tile changes: (first row, probabilities of shape (rows, classes, width)).

        The array is overwritten by the next call.
        """
        while self._row < len(self._left) and not self._left[self._row]:
            self._row += 1
            ends = self._row == len(self._left)
            stop = self._grid.height if ends else self._grid.ys[self._row]
            rows = stop - self._top
            yield self._top, self._sums[:rows]
            self._drop(rows)

    def _make_room(self, rows: int) -> None:
        have = len(self._sums)
        if rows > have:
            grown = np.zeros((rows, self._classes, self._grid.width), np.float32)
            grown[:have] = self._sums
            self._sums = grown

    def _drop(self, rows: int) -> None:
        """Move the remaining rows to the front, a few at a time, to avoid a copy of them all."""
        keep = len(self._sums) - rows
        for row in range(0, keep, rows):
            stop = min(row + rows, keep)
            self._sums[row:stop] = self._sums[row + rows : stop + rows]
        self._sums[keep:] = 0
        self._top += rows
