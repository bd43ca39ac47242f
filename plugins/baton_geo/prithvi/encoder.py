"""The Prithvi encoder: a vision transformer over patches of space and time.

Written after the published `prithvi_mae.py` and timm's vision transformer block, with their parameter names.
There is no masking as in the pre-training: every patch is encoded.

Positions are a fixed 3-D sin-cos table, and encodings of date and place: the 1-D encoding is that of
"Attention Is All You Need" (arXiv 1706.03762, section 3.5), sines first, then cosines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from baton_geo.prithvi.config import PrithviConfig

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


class PatchEmbed(nn.Module):
    """The embedding of a series of images as patches, one token each."""

    def __init__(self, config: PrithviConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.proj = nn.Conv3d(config.in_chans, config.embed_dim, kernel_size=size, stride=size)
        nn.init.xavier_uniform_(self.proj.weight.view(config.embed_dim, -1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Map (B, C, T, H, W) to (B, patches, D), by time, row and column."""
        tokens: Tensor = self.proj(pixels).flatten(2).transpose(1, 2)
        return tokens


class Attention(nn.Module):
    """Self-attention of every token with every token."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N, D)."""
        batch, count, dim = tokens.shape
        qkv = self.qkv(tokens).reshape(batch, count, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, count, dim))
        return out


class Mlp(nn.Module):
    """The block's two-layer perceptron."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.fc2(functional.gelu(self.fc1(tokens)))
        return out


class Block(nn.Module):
    """A transformer block with layer norms before attention and perceptron."""

    def __init__(self, config: PrithviConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.norm1 = nn.LayerNorm(dim, eps=config.norm_eps)
        self.attn = Attention(dim, config.num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=config.norm_eps)
        self.mlp = Mlp(dim, int(dim * config.mlp_ratio))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attn(self.norm1(tokens))
        out: Tensor = tokens + self.mlp(self.norm2(tokens))
        return out


class PrithviEncoder(nn.Module):
    """The encoder: images with their dates and place to tokens."""

    pos_embed: Tensor

    def __init__(self, config: PrithviConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.embed_dim
        self.patch_embed = PatchEmbed(config)
        if config.has_time:
            self.temporal_embed_enc = CoordinateEncoder(dim, learned_scale=config.coords_scale_learn)
        if config.has_location:
            self.location_embed_enc = CoordinateEncoder(dim, learned_scale=config.coords_scale_learn)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        nn.init.normal_(self.cls_token, std=0.02)
        self.register_buffer("pos_embed", grid_positions(dim, config.grid))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.apply(_initialise)

    def forward(
        self, pixels: Tensor, temporal_coords: Tensor | None = None, location_coords: Tensor | None = None
    ) -> Tensor:
        """Encode a batch: the last block's tokens, after the last layer norm.

        Args:
            pixels: (B, C, T, H, W), normalised, in the dtype of the parameters. Any T, H and W that the
                patch size divides: positions are interpolated for sizes other than `img_size`.
            temporal_coords: (B, T, 2) float32: year, day of the year (1 is 1 January). Not used if None, or
                if the model has no time encoding; of a batch, not where the year is 0.
            location_coords: (B, 2) float32: latitude, longitude in degrees. Not used if None, or if the model
                has no location encoding; of a batch, not where the latitude is none.

        Returns:
            (B, 1 + t * h * w, D) in the dtype of `pixels`: the class token, then the patches by time, row,
            column.

        Raises:
            ValueError: a shape does not fit the configuration.
        """
        return self.features(pixels, (len(self.blocks) - 1,), temporal_coords, location_coords)[0]

    def features(
        self,
        pixels: Tensor,
        wanted: Sequence[int],
        temporal_coords: Tensor | None = None,
        location_coords: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the tokens of some blocks; as published, the last layer norm is applied to the last block's
        alone.

        Args:
            wanted: blocks, from 0; -1 is the last.
        """
        grid = self.config.grid_of(pixels.shape)
        tokens = self.patch_embed(pixels)
        positions = resized_positions(self.pos_embed, self.config.grid, grid)
        where = positions[:, 1:].expand(len(pixels), -1, -1)
        if self.config.has_time and temporal_coords is not None:
            _require(temporal_coords, (len(pixels), grid[0], 2), "temporal_coords")
            frames: Tensor = self.temporal_embed_enc(temporal_coords)
            frames = frames * (temporal_coords[..., :1] > 0)  # year 0: the date is unknown
            where = where + frames.repeat_interleave(grid[1] * grid[2], dim=1)
        if self.config.has_location and location_coords is not None:
            _require(location_coords, (len(pixels), 2), "location_coords")
            place: Tensor = self.location_embed_enc(location_coords)
            place = place * (location_coords[:, :1].abs() <= 90)  # beyond the poles: the place is unknown
            where = where + place.unsqueeze(1)
        first = (self.cls_token + positions[:, :1].to(tokens.dtype)).expand(len(pixels), -1, -1)
        tokens = torch.cat((first, tokens + where.to(tokens.dtype)), dim=1)
        count = len(self.blocks)
        places = [block % count for block in wanted]
        found: dict[int, Tensor] = {}
        for place in range(max(places) + 1):
            tokens = self.blocks[place](tokens)
            if place in places:
                found[place] = self.norm(tokens) if place == count - 1 else tokens
        return [found[place] for place in places]


def _require(coordinates: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(coordinates.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(coordinates.shape)}, must be {shape}")


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
