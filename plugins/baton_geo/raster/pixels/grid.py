"""Place tiles over a scene, and weight their pixels where they overlap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def aligned(length: int, tile: int) -> list[int]:
    """Return the first pixels of tiles side by side along an axis; the last may reach beyond the edge."""
    return list(range(0, length, tile))


def starts(length: int, tile: int, overlap: int) -> list[int]:
    """Return the first pixels of the tiles along one axis: `tile - overlap` apart, the last at the edge.

    An axis shorter than a tile has one tile, which is padded.
    """
    if length <= tile:
        return [0]
    return [*range(0, length - tile, tile - overlap), length - tile]


def weights(length: int, tile: int, overlap: int) -> list[Floats]:
    """Return the weights of each tile's pixels along an axis: shape (min(tile, length),), float32, above 0.

    A linear ramp over the overlap at both ends, divided by the sum over all tiles, so that the weights of a
    pixel add up to 1; where tiles do not overlap the weight is exactly 1.
    """
    size = min(tile, length)
    rise = np.arange(1, size + 1, dtype=np.float64)
    ramp = np.minimum(np.minimum(rise, rise[::-1]), overlap + 1)
    places = starts(length, tile, overlap)
    total = np.zeros(length)
    for start in places:
        total[start : start + size] += ramp
    return [(ramp / total[start : start + size]).astype(np.float32) for start in places]


class Grid:
    """The tiles of a scene, numbered row by row.

    Attributes:
        width: of the scene, pixels.
        height: of the scene, pixels.
        tile: side of a tile, pixels.
        xs: first columns of the tiles in a row of tiles.
        ys: first rows of the rows of tiles.

    Args:
        side_by_side: whether tiles never overlap, not at the edges either.
    """

    def __init__(
        self, width: int, height: int, tile: int, overlap: int, *, side_by_side: bool = False
    ) -> None:
        self.width, self.height, self.tile, self.overlap = width, height, tile, overlap
        if side_by_side:
            self.xs, self.ys = aligned(width, tile), aligned(height, tile)
        else:
            self.xs, self.ys = starts(width, tile, overlap), starts(height, tile, overlap)

    def __len__(self) -> int:
        return len(self.xs) * len(self.ys)

    def place(self, tile: int) -> tuple[int, int]:
        """Return row and column of a tile in the grid of tiles."""
        return divmod(tile, len(self.xs))


def count_tiles(width: int, height: int, tile: int, overlap: int) -> int:
    """Count the tiles like `len(Grid(...))` in constant memory: the header's size may be false."""

    def along(length: int) -> int:
        return 1 if length <= tile else -(-(length - tile) // (tile - overlap)) + 1

    return along(width) * along(height)
