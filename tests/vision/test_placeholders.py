"""Prompts in which images are written out are brought back to how they were, and what is no such prompt is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_vision.placeholders import Canvas, collapse_runs, drop_leading_grid

IMAGE, NEWLINE, END = 7, 8, 9
words = st.lists(st.integers(0, 6), max_size=6)


@given(st.lists(st.tuples(words, st.booleans()), max_size=4), st.integers(5, 9))
def test_collapsing_undoes_expanding(parts: list[tuple[list[int], bool]], length: int) -> None:
    """Of all images or of some, whatever is between them, and when they stand side by side."""
    bare = [token for text, _ in parts for token in [*text, IMAGE]]
    given = [token for text, whole in parts for token in [*text, *[IMAGE] * (length if whole else 1)]]
    assert collapse_runs(given, IMAGE, length) == bare


def test_what_is_left_over_is_left_to_be_counted() -> None:
    assert collapse_runs([1, 7, 7, 7, 7, 7, 2], IMAGE, 3) == [1, 7, 7, 7, 2]


@given(st.integers(1, 4), st.integers(1, 4), words)
def test_a_leading_grid_is_dropped(columns: int, rows: int, text: list[int]) -> None:
    grid = ([IMAGE] * columns + [NEWLINE]) * rows
    assert drop_leading_grid([*grid, END, *text], IMAGE, NEWLINE, END) == text


@pytest.mark.parametrize("prompt", [[1, IMAGE, END], [IMAGE, NEWLINE, 1], [IMAGE], [IMAGE, END, 1, IMAGE]])
def test_image_tokens_elsewhere_are_refused(prompt: list[int]) -> None:
    """In the middle, without an end, nothing after, a second time."""
    with pytest.raises(ValueError, match="image tokens may only stand at the beginning"):
        drop_leading_grid(prompt, IMAGE, NEWLINE, END)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1, 1), (1, 1)),
        ((1920, 1080), (64, 36)),
        ((3840, 1080), (64, 18)),
        ((31, 30), (2, 1)),
        ((65000, 1), (64, 0)),
    ],
)
def test_the_grid_of_an_image(size: tuple[int, int], grid: tuple[int, int]) -> None:
    """Fuyu-8B's, worked out by hand: partly filled patches count, and a line of pixels has no row left."""
    assert Canvas(1920, 1080, 30, 30).patches(*size) == grid
