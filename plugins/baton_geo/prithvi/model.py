"""The Prithvi model: encoder, necks, decoder and head, from images to class scores or values per pixel.

It is put together as TerraTorch's `PixelWiseModel` is (IBM, Apache-2.0), with its parameter names. `skip` is
our extension.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton_geo.prithvi.config import PrithviConfig
from baton_geo.prithvi.decoders import (
    Norm2d,
    Pyramid,
    RegressionHead,
    SegmentationHead,
    decoder_of,
    pyramid_channels,
)
from baton_geo.prithvi.encoder import PrithviEncoder


def tokens_to_image(tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Map tokens (B, 1 + t * h * w, D) to an image (B, t * D, h, w): no class token, time as channels."""
    times, rows, columns = grid
    batch, _, dim = tokens.shape
    patches = tokens[:, 1:].reshape(batch, times, rows, columns, dim)
    return patches.permute(0, 1, 4, 2, 3).reshape(batch, times * dim, rows, columns)


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


class PrithviEmbedder(nn.Module):
    """A Prithvi-EO encoder alone: a vector for each patch, the mean over the time steps."""

    def __init__(self, config: PrithviConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = PrithviEncoder(config)

    def forward(
        self,
        pixel_values: Tensor,
        temporal_coords: Tensor | None = None,
        location_coords: Tensor | None = None,
    ) -> Tensor:
        """Map pixels (B, C, T, H, W) to vectors (B, D, h, w); arguments as of `PrithviSegmenter`."""
        times, rows, columns = self.config.grid_of(pixel_values.shape)
        tokens: Tensor = self.encoder(pixel_values, temporal_coords, location_coords)
        patches = tokens[:, 1:].unflatten(1, (times, rows, columns))
        return patches.mean(dim=1).permute(0, 3, 1, 2)


class PrithviSegmenter(nn.Module):
    """A Prithvi-EO model of one output per pixel, with TerraTorch's parameter names.

    Raises:
        ValueError: the configuration has no decoder.
    """

    def __init__(self, config: PrithviConfig) -> None:
        super().__init__()
        if config.decoder is None:
            raise ValueError("pretrained_cfg.segmentation: missing; an encoder alone cannot segment")
        self.config, self._blocks = config, config.decoder.blocks
        decoder = config.decoder
        self.encoder = PrithviEncoder(config)
        width = config.grid[0] * config.embed_dim
        widths = [width] * len(decoder.blocks)
        if decoder.pyramid is not None:
            self.neck = nn.ModuleDict({str(decoder.pyramid): Pyramid(width)})
            widths = pyramid_channels(width)
        self.decoder = decoder_of(decoder, widths)
        inputs = decoder.channels[-1] + (decoder.skip_channels if decoder.skip else 0)
        self.head = (
            RegressionHead(inputs, decoder)
            if decoder.task == "regression"
            else SegmentationHead(inputs, decoder.head_channels, decoder.num_classes)
        )
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
        """Compute the class scores, or the value, of each pixel.

        As published, sides that are no multiple of two patches are filled up by reflection, and what belongs
        to the filling is cut off again.

        Args:
            pixel_values: (B, C, T, H, W), normalised, in the dtype of the parameters; T is `num_frames`, H
                and W are larger than a patch.
            temporal_coords: (B, T, 2) float32 [year, day of the year] or None.
            location_coords: (B, 2) float32 [latitude, longitude] or None.

        Returns:
            (B, classes, H, W) logits, or (B, 1, H, W) values, in the dtype of `pixel_values`.

        Raises:
            ValueError: a shape does not fit the configuration.
        """
        padded = self._padded(pixel_values)
        grid = self.config.grid_of(padded.shape)
        if grid[0] != self.config.grid[0]:
            raise ValueError(f"pixel_values: {padded.shape[2]} time steps, must be {self.config.num_frames}")
        blocks = self.encoder.features(padded, self._blocks, temporal_coords, location_coords)
        features = [tokens_to_image(tokens, grid) for tokens in blocks]
        if self.config.decoder and self.config.decoder.pyramid is not None:
            features = self.neck[str(self.config.decoder.pyramid)](features)
        image: Tensor = self.decoder(features)
        size = padded.shape[-2:]
        if self.skip is None:
            out = _sized(self.head(image), size)
        else:
            out = self.head(torch.cat((_sized(image, size), self.skip(padded)), dim=1))
        return out[..., : pixel_values.shape[-2], : pixel_values.shape[-1]]

    def _padded(self, pixels: Tensor) -> Tensor:
        self.config.check_pixels(pixels.shape)
        sides = zip(pixels.shape[-2:], self.config.patch_size[1:], strict=True)
        down, right = (-side % (2 * patch) for side, patch in sides)
        if not (down or right):
            return pixels
        flat = functional.pad(pixels.flatten(1, 2), (0, right, 0, down), mode="reflect")
        return flat.unflatten(1, pixels.shape[1:3])


def _sized(image: Tensor, size: torch.Size) -> Tensor:
    """Resize to the input's size, as the published model does (`rescale`)."""
    if image.shape[-2:] == size:
        return image
    return functional.interpolate(image, size=size, mode="bilinear")
