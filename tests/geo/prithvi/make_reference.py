"""Makes `reference/`: what the published Prithvi-EO source answers, for the parity tests to compare with.

Run by a person, in an environment of its own, when a new release of that source is to be compared with:

    python3.11 -m venv reference-env
    reference-env/bin/pip install torch==2.12.1 torchvision==0.27.1 timm==1.0.31 einops==0.8.2 \\
        safetensors==0.8.0 numpy==2.4.6
    reference-env/bin/pip download --no-deps terratorch==1.2.13
    python3 -m zipfile -e terratorch-1.2.13-py3-none-any.whl published
    reference-env/bin/python tests/geo/prithvi/make_reference.py published/terratorch tests/geo/prithvi/reference

Only three files of TerraTorch are run (IBM, Apache-2.0): `models/backbones/prithvi_mae.py`, the maintained copy
of the file published with the models, `models/decoders/fcn_decoder.py` and `models/heads/segmentation_head.py`.
TerraTorch itself, with what it depends on, is not installed; its registry is stood in for. Run again, it gives
the same tensors; the order of the metadata may differ.

Each case is one `.safetensors` file: `weights/...` under the names of TerraTorch's segmentation model,
`pretraining/...` the tensors of the masked auto-encoder it does not keep, `input/...`, `output/...`, and in
the metadata the config.json and what made it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

SOURCES = (
    "models/backbones/prithvi_mae.py",
    "models/decoders/fcn_decoder.py",
    "models/heads/segmentation_head.py",
)
SEED = 20
PIXEL_SCALE = 32  # pixels are stored as int8 and divided by this: exact, and a quarter of the size
BANDS = ["BLUE", "GREEN", "RED", "NIR_NARROW", "SWIR_1", "SWIR_2"]
COMMON = {
    "in_chans": 6, "depth": 2, "num_heads": 4, "bands": BANDS,
    "decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2, "mask_ratio": 0.75, "norm_pix_loss": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    # 1.0: three time steps, no coordinates; doubling ends at the input's size.
    "v1": {
        "pretrained_cfg": {
            **COMMON, "embed_dim": 32, "img_size": 32, "num_frames": 3, "patch_size": [1, 8, 8], "mlp_ratio": 4.0,
            "coords_encoding": [], "coords_scale_learn": False,
            "segmentation": {"decoder": "FCNDecoder", "num_classes": 2, "channels": 8, "num_convs": 3},
        },
    },
    # 2.0-TL: dates and place with learned scale; as with 600M's 14-pixel patches, doubling overshoots.
    "v2_tl": {
        "pretrained_cfg": {
            **COMMON, "embed_dim": 48, "img_size": 28, "num_frames": 2, "patch_size": [1, 7, 7], "mlp_ratio": 2.0,
            "coords_encoding": ["time", "location"], "coords_scale_learn": True,
            "segmentation": {
                "decoder": "FCNDecoder", "num_classes": 3, "channels": 8, "num_convs": 3, "head_channels": [6],
            },
        },
    },
}  # fmt: skip


class _Registry:
    """What `terratorch.registry` is needed for: a decorator that gives its class back."""

    @staticmethod
    def register(item: type) -> type:
        return item


def published(folder: Path) -> dict[str, ModuleType]:
    """The published modules, by file name without suffix."""
    registry = ModuleType("terratorch.registry")
    registry.TERRATORCH_DECODER_REGISTRY = _Registry()  # type: ignore[attr-defined]
    sys.modules["terratorch"] = ModuleType("terratorch")
    sys.modules["terratorch.registry"] = registry
    modules = {}
    for source in SOURCES:
        name = Path(source).stem
        spec = importlib.util.spec_from_file_location(name, folder / source)
        if spec is None or spec.loader is None:
            raise ValueError(f"{source}: not a Python file")
        modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    return modules


def shake(model: nn.Module, generator: torch.Generator) -> None:
    """Random values everywhere, also where training starts from zeros and ones, so that nothing hides."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1 and "token" not in name:
                parameter.copy_(noise / (parameter[0].numel() ** 0.5))
            elif name.endswith(("norm1.weight", "norm2.weight", "norm.weight", "ln.weight")):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("scale"):
                parameter.copy_(
                    0.5 + 0.1 * noise
                )  # of dates and places: well above what training starts from
            else:
                parameter.copy_(0.3 * noise)


