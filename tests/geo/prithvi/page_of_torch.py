"""Published fine-tunes in a page of torch: names and shapes of their parameters, and their outputs.

Written from TerraTorch's description of its factory, necks, decoders and heads, and apart from the product, so that
the product can be held against it: plain tensors under the published names, functions of torch, no modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as f

Shapes = dict[str, tuple[int, ...]]
SIZES = {
    "prithvi_eo_tiny": (256, 4, 4, 16), "prithvi_eo_v1_100": (768, 12, 12, 16), "prithvi_eo_v2_300": (1024, 24, 16, 16),
    "prithvi_eo_v2_300_tl": (1024, 24, 16, 16), "prithvi_eo_v2_600": (1280, 32, 16, 14),
    "prithvi_eo_v2_600_tl": (1280, 32, 16, 14),
}  # fmt: skip


class Page:
    """One published model: `args` are its `model_args`, `task` is "segmentation" or "regression"."""

    def __init__(self, args: Mapping[str, Any], task: str = "segmentation") -> None:
        self.args, self.task = args, task
        self.dim, self.depth, self.heads, self.patch = SIZES[args["backbone"]]
        self.dim = args.get("backbone_embed_dim", self.dim)
        self.depth = args.get("backbone_depth", self.depth)
        self.heads = args.get("backbone_num_heads", self.heads)
        self.frames = args.get("backbone_num_frames", args.get("num_frames", 1))
        self.bands = len(args.get("backbone_bands", args.get("bands", range(6))))
        self.size = args.get("backbone_img_size", 224)
        both = ["time", "location"] if args["backbone"].endswith("_tl") else []
        self.coords = args.get("backbone_coords_encoding", both)
        self.learned = bool(both)
        self.necks = [neck["name"] for neck in args.get("necks", [])]
        self.blocks = list(args.get("backbone_out_indices", range(self.depth)))
        for neck in args.get("necks", []):
            if neck["name"] == "SelectIndices":
                self.blocks = [self.blocks[index] for index in neck["indices"]]
        self.pyramid = "LearnedInterpolateToPyramidal" in self.necks
        self.scaled = bool(args.get("decoder_scale_modules"))

    def widths(self) -> list[int]:
        """Channels of the features that the decoder itself joins."""
        wide = self.dim * self.frames
        return (
            [wide // 4, wide // 2, wide, wide] if self.pyramid or self.scaled else [wide] * len(self.blocks)
        )

    def shapes(self) -> Shapes:
        return dict([*self._encoder(), *self._neck(), *self._decoder(), *self._head()])

    def _encoder(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        d, e = self.dim, "encoder."
        yield f"{e}cls_token", (1, 1, d)
        yield f"{e}patch_embed.proj.weight", (d, self.bands, 1, self.patch, self.patch)
        yield f"{e}patch_embed.proj.bias", (d,)
        for coordinate, name in (("time", "temporal_embed_enc"), ("location", "location_embed_enc")):
            if coordinate in self.coords and self.learned:
                yield f"{e}{name}.scale", (1,)
        for block in range(self.depth):
            b = f"{e}blocks.{block}."
            for name, shape in (
                ("norm1", (d,)), ("norm2", (d,)), ("attn.qkv", (3 * d, d)), ("attn.proj", (d, d)),
                ("mlp.fc1", (4 * d, d)), ("mlp.fc2", (d, 4 * d)),
            ):  # fmt: skip
                yield f"{b}{name}.weight", shape
                yield f"{b}{name}.bias", shape[:1]
        yield f"{e}norm.weight", (d,)
        yield f"{e}norm.bias", (d,)

    def _fpn(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        wide = self.dim * self.frames
        yield from _conv(f"{prefix}fpn1.0", (wide, wide // 2, 2, 2), bias=wide // 2)
        yield from _norm(f"{prefix}fpn1.1", wide // 2)
        yield from _conv(f"{prefix}fpn1.3", (wide // 2, wide // 4, 2, 2), bias=wide // 4)
        yield from _conv(f"{prefix}fpn2.0", (wide, wide // 2, 2, 2), bias=wide // 2)

    def _neck(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.pyramid:
            yield from self._fpn(f"neck.{self.necks.index('LearnedInterpolateToPyramidal')}.")

    def _decoder(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        kind, out = self.args["decoder"], self.args.get("decoder_channels", 256)
        widths = self.widths()
        if kind == "FCNDecoder":
            for step in range(self.args.get("decoder_num_convs", 4)):
                before = widths[-1] if step == 0 else out
                yield from _conv(f"decoder.convs.{step}.0", (before, out, 2, 2), bias=out)
                yield from _conv(f"decoder.convs.{step}.1", (out, out, 3, 3), bias=out)
                yield f"decoder.convs.{step}.2.ln.weight", (out,)
                yield f"decoder.convs.{step}.2.ln.bias", (out,)
        elif kind == "UNetDecoder":
            joined = [*widths[::-1][1:], 0]
            for step, (before, skip, after) in enumerate(
                zip([widths[-1], *out[:-1]], joined, out, strict=True)
            ):
                for number, inputs in (("conv1", before + skip), ("conv2", after)):
                    name = f"decoder.decoder.blocks.{step}.{number}"
                    yield from _conv(f"{name}.0", (after, inputs, 3, 3))
                    yield from _norm(f"{name}.1", after)
        else:
            if self.scaled:
                yield from self._fpn("decoder.")
            for number in range(4):
                yield from _cna(f"decoder.psp_modules.{number}.1", out, widths[-1], 1)
            yield from _cna("decoder.bottleneck", out, widths[-1] + 4 * out, 3)
            for level, width in enumerate(widths[:-1]):
                yield from _cna(f"decoder.lateral_convs.{level}", out, width, 1)
                yield from _cna(f"decoder.fpn_convs.{level}", out, out, 3)
            yield from _cna("decoder.fpn_bottleneck", out, len(widths) * out, 3)

    def _head(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        out = self.args.get("decoder_channels", 256)
        inputs = out if isinstance(out, int) else out[-1]
        listed, place = self.args.get("head_channel_list"), 0
        if self.task == "regression" and self.args.get("head_learned_upscale_layers"):
            for step in range(self.args["head_learned_upscale_layers"]):
                yield from _conv(f"head.head.0.{step}.conv", (4 * inputs, inputs, 3, 3), bias=4 * inputs)
                yield from _norm(f"head.head.0.{step}.bn", inputs)
            place = 1
        for step, width in enumerate(listed or []):
            last = self.task == "segmentation"
            yield from _conv(f"head.head.{place}.{step}.0", (width, inputs, 3, 3), bias=width if last else 0)
            if not last:
                yield from _norm(f"head.head.{place}.{step}.1", width)
            inputs = width
        place += bool(listed) or self.task == "segmentation"
        classes = self.args["num_classes"] if self.task == "segmentation" else 1
        yield from _conv(f"head.head.{place + 1}", (classes, inputs, 1, 1), bias=classes)

    def random(self, seed: int = 0) -> dict[str, Tensor]:
        """Random weights of the published names and shapes."""
        made = torch.Generator().manual_seed(seed)
        weights = {}
        for name, shape in self.shapes().items():
            noise = torch.randn(shape, generator=made)
            if name.endswith("running_var"):
                weights[name] = 1 + 0.3 * noise.abs()
            elif name.endswith("scale"):
                weights[name] = 0.5 + 0.1 * noise
            elif len(shape) > 1 and "token" not in name:
                transposed = (
                    "convs." in name and name.endswith(".0.weight") and shape[-1] == 2
                ) or ".fpn" in name
                fan = shape[0] if transposed and shape[-1] == 2 else math.prod(shape[1:])
                weights[name] = noise * (2 / fan) ** 0.5
            elif name.endswith("weight"):
                weights[name] = 1 + 0.2 * noise
            else:
                weights[name] = 0.2 * noise
        return weights

    def output(
        self,
        w: Mapping[str, Tensor],
        pixels: Tensor,
        dates: Tensor | None = None,
        place: Tensor | None = None,
    ) -> Tensor:
        """Scores or values of pixels (B, C, T, H, W): (B, classes, H, W)."""
        height, width = pixels.shape[-2:]
        down, right = (-side % (2 * self.patch) for side in (height, width))
        filled = torch.stack([f.pad(image, (0, right, 0, down), mode="reflect") for image in pixels])
        tokens = self._tokens(w, filled, dates, place)
        grid = (filled.shape[-2] // self.patch, filled.shape[-1] // self.patch)
        images = [
            one[:, 1:].reshape(len(one), self.frames, *grid, self.dim).permute(0, 1, 4, 2, 3).flatten(1, 2)
            for one in (tokens[block] for block in self.blocks)
        ]
        if self.pyramid:
            images = _pyramid(w, f"neck.{self.necks.index('LearnedInterpolateToPyramidal')}.", images)
        elif self.scaled:
            images = _pyramid(w, "decoder.", images[:4])
        image = self._headed(w, self._decoded(w, images))
        if image.shape[-2:] != filled.shape[-2:]:
            image = f.interpolate(image, size=filled.shape[-2:], mode="bilinear")
        return image[..., :height, :width]

    def _tokens(self, w: Mapping[str, Tensor], pixels: Tensor, dates: Any, place: Any) -> list[Tensor]:
        d, e = self.dim, "encoder."
        x = f.conv3d(
            pixels,
            w[f"{e}patch_embed.proj.weight"],
            w[f"{e}patch_embed.proj.bias"],
            stride=(1, self.patch, self.patch),
        )
        times, rows, columns = x.shape[-3:]
        x = x.flatten(2).transpose(1, 2)
        own = self.size // self.patch
        table = _table(d, times, own, own)
        if (rows, columns) != (own, own):
            one = table.reshape(times, own, own, d).permute(0, 3, 1, 2)
            table = f.interpolate(one, size=(rows, columns), mode="bicubic", align_corners=True)
            table = table.permute(0, 2, 3, 1).reshape(-1, d)
        x = x + table
        if "time" in self.coords and dates is not None:
            scale = w.get(f"{e}temporal_embed_enc.scale", torch.ones(1))
            x = x + (scale * _of_two(d, dates)).repeat_interleave(rows * columns, dim=1)
        if "location" in self.coords and place is not None:
            x = x + w.get(f"{e}location_embed_enc.scale", torch.ones(1)) * _of_two(d, place)[:, None]
        x = torch.cat((w[f"{e}cls_token"].expand(len(x), -1, -1), x), dim=1)
        found = []
        for block in range(self.depth):
            b = f"{e}blocks.{block}."

            def linear(name: str, t: Tensor, b: str = b) -> Tensor:
                return f.linear(t, w[f"{b}{name}.weight"], w[f"{b}{name}.bias"])

            def norm(name: str, t: Tensor, b: str = b) -> Tensor:
                return f.layer_norm(t, (d,), w[f"{b}{name}.weight"], w[f"{b}{name}.bias"], 1e-5)

            q, k, v = linear("attn.qkv", norm("norm1", x)).chunk(3, dim=-1)
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
            mixed = ((q @ k.transpose(-1, -2)) / math.sqrt(d // self.heads)).softmax(-1) @ v
            x = x + linear("attn.proj", mixed.transpose(1, 2).flatten(2))
            x = x + linear("mlp.fc2", f.gelu(linear("mlp.fc1", norm("norm2", x))))
            found.append(x)
        found[-1] = f.layer_norm(x, (d,), w[f"{e}norm.weight"], w[f"{e}norm.bias"], 1e-5)
        return found

    def _decoded(self, w: Mapping[str, Tensor], images: list[Tensor]) -> Tensor:
        kind = self.args["decoder"]
        if kind == "FCNDecoder":
            x = images[-1]
            for step in range(self.args.get("decoder_num_convs", 4)):
                c = f"decoder.convs.{step}."
                x = f.conv_transpose2d(x, w[f"{c}0.weight"], w[f"{c}0.bias"], stride=2)
                x = f.conv2d(x, w[f"{c}1.weight"], w[f"{c}1.bias"], padding=1).movedim(1, -1)
                x = f.layer_norm(x, x.shape[-1:], w[f"{c}2.ln.weight"], w[f"{c}2.ln.bias"], 1e-6).movedim(
                    -1, 1
                )
                x = f.gelu(x)
            return x
        if kind == "UNetDecoder":
            x = images[-1]
            for step in range(len(images)):
                skip = images[-2 - step] if step + 1 < len(images) else None
                x = f.interpolate(x, size=(images[0] if skip is None else skip).shape[-2:], mode="nearest")
                x = x if skip is None else torch.cat((x, skip), dim=1)
                for number in ("conv1", "conv2"):
                    c = f"decoder.decoder.blocks.{step}.{number}."
                    x = f.conv2d(x, w[f"{c}0.weight"], padding=1)
                    x = _batch_normed(w, f"{c}1", x).relu()
            return x
        last = images[-1]
        pooled = [last]
        for number, side in enumerate((1, 2, 3, 6)):
            one = _cna_of(w, f"decoder.psp_modules.{number}.1", f.adaptive_avg_pool2d(last, side))
            pooled.append(f.interpolate(one, size=last.shape[-2:], mode="bilinear", align_corners=True))
        top = _cna_of(w, "decoder.bottleneck", torch.cat(pooled, dim=1))
        levels = [_cna_of(w, f"decoder.lateral_convs.{n}", image) for n, image in enumerate(images[:-1])] + [
            top
        ]
        for n in range(len(levels) - 2, -1, -1):
            size = levels[n].shape[-2:]
            levels[n] = levels[n] + f.interpolate(
                levels[n + 1], size=size, mode="bilinear", align_corners=True
            )
        outs = [_cna_of(w, f"decoder.fpn_convs.{n}", level) for n, level in enumerate(levels[:-1])] + [
            levels[-1]
        ]
        size = outs[0].shape[-2:]
        outs = [f.interpolate(out, size=size, mode="bilinear", align_corners=True) for out in outs]
        return _cna_of(w, "decoder.fpn_bottleneck", torch.cat(outs, dim=1))

    def _headed(self, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        listed, place = self.args.get("head_channel_list") or [], 0
        if self.task == "regression" and self.args.get("head_learned_upscale_layers"):
            for step in range(self.args["head_learned_upscale_layers"]):
                c = f"head.head.0.{step}."
                x = f.conv2d(x, w[f"{c}conv.weight"], w[f"{c}conv.bias"], padding=1)
                x = _batch_normed(w, f"{c}bn", f.pixel_shuffle(x, 2)).relu()
            place = 1
        for step in range(len(listed)):
            c = f"head.head.{place}.{step}."
            x = f.conv2d(x, w[f"{c}0.weight"], w.get(f"{c}0.bias"), padding=1)
            x = (x if self.task == "segmentation" else _batch_normed(w, f"{c}1", x)).relu()
        place += bool(listed) or self.task == "segmentation"
        x = f.conv2d(x, w[f"head.head.{place + 1}.weight"], w[f"head.head.{place + 1}.bias"])
        return x.relu() if self.args.get("head_final_act") == "torch.nn.ReLU" else x


def _conv(name: str, shape: tuple[int, ...], bias: int = 0) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", (bias,)


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.{part}", (width,)


def _cna(name: str, out: int, inputs: int, side: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _conv(f"{name}.conv", (out, inputs, side, side))
    yield from _norm(f"{name}.norm", out)


def _batch_normed(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    mean, var, gain, bias = (
        w[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (var + 1e-5).sqrt() * gain + bias


def _cna_of(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = w[f"{name}.conv.weight"]
    return _batch_normed(w, f"{name}.norm", f.conv2d(x, weight, padding=weight.shape[-1] // 2)).relu()


def _pyramid(w: Mapping[str, Tensor], prefix: str, images: Sequence[Tensor]) -> list[Tensor]:
    first, second, third, fourth = images
    x = f.conv_transpose2d(first, w[f"{prefix}fpn1.0.weight"], w[f"{prefix}fpn1.0.bias"], stride=2)
    x = f.gelu(_batch_normed(w, f"{prefix}fpn1.1", x))
    x = f.conv_transpose2d(x, w[f"{prefix}fpn1.3.weight"], w[f"{prefix}fpn1.3.bias"], stride=2)
    y = f.conv_transpose2d(second, w[f"{prefix}fpn2.0.weight"], w[f"{prefix}fpn2.0.bias"], stride=2)
    return [x, y, third, f.max_pool2d(fourth, 2)]


def _waves(dim: int, positions: Tensor) -> Tensor:
    omega = 10000.0 ** -(torch.arange(dim // 2, dtype=torch.float64) / (dim / 2))
    angles = positions.double()[..., None] * omega
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def _table(dim: int, times: int, rows: int, columns: int) -> Tensor:
    t, h, c = torch.meshgrid(torch.arange(times), torch.arange(rows), torch.arange(columns), indexing="ij")
    part = dim // 16
    waves = (_waves(6 * part, c.flatten()), _waves(6 * part, h.flatten()), _waves(4 * part, t.flatten()))
    return torch.cat(waves, dim=1).float()


def _of_two(dim: int, coordinates: Tensor) -> Tensor:
    steps = torch.arange(dim // 4, dtype=torch.float32)
    omega = 1.0 / 10000.0 ** (steps / (dim // 2 / 2.0))
    angles = coordinates[..., None] * omega
    return torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(-2)
