"""Compute the grid of patches into which transformers' image processor for Fuyu cuts an image."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Canvas:
    """The size that images are shrunk to, and the size of a patch, in pixels.

    Attributes:
        width: maximum width; larger images are shrunk in proportion.
        height: maximum height, likewise.
        patch_width: width of a patch.
        patch_height: height of a patch.
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
