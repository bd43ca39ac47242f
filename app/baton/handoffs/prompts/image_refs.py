"""Replace the images in a chat's messages by references, which conversations store and templates render."""

from __future__ import annotations

from dataclasses import replace

from baton.engines.port import Json
from baton.images.placed_image import PlacedImage


def with_image_refs(messages: list[Json]) -> list[Json]:
    """Return messages whose images are references without data.

    The engine's template writes them as it writes messages with image data.

    Example:
        >>> image = {"type": "image_url", "image_url": {"url": "data:..."}, "uuid": "ab12"}
        >>> with_image_refs([{"role": "user", "content": [image]}])
        [{'role': 'user', 'content': [{'type': 'image_url', 'image_url': None, 'uuid': 'ab12'}]}]
    """
    return [
        message | {"content": [_image_ref(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def count_images(messages: list[Json]) -> int:
    """Return how many images messages hold."""
    parts = (part for message in messages for part in _parts(message))
    return sum(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def shift_images(images: list[PlacedImage], by: int) -> list[PlacedImage]:
    """Return a prompt's images, moved by as many tokens as were put before the prompt."""
    return [replace(image, offset=image.offset + by) for image in images]


def _image_ref(part: object) -> object:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return part
    return {"type": "image_url", "image_url": None, "uuid": part["uuid"]}


def _parts(message: Json) -> list[object]:
    content = message.get("content")
    return content if isinstance(content, list) else []
