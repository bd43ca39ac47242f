"""Refuse unsuitable images and tensors while a request's inputs are processed.

An exception here is an error of one request. An exception in the model would end the engine for everybody, so
shapes and dtypes are checked before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.parse import ImageProcessorItems, ModalityDataItems, MultiModalDataParser

ImageCheck = Callable[[int, int], None]
"""Takes width and height in pixels; raises `VLLMValidationError` if they are not suitable."""
MAX_PROPORTION = 100
"""Maximum ratio of longer to shorter side. Processors scale up the shorter: a line would take gigabytes."""


class ImageParser(MultiModalDataParser):
    """Accepts images of suitable sizes and refuses embeddings."""

    def __init__(self, check: ImageCheck) -> None:
        super().__init__()
        self._check = check

    def _parse_image_data(self, data: Any) -> ModalityDataItems | None:
        items = super()._parse_image_data(data)
        if items is None:
            return None
        if not isinstance(items, ImageProcessorItems):
            raise refusal("this model takes images, not image embeddings; send the image itself")
        for index in range(len(items)):
            if (
                items.get(index) is not None
            ):  # None: sent by its uuid alone, and checked when it was first sent
                self._check(*items.get_image_size(index))
        return items


def refusal(message: str) -> VLLMValidationError:
    """Return an error of the request alone (HTTP 400)."""
    return VLLMValidationError(message, parameter="image")


def require_proportions(width: int, height: int) -> None:
    """Refuse an image that is empty or longer than `MAX_PROPORTION` times its shorter side.

    Raises:
        VLLMValidationError: the size is not suitable.
    """
    short, long = sorted((width, height))
    if short < 1:
        raise refusal(f"an image of {width} x {height} pixels is empty")
    if long > MAX_PROPORTION * short:
        raise refusal(
            f"an image of {width} x {height} pixels is more than {MAX_PROPORTION} times as long as wide"
        )


def require_tensor(found: object, shape: Sequence[int], dtype: torch.dtype, name: str) -> None:
    """Refuse a processor's output that does not have the shape and dtype that the model takes.

    Raises:
        VLLMValidationError: `found` is not such a tensor.
    """
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != tuple(shape) or found.dtype != dtype:
        what = (
            f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        )
        raise refusal(
            f"{name} must be {dtype} {list(shape)}, not {what}: mm_processor_kwargs do not fit the model"
        )


def require_row(token: int, vocabulary: int) -> None:
    """Refuse a model whose image token has no row in its text model's embedding.

    vLLM would serve it until a prompt with that token asks for `prompt_logprobs`, or contains it as text.

    Raises:
        ValueError: the image token is beyond the vocabulary.
    """
    if token >= vocabulary:
        raise ValueError(
            f"image token {token} is beyond the vocabulary of {vocabulary}: the embedding needs a row for it"
        )
