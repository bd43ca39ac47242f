"""The decoders and heads that TerraTorch puts behind an encoder: features of some blocks to scores a pixel.

Written after the published descriptions of TerraTorch (IBM, Apache-2.0) and, for the U-Net, of
segmentation_models.pytorch 0.5, which TerraTorch pins; parameters have their names. A channel list of the FCN
decoder and `skip` (see `model.py`) are our extensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton_geo.prithvi.config import DecoderConfig

NORM_EPS = 1e-6
ACTIVATIONS: Mapping[str, type[nn.Module]] = MappingProxyType(
    {
        "Identity": nn.Identity,
        "ReLU": nn.ReLU,
        "Sigmoid": nn.Sigmoid,
        "Softplus": nn.Softplus,
        "Tanh": nn.Tanh,
    }
)


class Norm2d(nn.Module):
    """Layer norm over the channels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(channels, eps=NORM_EPS)

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same shape."""
        out: Tensor = self.ln(image.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return out


def _enlarging(channels: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Make the learned parts of a pyramid: one enlarges a feature four times, the other twice."""
    four = nn.Sequential(
        nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2),
        nn.BatchNorm2d(channels // 2),
        nn.GELU(),
        nn.ConvTranspose2d(channels // 2, channels // 4, kernel_size=2, stride=2),
    )
    return four, nn.Sequential(nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2))


def _pyramid(four: nn.Module, two: nn.Module, features: Sequence[Tensor]) -> list[Tensor]:
    first, second, third, fourth = features
    return [four(first), two(second), third, functional.max_pool2d(fourth, 2)]


class Pyramid(nn.Module):
    """TerraTorch's neck `LearnedInterpolateToPyramidal`: four equal features become four, two, one and half
    as large.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fpn1, self.fpn2 = _enlarging(channels)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        return _pyramid(self.fpn1, self.fpn2, features)


def pyramid_channels(channels: int) -> list[int]:
    """Compute the widths of a `Pyramid` of four features of one width."""
    return [channels // 4, channels // 2, channels, channels]


def _doubling(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, kernel_size=2, stride=2),
        nn.Conv2d(outputs, outputs, kernel_size=3, padding=1),
        Norm2d(outputs),
        nn.GELU(),
    )


class FCNDecoder(nn.Module):
    """A decoder that doubles the resolution of the last feature once per number in `channels`."""

    def __init__(self, inputs: int, channels: Sequence[int]) -> None:
        super().__init__()
        widths = (inputs, *channels)
        self.convs = nn.Sequential(*(_doubling(a, b) for a, b in pairwise(widths)))

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Map (B, inputs, h, w) to (B, channels[-1], h * 2 ** n, w * 2 ** n)."""
        out: Tensor = self.convs(features[-1])
        return out


class ConvNorm(nn.Module):
    """A convolution without bias, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, image: Tensor) -> Tensor:
        return functional.relu(self.norm(self.conv(image)))


class UperNetDecoder(nn.Module):
    """UPerNet (arXiv 1807.10221): pooled context of the last feature, added down a pyramid, all levels
    joined.

    Args:
        inputs: widths of the features.
    """

    def __init__(self, inputs: Sequence[int], config: DecoderConfig) -> None:
        super().__init__()
        if config.scale_modules:  # the neck `Pyramid`, as part of the decoder
            self.fpn1, self.fpn2 = _enlarging(inputs[0])
            inputs = pyramid_channels(inputs[0])
        self._scales, self._align = config.scale_modules, config.align_corners
        width = config.channels[0]
        self.psp_modules = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), ConvNorm(inputs[-1], width, 1))
            for size in config.pool_scales
        )
        self.bottleneck = ConvNorm(inputs[-1] + len(config.pool_scales) * width, width, 3)
        self.lateral_convs = nn.ModuleList(ConvNorm(channels, width, 1) for channels in inputs[:-1])
        self.fpn_convs = nn.ModuleList(ConvNorm(width, width, 3) for _ in inputs[:-1])
        self.fpn_bottleneck = ConvNorm(len(inputs) * width, width, 3)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Map features, the finest first, to an image of the finest one's size."""
        levels = _pyramid(self.fpn1, self.fpn2, features[:4]) if self._scales else list(features)
        last = levels[-1]
        pooled = [self._resized(module(last), last) for module in self.psp_modules]
        laterals = [conv(level) for conv, level in zip(self.lateral_convs, levels[:-1], strict=True)]
        laterals.append(self.bottleneck(torch.cat((last, *pooled), dim=1)))
        for level in range(len(laterals) - 1, 0, -1):
            below = laterals[level - 1]
            laterals[level - 1] = below + self._resized(laterals[level], below)
        outs = [conv(image) for conv, image in zip(self.fpn_convs, laterals[:-1], strict=True)]
        outs.append(laterals[-1])
        joined: Tensor = self.fpn_bottleneck(torch.cat([self._resized(out, outs[0]) for out in outs], dim=1))
        return joined

    def _resized(self, image: Tensor, like: Tensor) -> Tensor:
        if image.shape[-2:] == like.shape[-2:]:
            return image
        return functional.interpolate(image, size=like.shape[-2:], mode="bilinear", align_corners=self._align)


