"""The Prithvi segmentation model: encoder, FCN decoder and head, from images to class scores per pixel.

The decoder is written after TerraTorch's `ReshapeTokensToImage` neck, `FCNDecoder` and `SegmentationHead`
(IBM, Apache-2.0), with their parameter names. `skip` and a list of channels are our extensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton_geo.prithvi.config import DecoderConfig, PrithviConfig
from baton_geo.prithvi.encoder import PrithviEncoder

NORM_EPS = 1e-6


class Norm2d(nn.Module):
    """Layer norm over the channels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(channels, eps=NORM_EPS)

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same shape."""
        out: Tensor = self.ln(image.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return out


def tokens_to_image(tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Map tokens (B, 1 + t * h * w, D) to an image (B, t * D, h, w): no class token, time as channels."""
    times, rows, columns = grid
    batch, _, dim = tokens.shape
    patches = tokens[:, 1:].reshape(batch, times, rows, columns, dim)
    return patches.permute(0, 1, 4, 2, 3).reshape(batch, times * dim, rows, columns)


def _doubling(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, kernel_size=2, stride=2),
        nn.Conv2d(outputs, outputs, kernel_size=3, padding=1),
        Norm2d(outputs),
        nn.GELU(),
    )


class FCNDecoder(nn.Module):
    """A decoder that doubles the resolution once per number in `channels`."""

    def __init__(self, inputs: int, channels: Sequence[int]) -> None:
        super().__init__()
        widths = (inputs, *channels)
        self.convs = nn.Sequential(*(_doubling(a, b) for a, b in pairwise(widths)))

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, inputs, h, w) to (B, channels[-1], h * 2 ** n, w * 2 ** n)."""
        out: Tensor = self.convs(image)
        return out


class SegmentationHead(nn.Module):
    """A 3 x 3 convolution per number in `channels`, then one score per class."""

    def __init__(self, inputs: int, channels: Sequence[int], classes: int) -> None:
        super().__init__()
        widths = (inputs, *channels)
        before = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, kernel_size=3, padding=1), nn.ReLU())
                for a, b in pairwise(widths)
            )
        )
        # The second place is the published head's dropout.
        self.head = nn.Sequential(before, nn.Identity(), nn.Conv2d(widths[-1], classes, kernel_size=1))

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, classes, H, W)."""
        out: Tensor = self.head(image)
        return out


class Skip(nn.Module):
    """Our extension: features of the raw pixels, for edges sharper than a patch."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(inputs, channels, kernel_size=3, padding=1), Norm2d(channels), nn.GELU()
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Map (B, C, T, H, W) to (B, channels, H, W)."""
        out: Tensor = self.stem(pixels.transpose(1, 2).flatten(1, 2))
        return out


def head_inputs(config: DecoderConfig) -> int:
    """Return the number of channels that the head takes."""
    return config.channels[-1] + (config.skip_channels if config.skip else 0)


class PrithviSegmenter(nn.Module):
    """A Prithvi-EO segmentation model, with TerraTorch's parameter names.

    Raises:
        ValueError: the configuration has no decoder.
    """

    def __init__(self, config: PrithviConfig) -> None:
        super().__init__()
        if config.decoder is None:
            raise ValueError("pretrained_cfg.segmentation: missing; an encoder alone cannot segment")
        self.config = config
        decoder = config.decoder
        self.encoder = PrithviEncoder(config)
        self.decoder = FCNDecoder(config.grid[0] * config.embed_dim, decoder.channels)
        self.head = SegmentationHead(head_inputs(decoder), decoder.head_channels, decoder.num_classes)
        self.skip = Skip(config.num_frames * config.in_chans, decoder.skip_channels) if decoder.skip else None

    def encode(
        self,
        pixel_values: Tensor,
        temporal_coords: Tensor | None = None,
        location_coords: Tensor | None = None,
    ) -> Tensor:
        """Return the encoder's tokens, (B, 1 + t * h * w, D); see `PrithviEncoder.forward`."""
        tokens: Tensor = self.encoder(pixel_values, temporal_coords, location_coords)
        return tokens

    def forward(
        self,
        pixel_values: Tensor,
        temporal_coords: Tensor | None = None,
        location_coords: Tensor | None = None,
    ) -> Tensor:
        """Compute the class scores of each pixel.

        Args:
            pixel_values: (B, C, T, H, W), normalised, in the dtype of the parameters; T is `num_frames`, H
                and W are multiples of the patch size.
            temporal_coords: (B, T, 2) float32 [year, day of the year] or None.
            location_coords: (B, 2) float32 [latitude, longitude] or None.

        Returns:
            (B, classes, H, W) in the dtype of `pixel_values`: logits.

        Raises:
            ValueError: a shape does not fit the configuration.
        """
        grid = self.config.grid_of(pixel_values.shape)
        if grid[0] != self.config.grid[0]:
            raise ValueError(
                f"pixel_values: {pixel_values.shape[2]} time steps, must be {self.config.num_frames}"
            )
        tokens = self.encode(pixel_values, temporal_coords, location_coords)
        features: Tensor = self.decoder(tokens_to_image(tokens, grid))
        size = pixel_values.shape[-2:]
        if self.skip is None:
            return _sized(self.head(features), size)
        logits: Tensor = self.head(torch.cat((_sized(features, size), self.skip(pixel_values)), dim=1))
        return logits


def _sized(image: Tensor, size: torch.Size) -> Tensor:
    """Resize to the input's size, as the published model does where doubling misses it (14-pixel patches)."""
    if image.shape[-2:] == size:
        return image
    return functional.interpolate(image, size=size, mode="bilinear")
