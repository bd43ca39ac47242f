"""Images before any model sees them: what is refused, at the last place where a refusal harms nobody else.

Whatever raises here is one request's error. What raises in a model ends the engine for everybody, so shapes
and types are settled in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.parse import ImageProcessorItems, ModalityDataItems, MultiModalDataParser

ImageCheck = Callable[[int, int], None]
"""Looks at a width and a height in pixels, and raises `VLLMValidationError`."""
MAX_PROPORTION = 100
"""Longer side over shorter. Processors scale the shorter one up: a line of pixels would become gigabytes."""


class ImageParser(MultiModalDataParser):
    """Takes images, of sizes a model can take; nothing else."""

    def __init__(self, check: ImageCheck) -> None:
        super().__init__()
        self._check = check

    def _parse_image_data(self, data: Any) -> ModalityDataItems | None:
        items = super()._parse_image_data(data)
        if items is None:
            return None
        if not isinstance(items, ImageProcessorItems):
            raise refusal("this model takes images, not their embeddings")
        for index in range(len(items)):
            if items.get(index) is not None:  # else it is named by its uuid alone, and was looked at then
                self._check(*items.get_image_size(index))
        return items


def refusal(message: str) -> VLLMValidationError:
    """An error that is the request's own (HTTP 400)."""
    return VLLMValidationError(message, parameter="image")


def require_proportions(width: int, height: int) -> None:
    """Refuse empty images and lines of pixels."""
    short, long = sorted((width, height))
    if short < 1:
        raise refusal(f"an image of {width} x {height} pixels is empty")
    if long > MAX_PROPORTION * short:
        raise refusal(
            f"an image of {width} x {height} pixels is more than {MAX_PROPORTION} times as long as wide"
        )


def require_tensor(found: object, shape: Sequence[int], dtype: torch.dtype, name: str) -> None:
    """Refuse what an image processor made of odd options: the model takes one shape and type."""
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != tuple(shape) or found.dtype != dtype:
        what = (
            f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        )
        raise refusal(
            f"{name} must be {dtype} {list(shape)}, not {what}: mm_processor_kwargs do not fit the model"
        )


def require_row(token: int, vocabulary: int) -> None:
    """Refuse, at the start, a model whose image token has no row in its text model's embedding.

    vLLM would serve it, until a prompt with that token asks for `prompt_logprobs`, or a user types it.

    Raises:
        ValueError: the image token is beyond the vocabulary.
    """
    if token >= vocabulary:
        raise ValueError(f"image token {token} is beyond the vocabulary of {vocabulary}: it needs a row")
