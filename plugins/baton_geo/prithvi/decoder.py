"""The FCN segmentation decoder: from tokens to a feature map, to full resolution, to class scores.

Written after TerraTorch's `ReshapeTokensToImage` neck, `FCNDecoder` and `SegmentationHead` (IBM, Apache-2.0),
with their parameter names. `skip` and a list of channels are our extensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from baton_geo.prithvi.config import DecoderConfig

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
