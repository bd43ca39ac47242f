"""Random geospatial models for tests that need a real engine but no real answers."""

from __future__ import annotations

import json
from pathlib import Path

TILE, OVERLAP = 64, 8
COLOURS = ([230, 230, 220], [40, 120, 200], [90, 160, 60])


def config(bands: tuple[str, ...], classes: int = 3) -> dict[str, object]:
    """A config.json in the published layout, with our card."""
    segmentation = {
        "decoder": "FCNDecoder",
        "num_classes": classes,
        "channels": [16, 16, 8],
        "head_channels": [8],
    }
    pretrained = {
        "img_size": TILE,
        "num_frames": 1,
        "patch_size": [1, 8, 8],
        "in_chans": len(bands),
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 4,
        "mlp_ratio": 2,
        "coords_encoding": [],
        "segmentation": segmentation,
    }
    card = {
        "bands": [{"name": name, "mean": 100.0, "std": 50.0} for name in bands],
        "classes": [{"name": f"kind {n}", "colour": COLOURS[n]} for n in range(classes)],
        "tile": TILE,
        "overlap": OVERLAP,
    }
    return {
        "model_type": "baton_prithvi",
        "architectures": ["BatonPrithviSegmenter"],
        "dtype": "float32",
        "pretrained_cfg": pretrained,
        "io_processor_plugin": "baton_geo",
        "baton_geo": card,
    }


def make(folder: Path, bands: tuple[str, ...]) -> None:
    """Write the model with random weights, the same every time."""
    import torch
    from safetensors.torch import save_file

    from baton_geo.prithvi import PrithviConfig, PrithviSegmenter

    described = config(bands)
    with torch.random.fork_rng():
        torch.manual_seed(len(bands))
        model = PrithviSegmenter(PrithviConfig.from_hf(described))
    for name, parameter in model.head.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)  # or one class would win nearly everywhere
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors"
    )
