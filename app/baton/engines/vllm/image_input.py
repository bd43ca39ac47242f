"""Read how a model takes images, and find placeholder tokens of a prompt that belong to no image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.engines.port import ImageInput
from baton.images.image_position import ImagePosition

IMAGE = "image"
TOKEN_NAMES = ("image_token_id", "image_token_index")
"""Keys of a model's configuration for the token that stands for an image."""


def image_input(client: Any) -> ImageInput:
    """Return how an engine's model takes images.

    Args:
        client: the engine's `AsyncLLM`.
    """
    config = client.model_config
    processor = client.renderer.mm_processor if config.is_multimodal_model else None
    if processor is None or client.renderer.tokenizer is None:
        return ImageInput()
    limit = processor.info.allowed_mm_limits.get(IMAGE, 0)
    found = (getattr(config.hf_config, name, None) for name in TOKEN_NAMES)
    tokens = frozenset(token for token in found if isinstance(token, int))
    written = [client.renderer.tokenizer.decode([token]).strip() for token in tokens]
    written.append((_placeholder(config) or "").strip())
    texts = tuple(dict.fromkeys(text for text in written if text))
    return ImageInput(limit, tokens, texts, named=_named(config.multimodal_config))


def _named(config: Any) -> bool:
    """Return whether vLLM's caches use our digest of an image; with processor settings they hash both."""
    return not (config.mm_processor_kwargs or config.media_io_kwargs)


def _placeholder(config: Any) -> str | None:
    """Return the text that vLLM puts into a chat for an image, where the model's template does not."""
    from vllm.model_executor.model_loader import (
        get_model_cls,  # takes seconds, and vLLM has imported it by now
    )

    try:
        text = get_model_cls(config).get_placeholder_str(IMAGE, 1)
    except ValueError:  # the model has none
        return None
    return text if isinstance(text, str) else None


def stray_placeholders(prompt: Any, tokens: frozenset[int]) -> int:
    """Count the image placeholder tokens of a rendered prompt that belong to no image."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if not ids or not any(token in ids for token in tokens):
        return 0
    ranges = [item for items in (prompt.get("mm_placeholders") or {}).values() for item in items]
    theirs = [ids[item.offset : item.offset + item.length] for item in ranges]
    return sum(ids.count(token) - sum(part.count(token) for part in theirs) for token in tokens)


def image_positions(prompt: Any) -> list[ImagePosition] | None:
    """Return where images stand in a rendered prompt, in order.

    None: it holds no token ids, or more than token ids and images.
    """
    if not isinstance(prompt, Mapping) or prompt.get("prompt_token_ids") is None:
        return None
    if prompt.get("prompt_embeds") is not None or prompt.get("multi_modal_data"):
        return None
    ranges, names = prompt.get("mm_placeholders") or {}, prompt.get("mm_hashes") or {}
    if not ranges.keys() <= {IMAGE} or ranges.keys() != names.keys():
        return None
    found = [
        ImagePosition(name, each.offset, each.length)
        for name, each in zip(names.get(IMAGE, ()), ranges.get(IMAGE, ()), strict=True)
    ]
    return sorted(found, key=lambda image: image.offset)
