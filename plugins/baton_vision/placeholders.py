"""Count and collapse image placeholders in prompts, so that vLLM's processors can expand them again. Pure.

A prompt comes in one of two forms: as a user writes it (LLaVA: one placeholder an image; Fuyu: none), or
*expanded*, with one placeholder for every embedding of an image, as the model takes it and as vLLM's answers
and handoffs contain it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


def collapse_runs(prompt: Sequence[int], token: int, length: int) -> list[int]:
    """Replace every run of `length` placeholders by one; the remainder of a run stays.

    So a prompt may be expanded in part: a context from a handoff, followed by new text.

    Example:
        >>> collapse_runs([1, 9, 9, 9, 2, 9], token=9, length=3)
        [1, 9, 2, 9]
    """
    bare: list[int] = []
    for found, run in groupby(prompt):
        count = len(list(run))
        bare.extend([found] * (sum(divmod(count, length)) if found == token else count))
    return bare


def drop_leading_grid(prompt: Sequence[int], token: int, newline: int, end: int) -> list[int]:
    """Remove the expanded image at the beginning of a prompt: rows of `token` and `newline`, then `end`.

    Raises:
        ValueError: image tokens stand elsewhere, or `end` does not follow them.
    """
    length = next((at for at, found in enumerate(prompt) if found not in (token, newline)), len(prompt))
    bare = list(prompt[length + 1 :])
    if length == 0 or list(prompt[length : length + 1]) != [end] or token in bare:
        raise ValueError("image tokens may only stand at the beginning of a prompt, where its image is")
    return bare


@dataclass(frozen=True)
class Canvas:
    """The size that images are shrunk to, and the size of a patch, in pixels.

    Attributes:
        width: maximum width; larger images are shrunk in proportion.
        height: maximum height, likewise.
    """

    width: int
    height: int
    patch_width: int
    patch_height: int

    def shrunk(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height after shrinking, rounded down as `FuyuImageProcessor.resize` does."""
        if width <= self.width and height <= self.height:
            return width, height
        scale = min(self.height / height, self.width / width)
        return int(width * scale), int(height * scale)

    def patches(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows of patches that cover an image; 0 if shrinking leaves no pixels."""
        width, height = self.shrunk(width, height)
        return math.ceil(width / self.patch_width), math.ceil(height / self.patch_height)