class UNetBlock(nn.Module):
    """One step of the U-Net: enlarge, join the finer feature, two convolutions."""

    def __init__(self, inputs: int, outputs: int, *, norm: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            _conv_relu(inputs, outputs, norm=norm),
            _conv_relu(outputs, outputs, norm=norm),
        )

    def forward(self, image: Tensor, size: torch.Size, finer: Tensor | None) -> Tensor:
        image = functional.interpolate(image, size=size, mode="nearest")
        if finer is not None:
            image = torch.cat((image, finer), dim=1)
        out: Tensor = self.conv2(self.conv1(image))
        return out


def _conv_relu(inputs: int, outputs: int, *, norm: bool) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=not norm)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs) if norm else nn.Identity(), nn.ReLU())


class UNet(nn.Module):
    """The blocks of the U-Net, from the coarsest feature to the finest; the last one joins none."""

    def __init__(self, inputs: Sequence[int], channels: Sequence[int], *, norm: bool) -> None:
        super().__init__()
        coarsest, *finer = reversed(inputs)
        befores = (coarsest, *channels[:-1])
        self.blocks = nn.ModuleList(
            UNetBlock(before + joined, after, norm=norm)
            for before, joined, after in zip(befores, (*finer, 0), channels, strict=True)
        )

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        image, *finer = reversed(features)
        for block, joined in zip(self.blocks, (*finer, None), strict=True):
            image = block(image, features[0].shape[-2:] if joined is None else joined.shape[-2:], joined)
        return image


class UNetDecoder(nn.Module):
    """The U-Net under TerraTorch's name for it, `decoder.decoder`."""

    def __init__(self, inputs: Sequence[int], channels: Sequence[int], *, norm: bool) -> None:
        super().__init__()
        self.decoder = UNet(inputs, channels, norm=norm)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Map features, the finest first, to an image of the finest one's size."""
        out: Tensor = self.decoder(features)
        return out


def decoder_of(config: DecoderConfig, inputs: Sequence[int]) -> nn.Module:
    """Build the decoder of features of these widths."""
    if config.kind == "upernet":
        return UperNetDecoder(inputs, config)
    if config.kind == "unet":
        return UNetDecoder(inputs, config.channels, norm=config.batch_norm)
    return FCNDecoder(inputs[-1], config.channels)


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


class Upscale(nn.Module):
    """A learned doubling of the resolution: convolution, pixel shuffle, batch norm, ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4 * channels, kernel_size=3, padding=1)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, image: Tensor) -> Tensor:
        return functional.relu(self.bn(functional.pixel_shuffle(self.conv(image), 2)))


class RegressionHead(nn.Module):
    """Learned doublings, a 3 x 3 convolution per number in `channels`, then one value per pixel."""

    def __init__(self, inputs: int, config: DecoderConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if config.upscale:
            layers.append(nn.Sequential(*(Upscale(inputs) for _ in range(config.upscale))))
        widths = (inputs, *config.head_channels)
        if config.head_channels:
            layers.append(nn.Sequential(*(self._conv(a, b) for a, b in pairwise(widths))))
        layers += [nn.Identity(), nn.Conv2d(widths[-1], 1, kernel_size=1)]  # the first is their dropout
        self.head = nn.Sequential(*layers)
        self.final_act = ACTIVATIONS[config.final_act]()

    @staticmethod
    def _conv(inputs: int, outputs: int) -> nn.Sequential:
        conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, 1, H', W')."""
        out: Tensor = self.final_act(self.head(image))
        return out
