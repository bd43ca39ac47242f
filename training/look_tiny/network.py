"""Build tower and projector, which are trained; load the frozen text model; prepare pixels."""

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

from training.look_tiny.architecture import PROJECTOR, SIDE, TEXT_WIDTH, VISION


class VisionEncoder(nn.Module):
    """The vision tower and the projector.

    Args:
        seed: seed of the initial weights.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        text = {"model_type": "llama", "hidden_size": TEXT_WIDTH}
        config = LlavaConfig(vision_config=dict(VISION), text_config=text, **PROJECTOR)
        self.vision_tower = SiglipVisionModel(SiglipVisionConfig(**VISION))
        self.multi_modal_projector = LlavaMultiModalProjector(config)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return image tokens (batch, tokens, text width) for normalised pixels (batch, 3, side, side)."""
        seen = self.vision_tower(pixel_values=pixels, output_hidden_states=True)
        tokens: Tensor = self.multi_modal_projector(seen.hidden_states[-1])
        return tokens


def load_text_model(folder: Path) -> Any:
    """Load the prepared SmolLM2 in bfloat16, frozen."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def shrunk(picture: Image.Image) -> npt.NDArray[np.uint8]:
    """Resize a picture as the image processor does: uint8 (side, side, 3)."""
    return np.asarray(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def normalised(pictures: npt.NDArray[np.uint8]) -> Tensor:
    """Scale uint8 (batch, side, side, 3) to float32 (batch, 3, side, side) between -1 and 1."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
