"""A fine-tune in the layout that vLLM's examples name, narrow and with random weights of the published names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from geo.prithvi.page_of_torch import Page
from geo.prithvi.published import SEGMENTATION

NAME = "ibm-nasa-geospatial/Prithvi-EO-2.0-300M-TL-Sen1Floods11"
TILE = 64


def narrow_config() -> dict[str, Any]:
    """Its config.json: as TerraTorch's guide to vLLM has it, but for widths and the declared tile."""
    config: dict[str, Any] = json.loads(json.dumps(SEGMENTATION["vllm_guide"]))
    held = config["pretrained_cfg"]
    held["input"] = {
        "target": "pixel_values",
        "data": {"pixel_values": {"type": "torch.Tensor", "shape": [6, TILE, TILE]}},
    }
    held["model"]["init_args"]["model_args"] |= {
        "backbone_embed_dim": 32, "backbone_num_heads": 2, "backbone_img_size": TILE, "decoder_channels": 16,
    }  # fmt: skip
    return config


def make_published(folder: Path) -> Page:
    """Write the model as it is published, config.json and a `.pt` file of Lightning's; return its page of torch."""
    config = narrow_config()
    page = Page(config["pretrained_cfg"]["model"]["init_args"]["model_args"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {f"model.{name}": value for name, value in page.random().items()}
    torch.save({"state_dict": weights, "epoch": 3}, folder / "Prithvi-EO-V2-300M-TL-Sen1Floods11.pt")
    return page
