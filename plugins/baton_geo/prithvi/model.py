"""The Prithvi segmentation model: encoder and FCN decoder, from images to class scores per pixel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton_geo.prithvi.config import PrithviConfig
from baton_geo.prithvi.decoder import FCNDecoder, SegmentationHead, Skip, head_inputs, tokens_to_image
from baton_geo.prithvi.encoder import PrithviEncoder


class PrithviSegmenter(nn.Module):
    """A Prithvi-EO segmentation model, with TerraTorch's parameter names.

    Args:
        config: with a decoder, e.g. from `PrithviConfig.from_hf`.

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
