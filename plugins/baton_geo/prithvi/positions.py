"""Encode positions of tokens: a fixed 3-D sin-cos table, and encodings of date and place.

The formulas are those of the published `prithvi_mae.py` (IBM and NASA, Apache-2.0); the 1-D one is that of
"Attention Is All You Need" (arXiv 1706.03762, section 3.5), sines first, then cosines.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

WAVELENGTH_BASE = 10000.0
PatchGrid = tuple[int, int, int]  # patches: (time, rows, columns)


def _waves(dim: int, count: int) -> NDArray[np.float64]:
    """Return sin-cos waves of 0 .. count - 1: (count, dim) float64."""
    frequency = WAVELENGTH_BASE ** (-np.arange(dim // 2, dtype=np.float64) / (dim / 2))
    angle = np.outer(np.arange(count), frequency)
    return np.concatenate((np.sin(angle), np.cos(angle)), axis=1)


def grid_positions(dim: int, grid: PatchGrid) -> Tensor:
    """Make the fixed position table of a grid of patches.

    Of `dim` numbers, 6/16 encode the column, 6/16 the row and 4/16 the time step. The first row of the table,
    for the class token, is zero. Patches follow by time, then row, then column.

    Args:
        dim: width of a token; a multiple of 16.
        grid: patches in time, rows and columns.

    Returns:
        (1, 1 + time * rows * columns, dim) float32, on torch's default device.
    """
    times, rows, columns = grid
    part = dim // 16
    table = np.zeros((times, rows, columns, dim))
    table[..., : 6 * part] = _waves(6 * part, columns)[None, None, :]
    table[..., 6 * part : 12 * part] = _waves(6 * part, rows)[None, :, None]
    table[..., 12 * part :] = _waves(4 * part, times)[:, None, None]
    with_class = np.concatenate((np.zeros((1, dim)), table.reshape(-1, dim)))
    # Not from_numpy, which ignores torch's default device.
    return torch.tensor(with_class[None], dtype=torch.float32)


def resized_positions(positions: Tensor, grid: PatchGrid, wanted: PatchGrid) -> Tensor:
    """Return the position table for another number of patches.

    Rows and columns are interpolated (bicubic, corners aligned); another number of time steps is computed
    anew. As published.

    Args:
        positions: (1, 1 + N, dim), the table of `grid`.
        grid: of `positions`.
        wanted: of the result.

    Returns:
        (1, 1 + M, dim) float32, on the device of `positions`; `positions` itself if the grids are equal.
    """
    if wanted == grid:
        return positions
    dim = positions.shape[-1]
    if wanted[0] != grid[0]:
        grid = (wanted[0], grid[1], grid[2])
        positions = grid_positions(dim, grid).to(positions.device)
    positions = positions.float()  # bicubic weights in half precision would blur the table
    patches = positions[:, 1:].reshape(*grid, dim).permute(0, 3, 1, 2)
    patches = functional.interpolate(patches, size=wanted[1:], mode="bicubic", align_corners=True)
    patches = patches.permute(0, 2, 3, 1).reshape(1, -1, dim)
    return torch.cat((positions[:, :1], patches), dim=1)


class CoordinateEncoder(nn.Module):
    """The encoding of two coordinates of a whole scene, half of a token each.

    Args:
        dim: width of a token; a multiple of 4.
        learned_scale: whether the weight of the encoding is a parameter (starts at 0.1) or the constant 1.
    """

    scale: Tensor

    def __init__(self, dim: int, *, learned_scale: bool) -> None:
        super().__init__()
        self.dim = dim
        if learned_scale:
            self.scale = nn.Parameter(torch.full((1,), 0.1))
        else:
            self.register_buffer("scale", torch.ones(1))

    def forward(self, coordinates: Tensor) -> Tensor:
        """Map coordinates (..., 2) to encodings (..., dim) float32."""
        # Always in float32: in bfloat16 the year 2021 would be 2016 or 2024.
        return self.scale.float() * _coordinate_waves(self.dim // 2, coordinates.float()).flatten(-2)


def _coordinate_waves(dim: int, values: Tensor) -> Tensor:
    """Return sin-cos waves of any numbers: (...) to (..., dim) float32."""
    steps = torch.arange(dim // 2, dtype=torch.float32, device=values.device)
    # In this order and precision a year times a frequency rounds as in the published code.
    frequency = 1.0 / WAVELENGTH_BASE ** (steps / (dim / 2.0))
    angle = values.unsqueeze(-1) * frequency
    return torch.cat((torch.sin(angle), torch.cos(angle)), dim=-1)
