"""HuggingFace's own models and processors: what vLLM is held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    FuyuForCausalLM,
    FuyuProcessor,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

CLASSES: dict[str, tuple[Any, Any]] = {
    "llava": (LlavaForConditionalGeneration, LlavaProcessor),
    "fuyu": (FuyuForCausalLM, FuyuProcessor),
    "blip-2": (Blip2ForConditionalGeneration, Blip2Processor),
}


class Reference:
    """A model in fp32 with its processor."""

    def __init__(self, folder: Path) -> None:
        model, processor = CLASSES[AutoConfig.from_pretrained(folder).model_type]
        self._model = model.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = processor.from_pretrained(folder)

    def inputs(self, text: str, images: list[Image.Image], **options: Any) -> dict[str, Any]:
        """As HuggingFace's users make them: token ids `[1, tokens]`, pixels or patches."""
        found = dict(self.processor(images=images or None, text=text, return_tensors="pt", **options))
        if isinstance(found["input_ids"], list):
            found["input_ids"] = torch.stack(found["input_ids"])
        if "image_patches" in found:  # of a single one the processor squeezes the dimension away, and then
            values = (
                self._model.config.patch_size**2 * self._model.config.num_channels
            )  # the model falls over
            found["image_patches"] = found["image_patches"].reshape(-1, values)
        return {
            name: value
            for name, value in found.items()
            if name in ("input_ids", "pixel_values", "image_patches")
        }

    @torch.inference_mode()
    def logprobs(self, inputs: dict[str, Any], said: list[int]) -> torch.Tensor:
        """After every token but the last of prompt and answer: `[positions, vocabulary]`, float64."""
        ids = torch.cat([inputs["input_ids"], torch.tensor([said], dtype=torch.long)], dim=1)
        given = {name: value for name, value in inputs.items() if name != "input_ids"}
        logits = self._model(input_ids=ids, **given).logits[0, :-1]
        return torch.log_softmax(logits.double(), dim=-1)
