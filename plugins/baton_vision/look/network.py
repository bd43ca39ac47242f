"""The parts that are trained: the tower and the projector; and the frozen text model they speak to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlavaConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from baton_vision.look.design import PROJECTOR, SIDE, TEXT_WIDTH, VISION


class Eyes(nn.Module):
    """Tower and projector.

    Args:
        seed: of the weights.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        text = {"model_type": "llama", "hidden_size": TEXT_WIDTH}
        config = LlavaConfig(vision_config=dict(VISION), text_config=text, **PROJECTOR)
        self.vision_tower = SiglipVisionModel(SiglipVisionConfig(**VISION))
        self.multi_modal_projector = LlavaMultiModalProjector(config)

    def forward(self, pixels: Tensor) -> Tensor:
        """Image tokens, (batch, tokens, text width), of normalised pixels (batch, 3, side, side)."""
        seen = self.vision_tower(pixel_values=pixels, output_hidden_states=True)
        tokens: Tensor = self.multi_modal_projector(seen.hidden_states[-1])
        return tokens


def load_text_model(folder: Path) -> Any:
    """The prepared SmolLM2 in bfloat16, frozen."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def shrunk(picture: Image.Image) -> npt.NDArray[np.uint8]:
    """What the image processor's resizing leaves: (side, side, 3)."""
    return np.asarray(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def normalised(pictures: npt.NDArray[np.uint8]) -> Tensor:
    """float32 (batch, 3, side, side), -1 to 1."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
