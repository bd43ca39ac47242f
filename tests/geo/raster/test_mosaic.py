from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from geo.raster.made import make_card, read_tiff, read_tile, run, sign_model, write_tiff
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest
from baton_geo.raster.pixels.grid import Floats, Grid
from baton_geo.raster.products.output_files import Mosaic, most_likely, softmax

grids = st.builds(
    lambda width, height, tile, share: Grid(width, height, tile, int(tile * share / 2)),
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(16, 32),
    st.floats(0, 1),
)


def cut(grid: Grid, scene: Floats, tile: int) -> Floats:
    """A tile of (classes, height, width), padded with its edge."""
    row, column = grid.place(tile)
    y, x, side = grid.ys[row], grid.xs[column], grid.tile
    part = scene[:, y : y + side, x : x + side]
    return np.pad(part, [(0, 0), (0, side - part.shape[1]), (0, side - part.shape[2])], mode="edge")


def blend(grid: Grid, scene: Floats, order: list[int]) -> Floats:
    """Tiles of a scene of scores, added in some order: probabilities of shape (classes, height, width)."""
    mosaic, out, next_row = Mosaic(grid, len(scene)), np.full(scene.shape, np.nan, np.float32), 0
    for tile in order:
        mosaic.add(tile, cut(grid, scene, tile))
        for top, rows in mosaic.finished():
            assert top == next_row
            next_row += len(rows)
            out[:, top : top + len(rows)] = rows.transpose(1, 0, 2)
    assert next_row == grid.height
    return out


@given(grids, st.integers(2, 5), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_coordinates_come_back(grid: Grid, classes: int, random: np.random.Generator) -> None:
    """A model that says where a pixel is gives the coordinates, whatever the grid and the order of the tiles."""
    rows, columns = np.mgrid[: grid.height, : grid.width]
    wanted = (rows // 5 + columns // 3) % classes
    scores = np.where(np.arange(classes)[:, None, None] == wanted, 9, 0).astype(np.float32)
    order = list(range(len(grid)))
    random.shuffle(order)
    blended = blend(grid, scores, order)
    np.testing.assert_allclose(blended, softmax(scores), atol=1e-5)
    np.testing.assert_array_equal(most_likely(blended.transpose(1, 0, 2)), wanted)


@given(grids)
@settings(deadline=None)
def test_a_constant_has_no_seams(grid: Grid) -> None:
    """A model that says the same everywhere gives the same everywhere."""
    scores = np.broadcast_to(
        np.array([0.3, 1.1, -0.4], np.float32)[:, None, None], (3, grid.height, grid.width)
    )
    blended = blend(grid, np.ascontiguousarray(scores), list(range(len(grid))))
    np.testing.assert_allclose(blended, np.broadcast_to(softmax(scores)[:, :1, :1], blended.shape), rtol=1e-6)


def test_an_overlap_by_hand() -> None:
    """Two tiles of opposite opinion share two rows: 2:1, then 1:2."""
    grid = Grid(16, 30, 16, 2)
    mosaic = Mosaic(grid, 2)
    sure = np.zeros((2, 16, 16), np.float32)
    sure[0] = 60
    mosaic.add(0, sure)
    mosaic.add(1, sure[::-1].copy())
    rows = np.concatenate([part[:, 0, 0].copy() for _, part in mosaic.finished()])
    np.testing.assert_allclose(rows, [1] * 14 + [2 / 3, 1 / 3] + [0] * 14, atol=1e-6)


def test_few_rows_stay_in_memory() -> None:
    """A tall scene never has more than two rows of tiles in memory."""
    grid = Grid(16, 4000, 16, 4)
    mosaic = Mosaic(grid, 2)
    for tile in range(len(grid)):
        mosaic.add(tile, np.zeros((2, 16, 16), np.float32))
        for _ in mosaic.finished():
            pass
        assert len(mosaic._sums) <= 32


@given(st.integers(2, 9))
def test_most_likely_is_argmax(classes: int) -> None:
    """The class of the highest probability, the first of equals."""
    chances = np.random.default_rng(classes).integers(0, 4, (7, classes, 11)).astype(np.float32)
    np.testing.assert_array_equal(most_likely(chances), chances.argmax(axis=1))


def test_probabilities_may_come_as_bytes(decoders: Decoders, tmp_path: Path) -> None:
    """The engine's bytes must give the mask of the logits they were made of, but for one pixel of ten thousand."""
    pixels = np.random.default_rng(5).normal(0, 2, (1, 300, 400)).astype(np.float32)
    path = write_tiff(tmp_path / "a.tif", pixels)

    def as_bytes(tile: np.ndarray[Any, Any]) -> Any:
        chances = 255 / (1 + np.exp(-2 * tile[0, 0].astype(np.float64)))
        return np.stack([255 - chances + 0.5, chances + 0.5]).astype(np.uint8)

    masks = []
    for model in (sign_model, as_bytes):
        with decoders.open(path, SceneRequest(card=make_card(), probabilities=True)) as scene:
            products = run(scene, model)
            assert products.mask is not None
            assert products.probabilities is not None
            masks.append(read_tiff(products.mask))
            chances = read_tiff(products.probabilities).astype(int)
            assert int(np.abs(chances.sum(axis=0) - 250).max()) <= 1
    assert (masks[0] != masks[1]).mean() < 1e-4


@pytest.mark.fault("F14")
def test_scores_that_are_not_finite_are_noticed_in_bytes(decoders: Decoders, tmp_path: Path) -> None:
    """The engine gives a pixel without finite scores 0 for every class."""
    path = write_tiff(tmp_path / "a.tif", np.ones((1, 32, 32), np.float32))
    with decoders.open(path, SceneRequest(card=make_card())) as scene:
        read_tile(scene, 0)
        chances = np.full((2, 32, 32), 127, np.uint8)
        chances[:, 3, 4] = 0
        with pytest.raises(RuntimeError, match="not finite"):
            scene.write(0, chances)