def inputs(config: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Two scenes of the model's size; one wider; one of a single time step; dates and places."""
    bands, frames, size = config["in_chans"], config["num_frames"], config["img_size"]
    wide = size + 2 * config["patch_size"][2]

    def pixels(*shape: int) -> Tensor:
        return torch.randint(-96, 96, shape, generator=generator, dtype=torch.int8)

    made = {
        "pixels": pixels(2, bands, frames, size, size),
        "pixels_wide": pixels(1, bands, frames, size, wide),
        "pixels_one_frame": pixels(1, bands, 1, size, size),
    }
    if config["coords_encoding"]:
        days = [
            [[2019.0 + scene + step, 17.0 + 171.0 * step] for step in range(frames)] for scene in range(2)
        ]
        made["temporal_coords"] = torch.tensor(days)
        made["location_coords"] = torch.tensor([[47.25, 8.5], [-33.875, -70.625]])
    return made


def outputs(encoder: Any, decoder: nn.Module, head: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the published code answers: last tokens, and class scores rescaled as its segmentation model does."""
    scaled = {
        name: tensor.float() / PIXEL_SCALE for name, tensor in given.items() if name.startswith("pixels")
    }
    coordinates = (given.get("temporal_coords"), given.get("location_coords"))
    features = encoder.forward_features(scaled["pixels"], *coordinates)
    scores = head(decoder(encoder.prepare_features_for_image_model(features)))
    size = scaled["pixels"].shape[-2:]
    if scores.shape[-2:] != size:
        scores = nn.functional.interpolate(scores, size=size, mode="bilinear")
    made = {
        "tokens": features[-1],
        "logits": scores,
        "tokens_wide": encoder.forward_features(scaled["pixels_wide"])[-1],
        "tokens_one_frame": encoder.forward_features(scaled["pixels_one_frame"])[-1],
    }
    if coordinates[0] is not None:
        made["tokens_without_coords"] = encoder.forward_features(scaled["pixels"])[-1]
    return made


def norms(model: nn.Module) -> list[float]:
    """What its layer norms add to a variance; too little to show in the outputs."""
    return sorted({layer.eps for layer in model.modules() if isinstance(layer, nn.LayerNorm)})


def case(modules: dict[str, ModuleType], config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that is stored of one case: tensors, and the layer norms' constants."""
    generator = torch.Generator().manual_seed(SEED)
    segmentation = config["segmentation"]
    mae = modules["prithvi_mae"].PrithviMAE(**config)
    encoder = mae.encoder
    decoder = modules["fcn_decoder"].FCNDecoder(
        encoder.out_channels, channels=segmentation["channels"], num_convs=segmentation["num_convs"]
    )
    head = modules["segmentation_head"].SegmentationHead(
        segmentation["channels"], segmentation["num_classes"], channel_list=segmentation.get("head_channels")
    )
    parts = {"encoder": encoder, "decoder": decoder, "head": head}
    for part in (mae, decoder, head):
        shake(part.eval(), generator)
    stored = {
        f"weights/{name}.{key}": value
        for name, part in parts.items()
        for key, value in part.state_dict().items()
    }
    stored |= {f"pretraining/decoder.{key}": value for key, value in mae.decoder.state_dict().items()}
    given = inputs(config, generator)
    stored |= {f"input/{name}": value for name, value in given.items()}
    with torch.inference_mode():
        answered = outputs(encoder, decoder, head, given)
    stored |= {f"output/{name}": value for name, value in answered.items()}
    kept = {key: value.contiguous() for key, value in stored.items()}
    return kept, {"encoder": norms(encoder), "decoder": norms(decoder)}


def main(folder: Path, out: Path) -> None:
    """Writes one file for each case."""
    modules = published(folder)
    made_by = {
        "sources": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in SOURCES},
        "torch": torch.__version__,
        "timm": timm.__version__,
        "seed": SEED,
    }
    for name, config in CASES.items():
        stored, eps = case(modules, config["pretrained_cfg"])
        metadata = {
            "config": json.dumps(config),
            "made_by": json.dumps(made_by),
            "norm_eps": json.dumps(eps),
            "pixel_scale": str(PIXEL_SCALE),
        }
        file = out / f"{name}.safetensors"
        save_file(stored, file, metadata)
        file.chmod(0o644)
        print(f"{name}: {len(stored)} tensors, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
