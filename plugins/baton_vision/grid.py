"""How Fuyu cuts an image into patches. Arithmetic only; HuggingFace's image processor moves the pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Canvas:
    """What an image has to fit into, and what it is cut into; pixels.

    Attributes:
        width, height: larger images are shrunk to fit, keeping their proportions.
        patch_width, patch_height: of one patch.
    """

    width: int
    height: int
    patch_width: int
    patch_height: int

    def shrunk(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after shrinking; as `FuyuImageProcessor.resize`, which rounds down."""
        if width <= self.width and height <= self.height:
            return width, height
        scale = min(self.height / height, self.width / width)
        return int(width * scale), int(height * scale)

    def patches(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of patches that cover an image; 0 where it is too narrow to be shrunk."""
        width, height = self.shrunk(width, height)
        return math.ceil(width / self.patch_width), math.ceil(height / self.patch_height)
